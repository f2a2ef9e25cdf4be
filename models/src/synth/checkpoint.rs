//! Random models as checkpoints: folders of safetensors in the forms that are published, of the real shapes.
//!
//! They have the tensors of the same preset's file, under a checkpoint's names; matrices are codes and scales in tensors
//! of their own, experts one by one, vectors, tables and the router in bf16.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use gemma4c_blocks::DType;
use gemma4c_blocks::narrow::fp8_to_f32;
use half::bf16;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::error::SynthError;
use super::fill::Filler;
use super::inventory::{self, Fill, TensorSpec};
use super::preset::{Preset, Shape};
use super::random::Lanes;
use super::vocab::{Vocabulary, chat_template};
use crate::checkpoint::stored_name;
use crate::gguf::WriteError;

/// How the matrices of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// compressed-tensors, integers of 4 bits in groups of 32.
    W4A16,
    /// compressed-tensors, floats of 8 bits, a scale for each row.
    Fp8,
    /// ModelOpt, floats of 4 bits.
    ModelOptNvfp4,
}

impl Form {
    pub const ALL: [Form; 3] = [Form::W4A16, Form::Fp8, Form::ModelOptNvfp4];

    pub fn name(self) -> &'static str {
        match self {
            Form::W4A16 => "w4a16",
            Form::Fp8 => "fp8",
            Form::ModelOptNvfp4 => "modelopt-nvfp4",
        }
    }

    pub fn from_name(name: &str) -> Option<Form> {
        Form::ALL.into_iter().find(|form| form.name() == name)
    }
}

/// What is in a tensor of a checkpoint.
enum Content {
    /// Codes of 4 bits, none of them 0, so that their mean is the middle.
    Nibbles,
    /// Any bytes.
    Bytes,
    /// Floats of 8 bits below 2.
    Fp8,
    /// The same again and again.
    Repeated(Vec<u8>),
    /// Floats of 16 bits around zero.
    Levels(Filler),
    /// The same between two bounds.
    Between { low: f32, span: f32 },
}

struct Part {
    name: String,
    element: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    content: Content,
}

/// Bytes a thread makes before it writes them.
const PIECE: u64 = 1 << 20;
/// What the names of the text model begin with.
const PREFIX: &str = "model.language_model.";
/// Rms of the codes that [`Content::Nibbles`] makes, less 8; of floats of 4 bits.
const NIBBLE_RMS: f32 = 4.183;
const FP4_RMS: f32 = 2.926;
/// 1 as an e4m3.
const E4M3_ONE: u8 = 0x38;

