//! Where the reference data is, and what is in it.
//!
//! A small part ships with the repository, in `tests/golden/`: a model of each family, so that numbers are checked
//! anywhere. The whole is not part of the repository. Where it is, all of it must be: a test that found nothing to
//! compare with would pass. Where it is not, a test that needs more than the part says that it has checked nothing.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::skipped::not_checked;

/// Set to a folder, it is used in place of the one beside the repository.
pub const VARIABLE: &str = "GEMMA4C_GOLDEN";

/// Small random models of the shapes Gemma 4 comes in: `NAME.gguf`, `NAME.golden.safetensors`, `NAME.tokens.json`.
pub const TEXT: [&str; 10] = [
    "d_tiny_bf16",
    "d_tiny_q4_k",
    "d_tiny_q4_k_m_lq",
    "d_tiny_q6_k",
    "d_tiny_q8_0",
    "e_tiny_q4_0",
    "e_tiny_q4_0_lq",
    "e_tiny_q8_0",
    "m_tiny_q4_0",
    "m_tiny_q8_0",
];
/// Two channels of their residual are thousands of times the others, as in trained models.
pub const MASSIVE: [&str; 2] = ["massive/o_tiny_q4_0", "massive/o_tiny_q8_0"];
/// Random models in low-bit types: logits alone.
pub const FORMATS: [&str; 14] = [
    "formats/d_iq2_s",
    "formats/d_iq2_xs",
    "formats/d_iq3_s",
    "formats/d_mxfp4",
    "formats/d_nvfp4",
    "formats/d_q3_k",
    "formats/e_mix_ud_q3_k_xl",
    "formats/e_q2_k",
    "formats/m_iq2_xxs",
    "formats/m_iq3_xxs",
    "formats/m_mix_iq2_m",
    "formats/m_mxfp4_moe",
    "formats/m_nvfp4",
    "formats/m_q2_k",
];
/// Folders of safetensors, in every form that weights are published in.
pub const CHECKPOINTS: [&str; 11] = [
    "checkpoints/d_fp8",
    "checkpoints/d_fp8_block",
    "checkpoints/d_modelopt_nvfp4",
    "checkpoints/d_nvfp4",
    "checkpoints/e_bf16",
    "checkpoints/e_int4",
    "checkpoints/e_int4_asym",
    "checkpoints/e_mobile",
    "checkpoints/m_bf16",
    "checkpoints/m_fp8",
    "checkpoints/m_modelopt_nvfp4",
];
/// A small model that was trained.
pub const TRAINED: [&str; 2] = ["trained/austen_q4_0", "trained/austen_q8_0"];

/// Small models with the towers that read pictures.
const VISION: [&str; 13] = [
    "v_tiny_d.0.png",
    "v_tiny_d.1.png",
    "v_tiny_d.gguf",
    "v_tiny_d.golden.safetensors",
    "v_tiny_d.mmproj.gguf",
    "v_tiny_e.gguf",
    "v_tiny_e.golden.safetensors",
    "v_tiny_e.mmproj.gguf",
    "v_tiny_e.png",
    "v_tiny_u.gguf",
    "v_tiny_u.golden.safetensors",
    "v_tiny_u.mmproj.gguf",
    "v_tiny_u.png",
];

/// Drafters for two of the models.
const ASSISTANT: [&str; 4] = [
    "d_tiny_assistant_bf16.gguf",
    "d_tiny_assistant_bf16.golden.safetensors",
    "e_tiny_assistant_q8_0.gguf",
    "e_tiny_assistant_q8_0.golden.safetensors",
];

/// Vocabulary and chat templates of the real models.
const REAL: [&str; 7] = [
    "ggml-vocab-gemma-4.gguf",
    "ggml-vocab-gemma-4.gguf.inp",
    "ggml-vocab-gemma-4.gguf.out",
    "google-gemma-4-31B-it.jinja",
    "google-gemma-4-31B-it.chat.json",
    "google-gemma-4-31B-it-interleaved.jinja",
    "google-gemma-4-31B-it-interleaved.chat.json",
];

/// A model as llama.cpp's own tools make it, and conversations for its chat template.
const CONVERTED: [&str; 2] = ["a_e2b.Q4_K_M.gguf", "chat.json"];

/// All models with golden logits, as paths below the folder without their endings.
pub fn models() -> Vec<&'static str> {
    [&CHECKPOINTS[..], &FORMATS, &TEXT, &MASSIVE, &TRAINED].concat()
}

/// Where a model is: a file, or a checkpoint's folder.
pub fn model(folder: &Path, name: &str) -> PathBuf {
    if name.starts_with("checkpoints/") { folder.join(name) } else { folder.join(format!("{name}.gguf")) }
}

/// The folder with all of the data. Without one, the test says that it has checked nothing.
pub fn folder() -> Option<PathBuf> {
    let folder = whole();
    if folder.is_none() {
        not_checked(NEEDS_ALL);
    }
    folder
}

/// The folder with all of the data, or the one that ships with the repository and has a part: ask what it [`has`].
pub fn some() -> PathBuf {
    whole().unwrap_or_else(|| repository().join("tests/golden"))
}

/// Whether [`some`] has a model. Without it, the test says that it has not checked that one.
pub fn has(name: &str) -> bool {
    let is_there = model(&some(), name).exists();
    if !is_there {
        not_checked(&format!("{name}: {NEEDS_ALL}"));
    }
    is_there
}

/// Those of `names` that [`some`] has.
pub fn of(names: &[&'static str]) -> Vec<&'static str> {
    names.iter().copied().filter(|name| has(name)).collect()
}

const NEEDS_ALL: &str =
    "there is no reference data in ../shared/golden or $GEMMA4C_GOLDEN, and tests/golden has a part of it";

fn whole() -> Option<PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(find).clone()
}

fn find() -> Option<PathBuf> {
    let folder = match std::env::var_os(VARIABLE) {
        Some(given) => PathBuf::from(given),
        None => Some(repository().join("../shared/golden")).filter(|folder| folder.is_dir())?,
    };
    let missing: Vec<String> = expected().into_iter().filter(|file| !folder.join(file).is_file()).collect();
    assert!(
        missing.is_empty(),
        "{} should have the reference data, but lacks {}",
        folder.display(),
        missing.join(", ")
    );
    Some(folder)
}

/// The repository is the first folder upwards with a lock file: crates of the workspace have none.
fn repository() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.find(|folder| folder.join("Cargo.lock").is_file()).expect("a Cargo.lock")
}

/// Every file that a test reads.
fn expected() -> Vec<String> {
    let weights = |name: &str| match name.starts_with("checkpoints/") {
        true => format!("{name}/config.json"),
        false => format!("{name}.gguf"),
    };
    let of_models = models().into_iter().flat_map(|name| [weights(name), format!("{name}.golden.safetensors")]);
    let of_texts = TEXT.iter().map(|name| format!("{name}.tokens.json"));
    let of_pictures = VISION.iter().map(|name| format!("vision/{name}"));
    let of_drafters = ASSISTANT.iter().map(|name| format!("assistant/{name}"));
    let of_converter = CONVERTED.iter().map(|name| format!("converted/{name}"));
    let of_others = of_converter.chain(REAL.map(str::to_owned));
    of_models.chain(of_texts).chain(of_pictures).chain(of_drafters).chain(of_others).collect()
}
