//! Adapters of a projector's towers, against a projector whose weights have the same change in them: `W + s B A`.

use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_blocks::decode::decode_row;
use gemma4c_models::gguf::{Gguf, Writer};
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::common::{Place, Tensors, golden, ids};

const RANK: usize = 4;
/// `lora_alpha / r`, as the settings below have it.
const FACTOR: f32 = 2.0;
const CONFIG: &str = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8}"#;

/// What PEFT calls a module, and the projector its matrix.
const OF_PICTURES: [(&str, &str); 4] = [
    ("vision_tower.encoder.layers.0.self_attn.q_proj.linear", "v.blk.0.attn_q.weight"),
    ("vision_tower.encoder.layers.1.self_attn.o_proj.linear", "v.blk.1.attn_out.weight"),
    ("vision_tower.encoder.layers.1.mlp.down_proj.linear", "v.blk.1.ffn_down.weight"),
    ("embed_vision.embedding_projection", "mm.input_projection.weight"),
];
const OF_SOUND: [(&str, &str); 5] = [
    ("audio_tower.layers.0.feed_forward2.ffw_layer_1.linear", "a.blk.0.ffn_up_1.weight"),
    ("audio_tower.layers.1.lconv1d.linear_start.linear", "a.blk.1.conv_pw1.weight"),
    ("audio_tower.layers.1.self_attn.post.linear", "a.blk.1.attn_out.weight"),
    ("audio_tower.output_proj", "a.pre_encode.out.weight"),
    ("embed_audio.embedding_projection", "mm.a.input_projection.weight"),
];

/// Attention reads it, and no product.
const OF_DISTANCES: (&str, &str) = ("audio_tower.layers.0.self_attn.relative_k_proj", "a.blk.0.attn_k_rel.weight");

/// A pair for a matrix of a projector.
struct Pair {
    module: &'static str,
    tensor: &'static str,
    inputs: usize,
    outputs: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Pair {
    fn new(projector: &Gguf, (module, tensor): (&'static str, &'static str)) -> Pair {
        let dims = projector.tensor(tensor).unwrap_or_else(|| panic!("the projector has no {tensor}")).dims();
        let (inputs, outputs) = (dims[0] as usize, dims[1] as usize);
        let mut state = tensor.bytes().fold(1u32, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
        let mut some = |count: usize| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            };
            (0..count).map(|_| next() / (inputs as f32).sqrt()).collect()
        };
        Pair { module, tensor, inputs, outputs, a: some(RANK * inputs), b: some(outputs * RANK) }
    }

    /// The matrix with the change added to it.
    fn merged(&self, bytes: &[u8], dtype: DType) -> Vec<u8> {
        let row_bytes = bytes.len() / self.outputs;
        let mut row = vec![0.0; self.inputs];
        let mut out = Vec::new();
        for (output, of_file) in bytes.chunks_exact(row_bytes).enumerate() {
            decode_row(dtype, of_file, &mut row);
            for (input, value) in row.iter().enumerate() {
                let product = |rank: usize| self.b[output * RANK + rank] * self.a[rank * self.inputs + input];
                let change: f32 = (0..RANK).map(product).sum();
                out.extend((value + FACTOR * change).to_le_bytes());
            }
        }
        out
    }
}

/// The pairs as PEFT saves them.
fn write_adapter(place: &Place, name: &str, pairs: &[Pair]) {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let halves = pairs.iter().flat_map(|pair| {
        let name = |half: &str| format!("base_model.model.model.{}.lora_{half}.weight", pair.module);
        [(name("A"), vec![RANK, pair.inputs], bytes(&pair.a)), (name("B"), vec![pair.outputs, RANK], bytes(&pair.b))]
    });
    let halves: Vec<_> = halves.collect();
    let view = |shape: &Vec<usize>, bytes| TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor");
    let views = halves.iter().map(|(name, shape, bytes)| (name.as_str(), view(shape, bytes)));
    std::fs::create_dir_all(place.path(name)).expect("a folder");
    place.write(&format!("{name}/adapter_model.safetensors"), serialize(views, None).expect("a file"));
    place.write(&format!("{name}/adapter_config.json"), CONFIG);
}