/// Writes a checkpoint of these layers, or all, into a folder that need not be there, and returns its tensors and bytes.
pub fn write(
    preset: Preset,
    form: Form,
    layers: Option<u32>,
    seed: u64,
    folder: &Path,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(usize, u64), SynthError> {
    let shape = preset.shape(layers)?;
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| SynthError::from(WriteError::Io { path, source })
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let tokenizer = tokenizer(&shape);
    for (name, text) in [
        ("config.json", config(&shape, form).to_string()),
        ("generation_config.json", json!({"temperature": 1.0, "top_k": 64, "top_p": 0.95}).to_string()),
        ("tokenizer.json", tokenizer.to_string()),
        (
            "tokenizer_config.json",
            json!({"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}).to_string(),
        ),
        ("chat_template.jinja", chat_template(shape.ple == 0)),
    ] {
        fs::write(folder.join(name), text).map_err(failed(&folder.join(name)))?;
    }
    let mut parts: Vec<Part> =
        inventory::inventory(&shape, DType::BF16, None).iter().flat_map(|tensor| parts(tensor, form)).collect();
    // As writers of such files order them: the widest elements first.
    parts.sort_by(|a, b| width(b.element).cmp(&width(a.element)).then_with(|| a.name.cmp(&b.name)));
    let mut header = Map::new();
    let mut end = 0;
    let mut starts = Vec::new();
    for part in &parts {
        let entry = json!({"dtype": part.element, "shape": part.shape, "data_offsets": [end, end + part.bytes]});
        header.insert(part.name.clone(), entry);
        starts.push(end);
        end += part.bytes;
    }
    let mut text = Value::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let (path, partial) = (folder.join("model.safetensors"), folder.join("model.safetensors.partial"));
    let mut file = File::create(&partial).map_err(failed(&partial))?;
    let data = 8 + text.len() as u64;
    let start = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    file.write_all(&start).and_then(|()| file.set_len(data + end)).map_err(failed(&partial))?;
    fill(&parts, &starts, seed, (&file, data, &partial), progress)?;
    fs::rename(&partial, &path).map_err(failed(&path))?;
    Ok((parts.len(), data + end))
}

/// Fills all tensors on all cores.
fn fill(
    parts: &[Part],
    starts: &[u64],
    seed: u64,
    (file, data, path): (&File, u64, &Path),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), SynthError> {
    let total = parts.iter().map(|part| part.bytes).sum();
    let (done, failed) = (AtomicU64::new(0), Mutex::new(None));
    let pieces: Vec<(usize, u64)> =
        (0..parts.len()).flat_map(|at| (0..parts[at].bytes.div_ceil(PIECE)).map(move |piece| (at, piece))).collect();
    pieces.par_iter().for_each_init(
        || vec![0; PIECE as usize],
        |buffer, &(at, piece)| {
            let (part, offset) = (&parts[at], piece * PIECE);
            let out = &mut buffer[..PIECE.min(part.bytes - offset) as usize];
            let mut random = Lanes::new(seed, xxh3_64(part.name.as_bytes()), piece);
            part.content.fill(&mut random, offset, out);
            if let Err(source) = file.write_all_at(out, data + starts[at] + offset) {
                let error = WriteError::Io { path: path.into(), source };
                failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
            }
            progress(done.fetch_add(out.len() as u64, Ordering::Relaxed) + out.len() as u64, total);
        },
    );
    let failed = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    failed.map_or(Ok(()), |error| Err(error.into()))
}

impl Content {
    fn fill(&self, random: &mut Lanes, offset: u64, out: &mut [u8]) {
        match self {
            Content::Levels(filler) => return filler.fill(random, offset, out),
            Content::Repeated(bytes) => {
                return out.iter_mut().zip(bytes.iter().cycle()).for_each(|(to, byte)| *to = *byte);
            }
            _ => random.fill(out),
        }
        match self {
            Content::Nibbles => out.iter_mut().for_each(|byte| {
                *byte |= u8::from(*byte & 15 == 0) << 3 | u8::from(*byte >> 4 == 0) << 7;
            }),
            Content::Fp8 => out.iter_mut().for_each(|byte| *byte &= 0xbf),
            Content::Between { low, span } => {
                for value in out.as_chunks_mut::<2>().0 {
                    let even = f32::from(u16::from_le_bytes(*value)) / 65536.0;
                    *value = bf16::from_f32(low + span * even).to_le_bytes();
                }
            }
            _ => {}
        }
    }
}

/// Bytes of an element.
fn width(element: &str) -> u64 {
    match element {
        "I64" => 8,
        "F32" | "I32" => 4,
        "BF16" => 2,
        _ => 1,
    }
}

/// A tensor of a file as those of a checkpoint.
fn parts(tensor: &TensorSpec, form: Form) -> Vec<Part> {
    let name = format!("{PREFIX}{}", stored_name(&tensor.name));
    let shape: Vec<u64> = tensor.dims.iter().rev().copied().collect();
    let plain = |content| vec![part(name.clone(), "BF16", &shape, content)];
    let rms = match tensor.fill {
        Fill::Symmetric { rms } => rms,
        Fill::Between { low, high } => return plain(Content::Between { low, span: high - low }),
        Fill::RopeFactors { .. } | Fill::EveryToken => return Vec::new(),
    };
    let is_left = ["embed_tokens.weight", "embed_tokens_per_layer.weight", "router.proj.weight"];
    if is_left.iter().any(|end| name.ends_with(end)) {
        let bytes = 2 * tensor.dims.iter().product::<u64>();
        return plain(Content::Levels(Filler::new(tensor.fill, DType::BF16, bytes, |_| 1.0)));
    }
    let modules: Vec<(String, u64)> = match shape[..] {
        [experts, rows, _] => {
            let stem = name.rsplit_once('.').map_or("", |(stem, _)| stem);
            let halves = if name.ends_with("gate_up_proj") { &["gate", "up"][..] } else { &["down"] };
            let of_expert = |expert: u64| {
                halves.iter().map(move |half| (format!("{stem}.{expert}.{half}_proj"), rows / halves.len() as u64))
            };
            (0..experts).flat_map(of_expert).collect()
        }
        _ => vec![(name.trim_end_matches(".weight").to_owned(), shape[0])],
    };
    let columns = tensor.dims[0];
    modules.into_iter().flat_map(|(module, rows)| matrix(&module, [rows, columns], rms, form)).collect()
}

/// A matrix of random codes under scales that give it this root mean square.
fn matrix(module: &str, [rows, columns]: [u64; 2], rms: f32, form: Form) -> Vec<Part> {
    let named = |end: &str| format!("{module}.{end}");
    let brain = |scale: f32| Content::Repeated(bf16::from_f32(scale).to_le_bytes().to_vec());
    match form {
        Form::W4A16 => vec![
            part(named("weight_packed"), "I32", &[rows, columns / 8], Content::Nibbles),
            part(named("weight_scale"), "BF16", &[rows, columns / 32], brain(rms / NIBBLE_RMS)),
            part(named("weight_shape"), "I64", &[2], {
                Content::Repeated([rows.to_le_bytes(), columns.to_le_bytes()].concat())
            }),
        ],
        Form::Fp8 => {
            let squares = (0..=255u8).map(|code| fp8_to_f32(code & 0xbf).powi(2)).sum::<f32>();
            vec![
                part(named("weight"), "F8_E4M3", &[rows, columns], Content::Fp8),
                part(named("weight_scale"), "BF16", &[rows, 1], brain(rms / (squares / 256.0).sqrt())),
            ]
        }
        Form::ModelOptNvfp4 => vec![
            part(named("weight"), "U8", &[rows, columns / 2], Content::Bytes),
            part(named("weight_scale"), "F8_E4M3", &[rows, columns / 16], Content::Repeated(vec![E4M3_ONE])),
            part(named("weight_scale_2"), "F32", &[], Content::Repeated((rms / FP4_RMS).to_le_bytes().to_vec())),
        ],
    }
}

fn part(name: String, element: &'static str, shape: &[u64], content: Content) -> Part {
    let bytes = shape.iter().product::<u64>() * width(element);
    Part { name, element, shape: shape.to_vec(), bytes, content }
}

fn config(shape: &Shape, form: Form) -> Value {
    let layers = 0..shape.layers;
    let kinds: Vec<&str> =
        layers.map(|layer| if shape.is_global(layer) { "full_attention" } else { "sliding_attention" }).collect();
    let method = if form == Form::ModelOptNvfp4 { "modelopt" } else { "compressed-tensors" };
    json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "tie_word_embeddings": true,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "layer_types": kinds,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads.sliding,
        "num_global_key_value_heads": shape.kv_heads.global, "head_dim": shape.head_dim.sliding,
        "global_head_dim": shape.head_dim.global, "intermediate_size": shape.ffn,
        "use_double_wide_mlp": shape.shared_ffn != shape.ffn, "sliding_window": shape.window,
        "max_position_embeddings": shape.context, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": shape.ple, "num_kv_shared_layers": shape.shared,
        "attention_k_eq_v": shape.k_eq_v, "vocab_size": shape.vocab, "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": shape.experts.is_some(), "num_experts": shape.experts.map(|experts| experts.count),
        "top_k_experts": shape.experts.map(|experts| experts.used),
        "moe_intermediate_size": shape.experts.map(|experts| experts.width),
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "quantization_config": {"quant_method": method},
    })
}

fn tokenizer(shape: &Shape) -> Value {
    let vocabulary = Vocabulary::generate(shape.vocab as usize);
    let pieces: Map<String, Value> =
        vocabulary.tokens.iter().zip(0u32..).map(|(text, id)| (text.clone(), id.into())).collect();
    let is_special = |(_, kind): &(_, &i32)| [3, 4].contains(*kind);
    let added: Vec<Value> = vocabulary
        .tokens
        .iter()
        .enumerate()
        .zip(&vocabulary.kinds)
        .filter(is_special)
        .map(|((id, text), _)| json!({"id": id, "content": text, "special": true}))
        .collect();
    json!({
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "added_tokens": added,
        "model": {"type": "BPE", "byte_fallback": true, "vocab": pieces, "merges": vocabulary.merges},
    })
}
