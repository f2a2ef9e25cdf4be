//! Random adapters for the seats of a plan.

use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_models::gguf::Writer;
use gemma4c_plan::Plan;

use super::Random;

/// A matrix that an adapter may change: its name, its inputs, its outputs.
pub type Matrix = (String, [u64; 2]);

/// The matrices that the seats of a plan hold adapters of.
pub fn seated(plan: &Plan) -> Vec<Matrix> {
    let of_a = plan.weights.iter().filter_map(|weight| Some((weight.name.strip_suffix(".seats_a")?, weight)));
    let outputs = |name: &str| {
        let of_b = format!("{name}.seats_b");
        plan.weights.iter().find(|weight| weight.name == of_b).expect("a bank for B").dims[1]
    };
    of_a.map(|(name, weight)| (name.to_owned(), [weight.dims[0], outputs(name)])).collect()
}

/// Writes an adapter for these matrices as llama.cpp does. Its values are bf16, and its factor is 2.
pub fn write_adapter(path: &Path, matrices: &[Matrix], rank: u64, seed: u64) {
    let mut writer = Writer::new();
    writer.set("general.type", "adapter").expect("a key");
    writer.set("general.architecture", "gemma4").expect("a key");
    writer.set("adapter.type", "lora").expect("a key");
    writer.set("adapter.lora.alpha", 2.0 * rank as f32).expect("a key");
    let mut shapes = Vec::new();
    for (matrix, [inputs, outputs]) in matrices {
        for (half, dims) in [("a", [*inputs, rank]), ("b", [rank, *outputs])] {
            writer.tensor(&format!("{matrix}.lora_{half}"), &dims, DType::BF16).expect("a tensor");
            shapes.push(dims);
        }
    }
    let body = writer.create(path).expect("a file");
    let mut random = Random(seed);
    for (index, [columns, rows]) in shapes.into_iter().enumerate() {
        let mut value = || (random.below(2048) as f32 / 1024.0 - 1.0) / (columns as f32).sqrt();
        // The upper half of an f32 is a bf16.
        let bytes: Vec<u8> =
            (0..columns * rows).flat_map(|_| ((value().to_bits() >> 16) as u16).to_le_bytes()).collect();
        body.write_at(index, 0, &bytes).expect("a tensor");
    }
    body.finish().expect("the whole file");
}
