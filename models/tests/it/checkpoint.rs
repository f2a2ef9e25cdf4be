//! Checkpoints of safetensors: the same model as its GGUF file to the bit, refusals that name what is wrong, and files
//! that lie.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::counting_allocator::peak_during;
use crate::golden;
use gemma4c_models::checkpoint;
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::synth::{Form, Preset, write_checkpoint};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, vocab_from_metadata};

/// What may be held beyond the files' sizes.
const SLACK: usize = 64 << 20;
/// Mutated checkpoints that are opened, unless the variable says another number.
const MUTATIONS: u64 = 300;
const VARIABLE: &str = "GEMMA4C_MUTATIONS";

fn of_golden(name: &str) -> Option<(Gguf, Gguf)> {
    let folder = golden::folder()?.join("checkpoints");
    let own = gemma4::open(&folder.join(name)).unwrap();
    Some((own, Gguf::open(folder.join(format!("{name}.gguf"))).unwrap()))
}

#[test]
fn a_checkpoint_is_the_model_that_its_gguf_file_is() {
    for name in ["e_bf16", "m_bf16"] {
        let Some((own, file)) = of_golden(name) else { return };
        assert_eq!(Config::read(&own).unwrap(), Config::read(&file).unwrap(), "{name}");
        assert_eq!(own.tensors().len(), file.tensors().len(), "{name}");
        for theirs in file.tensors() {
            let ours = own.tensor(&theirs.name).unwrap_or_else(|| panic!("{name}: {} is missing", theirs.name));
            assert_eq!(
                (ours.dims(), ours.dtype().unwrap()),
                (theirs.dims(), theirs.dtype().unwrap()),
                "{}",
                theirs.name
            );
            assert!(*own.bytes(ours).unwrap() == *file.data(theirs), "{name}: {} has other values", theirs.name);
        }
    }
}

#[test]
fn its_tokenizer_is_that_of_the_gguf_file() {
    for name in ["e_bf16", "m_bf16"] {
        let Some((own, file)) = of_golden(name) else { return };
        let [ours, theirs] = [&own, &file].map(|model| vocab_from_metadata(model.metadata()).unwrap().unwrap());
        assert_eq!(ours, theirs, "{name}");
        let [ours, theirs] = [ours, theirs].map(|vocab| Tokenizer::new(&vocab).unwrap());
        let mut random = Random(3);
        for case in 0..2000 {
            let text: String = (0..random.below(40)).map(|_| random.word()).collect();
            for parse_special in [false, true] {
                let options = EncodeOptions { add_bos: case % 2 == 0, parse_special };
                assert_eq!(ours.encode(&text, options), theirs.encode(&text, options), "{text:?}");
            }
        }
    }
}

/// A small checkpoint, in a folder of its own.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new(preset: Preset, form: Form) -> Place {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(preset, form, Some(preset.least_layers()), 1, folder.path(), &|_, _| {}).unwrap();
        Place { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn edit(&self, name: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        assert!(text.contains(from), "{name} has no {from}");
        fs::write(self.path(name), text.replace(from, to)).unwrap();
    }

    /// Changes the header of the file with the tensors; the same data follows it.
    fn edit_header(&self, from: &str, to: &str) {
        let bytes = fs::read(self.path("model.safetensors")).unwrap();
        let (header, data) = split(&bytes);
        let text = std::str::from_utf8(header).unwrap();
        assert!(text.contains(from), "the header has no {from}");
        fs::write(self.path("model.safetensors"), joined(text.replacen(from, to, 1).as_bytes(), data)).unwrap();
    }

    /// Two shards and an index, in place of the one file.
    fn shard(&self) {
        let bytes = fs::read(self.path("model.safetensors")).unwrap();
        let (header, data) = split(&bytes);
        let tensors: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
        let mut map = serde_json::Map::new();
        for (part, name) in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"].iter().enumerate()
        {
            let (mut own, mut bytes) = (serde_json::Map::new(), Vec::new());
            for (key, tensor) in tensors.iter().enumerate().filter(|(at, _)| at % 2 == part).map(|(_, pair)| pair) {
                let at = |i: usize| tensor["data_offsets"][i].as_u64().unwrap() as usize;
                let mut tensor = tensor.clone();
                let start = bytes.len();
                bytes.extend(&data[at(0)..at(1)]);
                tensor["data_offsets"] = serde_json::json!([start, bytes.len()]);
                own.insert(key.clone(), tensor);
                map.insert(key.clone(), (*name).into());
            }
            let text = serde_json::Value::Object(own).to_string();
            fs::write(self.path(name), joined(text.as_bytes(), &bytes)).unwrap();
        }
        fs::remove_file(self.path("model.safetensors")).unwrap();
        let index = serde_json::json!({"weight_map": map}).to_string();
        fs::write(self.path("model.safetensors.index.json"), index).unwrap();
    }

    /// Everything that a compiler does with the folder before it lowers.
    fn open(&self) -> Result<usize, String> {
        let model = gemma4::open(self.folder.path()).map_err(|error| error.to_string())?;
        let config = Config::read(&model).map_err(|error| error.to_string())?;
        let graph = gemma4::graph(&model, &config).map_err(|error| error.to_string())?;
        vocab_from_metadata(model.metadata()).map_err(|error| error.to_string())?;
        for tensor in model.tensors() {
            model.bytes(tensor).map_err(|error| error.to_string())?;
        }
        Ok(graph.weights.len())
    }

    fn refusal(&self) -> String {
        let folder = self.folder.path().display().to_string();
        self.open().unwrap_err().replace(&folder, "DIR")
    }
}

fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    let (length, rest) = bytes.split_first_chunk().unwrap();
    rest.split_at(u64::from_le_bytes(*length) as usize)
}

fn joined(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

#[test]
fn every_form_opens_and_its_folder_is_known_by_its_files() {
    for preset in [Preset::TinyE, Preset::TinyDense, Preset::TinyMoe] {
        for form in Form::ALL {
            let place = Place::new(preset, form);
            let weights = place.open().unwrap_or_else(|error| panic!("{preset:?} {form:?}: {error}"));
            place.shard();
            assert_eq!(place.open().unwrap(), weights, "{preset:?} {form:?}, in shards");
            for file in ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"] {
                assert!(checkpoint::is_checkpoint(&place.path(file)));
                assert!(gemma4::open(&place.path(file)).is_ok(), "{file}");
            }
        }
    }
    assert!(!checkpoint::is_checkpoint(Path::new("model.gguf")));
}

/// A change to a folder.
type Change = fn(&Place);

#[test]
fn what_is_wrong_is_named() {
    let cases: [(&str, Change); 13] = [
        ("a missing shard", |place| {
            place.shard();
            fs::remove_file(place.path("model-00002-of-00002.safetensors")).unwrap();
        }),
        ("a wrong type", |place| {
            place.edit_header(r#""dtype":"I32","shape":[512,32]"#, r#""dtype":"F32","shape":[512,32]"#);
        }),
        ("a shape that contradicts the config", |place| {
            place.edit("config.json", r#""intermediate_size":"#, r#""intermediate_size":1"#);
        }),
        ("another model", |place| place.edit("config.json", "gemma4_text", "gemma3_text")),
        ("another quantiser", |place| place.edit("config.json", "compressed-tensors", "bitsandbytes")),
        ("another activation", |place| place.edit("config.json", "gelu_pytorch_tanh", "silu")),
        ("no config", |place| fs::remove_file(place.path("config.json")).unwrap()),
        ("no tensors", |place| fs::remove_file(place.path("model.safetensors")).unwrap()),
        ("another tokenizer", |place| place.edit("tokenizer.json", r#""type":"BPE""#, r#""type":"Unigram""#)),
        ("another normaliser", |place| place.edit("tokenizer.json", r#""type":"Replace""#, r#""type":"NFKC""#)),
        ("cut tensors", |place| {
            let bytes = fs::read(place.path("model.safetensors")).unwrap();
            fs::write(place.path("model.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
        }),
        ("a tensor that is not there", |place| {
            place.edit_header("layers.0.mlp.up_proj.weight_scale", "layers.0.mlp.up_proj.weight_skale");
        }),
        ("a negative scale", |place| {
            let mut bytes = fs::read(place.path("model.safetensors")).unwrap();
            let (header, _) = split(&bytes);
            let tensors: serde_json::Value = serde_json::from_slice(header).unwrap();
            let scale = &tensors["model.language_model.layers.0.mlp.up_proj.weight_scale"]["data_offsets"][0];
            let at = 8 + header.len() + scale.as_u64().unwrap() as usize;
            bytes[at + 1] |= 0x80;
            fs::write(place.path("model.safetensors"), bytes).unwrap();
        }),
    ];
    let texts = cases.map(|(what, change)| {
        let place = Place::new(Preset::TinyDense, Form::W4A16);
        change(&place);
        format!("{what}\n  {}\n", place.refusal().replace('\n', "\n  "))
    });
    insta::with_settings!({
        snapshot_path => concat!(env!("CARGO_MANIFEST_DIR"), "/../snapshots/errors"),
        prepend_module_to_snapshot => false,
    }, { insta::assert_snapshot!("checkpoints", texts.concat()) });
}

/// An expert that no calibration has met has 0 as its scale.
#[test]
fn an_expert_without_a_scale_is_named() {
    let place = Place::new(Preset::TinyMoe, Form::ModelOptNvfp4);
    let mut bytes = fs::read(place.path("model.safetensors")).unwrap();
    let (header, _) = split(&bytes);
    let tensors: serde_json::Value = serde_json::from_slice(header).unwrap();
    let name = "model.language_model.layers.1.experts.3.up_proj.weight_scale_2";
    let at = 8 + header.len() + tensors[name]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&0f32.to_le_bytes());
    fs::write(place.path("model.safetensors"), bytes).unwrap();
    insta::assert_snapshot!(place.refusal(), @"DIR/model.safetensors: tensor model.language_model.layers.1.experts.3.up_proj.weight_scale_2 is 0: a scale is a positive number, and this weight was never calibrated");
}

/// Whatever headers, indexes, configs and tokenizers say: one error or none, soon, without a panic and without more
/// memory than the files have bytes.
#[test]
fn files_that_lie_are_errors() {
    let count = std::env::var(VARIABLE).ok().map_or(MUTATIONS, |count| count.parse().expect("a number"));
    let forms = [(Preset::TinyDense, Form::W4A16), (Preset::TinyMoe, Form::ModelOptNvfp4), (Preset::TinyE, Form::Fp8)];
    let (started, mut refused) = (Instant::now(), 0);
    for (at, (preset, form)) in forms.into_iter().enumerate() {
        let place = Place::new(preset, form);
        let is_sharded = at > 0;
        if is_sharded {
            place.shard();
        }
        let tensors = if is_sharded { "model-00001-of-00002.safetensors" } else { "model.safetensors" };
        let mut files = vec![tensors, "config.json", "tokenizer.json"];
        files.extend(is_sharded.then_some("model.safetensors.index.json"));
        let mut random = Random(17 + at as u64);
        for case in 0..count.div_ceil(forms.len() as u64) {
            let name = files[case as usize % files.len()];
            let original = fs::read(place.path(name)).unwrap();
            let mutated = match name.ends_with(".safetensors") {
                false => random.mutate(&original),
                true => {
                    let (header, data) = split(&original);
                    let mut mutated = joined(&random.mutate(header), data);
                    // At times the length lies, and not what follows it.
                    if random.below(8) == 0 {
                        mutated[random.below(8) as usize] = random.bits() as u8;
                    }
                    mutated
                }
            };
            fs::write(place.path(name), &mutated).unwrap();
            let what = format!("{preset:?}, case {case}, {name}");
            let start = Instant::now();
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| peak_during(|| place.open())));
            let (result, peak) = caught.unwrap_or_else(|_| panic!("{what}: a panic"));
            let bytes: u64 =
                fs::read_dir(place.folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
            assert!(peak <= bytes as usize + SLACK, "{what}: {peak} bytes held");
            assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", start.elapsed());
            if let Err(message) = result {
                assert!(!message.is_empty() && message.len() < 32 << 10, "{what}: {message}");
                refused += 1;
            }
            fs::write(place.path(name), original).unwrap();
        }
    }
    eprintln!("{count} mutated checkpoints, {refused} refused, {:?}", started.elapsed());
    assert!(refused > count / 3, "most such checkpoints are broken: {refused} of {count}");
}

struct Random(u64);

/// What stands in the place of something else.
const NASTY: [&str; 22] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "255",
    "65536",
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "1e308",
    "0.5",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"model\"",
    "\"F32\"",
    "[[[[[[[[",
    "\"\\u0000\"",
    "",
];

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.bits() % n.max(1)
    }

    fn word(&mut self) -> &'static str {
        const WORDS: [&str; 24] = [
            "the ", "a", " was", "ing", "  ", "\n", "\n\n\n", "\t\t", "é", "語", "🦙", "<|turn>", "<turn|>", "<bos>",
            "<b>", "</table>", "▁", "<0x41>", "<|\"|>", "1234", "… ", "'s", "\u{0}", "ß",
        ];
        WORDS[self.below(WORDS.len() as u64) as usize]
    }

    /// JSON with one to three things changed: a byte, a value, a stretch that is cut out or comes twice.
    fn mutate(&mut self, original: &[u8]) -> Vec<u8> {
        let mut bytes = original.to_vec();
        for _ in 0..1 + self.below(3) {
            let at = self.below(bytes.len() as u64) as usize;
            match self.below(5) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => {
                    let end = (at + 1 + self.below(40) as usize).min(bytes.len());
                    bytes.drain(at..end);
                }
                2 => {
                    let end = (at + 1 + self.below(200) as usize).min(bytes.len());
                    let twice = bytes[at..end].to_vec();
                    bytes.splice(at..at, twice);
                }
                // The next value or key, up to where it ends.
                _ => {
                    let start =
                        bytes[at..].iter().position(|byte| b":,[".contains(byte)).map_or(at, |step| at + step + 1);
                    let end = bytes[start..]
                        .iter()
                        .position(|byte| b",]}:".contains(byte))
                        .map_or(start, |step| start + step);
                    let new = NASTY[self.below(NASTY.len() as u64) as usize];
                    bytes.splice(start..end, new.bytes());
                }
            }
            if bytes.is_empty() {
                bytes.push(b'{');
            }
        }
        bytes
    }
}