/// The projector with the changes in its matrices, which are of f32 then.
fn write_merged(projector: &Gguf, to: &Path, pairs: &[Pair]) {
    let mut writer = Writer::new();
    for (name, value) in projector.metadata().iter() {
        writer.set(name, value).expect("a key");
    }
    let pair_of = |name: &str| pairs.iter().find(|pair| pair.tensor == name);
    for tensor in projector.tensors() {
        let dtype = tensor.dtype().expect("a known type");
        let dtype = if pair_of(&tensor.name).is_some() { DType::F32 } else { dtype };
        writer.tensor(&tensor.name, tensor.dims(), dtype).expect("a tensor");
    }
    let body = writer.create(to).expect("a file");
    for (index, tensor) in projector.tensors().iter().enumerate() {
        let bytes = projector.bytes(tensor).expect("the projector is whole");
        match pair_of(&tensor.name) {
            Some(pair) => body.write_at(index, 0, &pair.merged(&bytes, tensor.dtype().expect("a known type"))),
            None => body.write_at(index, 0, &bytes),
        }
        .expect("a tensor");
    }
    body.finish().expect("the whole file");
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn an_adapter_of_towers_is_what_merged_weights_are() {
    if !golden::has("vision/v_tiny_e") {
        return;
    }
    let (place, folder) = (Place::new(), golden::some().join("vision"));
    for (from, to) in [
        ("v_tiny_e.gguf", "model.gguf"),
        ("v_tiny_e.mmproj.gguf", "mmproj.gguf"),
        ("v_tiny_e.png", "a.png"),
        ("a_tiny_e.wav", "a.wav"),
    ] {
        std::fs::copy(folder.join(from), place.path(to)).expect("a copy");
    }
    let projector = Gguf::open(place.path("mmproj.gguf")).expect("a projector");
    write_adapter(&place, "distances", &[Pair::new(&projector, OF_DISTANCES)]);
    let line = "compile model.gguf --mmproj mmproj.gguf --target cpu -o plan.bin --lora distances";
    let refused = place.refused(line);
    assert!(refused.contains("relative_k_proj.lora_A") && refused.contains("products"), "{refused}");
    let logits = |options: &str, what: &str, tokens: &str| {
        place.ok(&format!("compile model.gguf --image-tokens 70 --target cpu -o plan.bin {options}"));
        place.logits("plan.bin", &format!("--tokens {tokens} --all {what}")).get("logits").values.clone()
    };
    for (name, changed, what) in
        [("v_tiny_e", &OF_PICTURES[..], "--image a.png"), ("a_tiny_e", &OF_SOUND, "--audio a.wav")]
    {
        let pairs: Vec<Pair> = changed.iter().map(|names| Pair::new(&projector, *names)).collect();
        write_adapter(&place, name, &pairs);
        write_merged(&projector, &place.path("merged.gguf"), &pairs);
        let tokens = ids(&Tensors::read(&folder.join(format!("{name}.golden.safetensors"))).ids("tokens"));
        let logits = |options: &str| logits(options, what, &tokens);
        let (without, merged) = (logits("--mmproj mmproj.gguf"), logits("--mmproj merged.gguf"));
        let adapted = logits(&format!("--mmproj mmproj.gguf --lora {name}"));
        let (off, moved) = (largest_difference(&adapted, &merged), largest_difference(&without, &merged));
        eprintln!("{name}: off by {off:.1e} where the adapter moves logits by {moved:.1e}");
        assert!(off <= 1e-3 && moved > 20.0 * off, "{name}: off by {off}, moved by {moved}");
        let weaker = logits(&format!("--mmproj mmproj.gguf --lora {name}:0.9"));
        assert!(largest_difference(&weaker, &merged) > 4.0 * off, "{name}: another strength is not seen");
        let refused = place.refused(&format!("compile model.gguf --target cpu -o plan.bin --lora {name}"));
        assert!(refused.contains("--mmproj") && refused.contains("lora_A"), "{refused}");
    }
}
