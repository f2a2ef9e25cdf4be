//! The types of tensors by their numbers in files: those that models are read in, and others by name and size, so that
//! a refusal can say what a file has.

use gemma4c_blocks::DType;

/// Types that files may have and no model is read in: number, name, values of a block and its bytes.
const OTHERS: [(u32, &str, u64, u64); 13] = [
    (9, "q8_1", 32, 36),
    (15, "q8_k", 256, 292),
    (19, "iq1_s", 256, 50),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
];

fn other(id: u32) -> Option<(u32, &'static str, u64, u64)> {
    OTHERS.into_iter().find(|(number, ..)| *number == id)
}

/// The type's name, or its number where nobody has named it.
pub fn type_name(id: u32) -> String {
    let known = DType::from_ggml_id(id).map(DType::name).or(other(id).map(|(_, name, ..)| name));
    known.map_or_else(|| format!("ggml type {id}"), str::to_owned)
}

/// Bytes of so many values in rows of whole blocks, if the type is known.
pub fn stored_bytes(id: u32, values: u64) -> Option<u64> {
    let (len, bytes) = match DType::from_ggml_id(id) {
        Some(dtype) => (dtype.layout().len as u64, dtype.layout().file_bytes as u64),
        None => other(id).map(|(_, _, len, bytes)| (len, bytes))?,
    };
    values.div_ceil(len).checked_mul(bytes)
}
