//! The golden files, which another program wrote, as this reader sees them.

use crate::golden;
use gemma4c_models::gguf::{Gguf, ValueType};

/// Tensors by type, as the table beside the files gives them.
#[test]
fn models_have_the_tensors_their_table_says() {
    let Some(folder) = golden::folder() else { return };
    let table: [(&str, &[(&str, usize)]); 10] = [
        ("d_tiny_bf16", &[("bf16", 27), ("f32", 30)]),
        ("d_tiny_q4_k", &[("f32", 30), ("q4_k", 27)]),
        ("d_tiny_q4_k_m_lq", &[("f32", 30), ("q4_k", 23), ("q6_k", 4)]),
        ("d_tiny_q6_k", &[("f32", 30), ("q6_k", 27)]),
        ("d_tiny_q8_0", &[("f32", 30), ("q8_0", 27)]),
        ("e_tiny_q4_0", &[("bf16", 1), ("f32", 51), ("q4_0", 56)]),
        ("e_tiny_q4_0_lq", &[("bf16", 1), ("f32", 49), ("q4_0", 50), ("q6_k", 2)]),
        ("e_tiny_q8_0", &[("bf16", 1), ("f32", 49), ("q8_0", 52)]),
        ("m_tiny_q4_0", &[("f32", 41), ("q4_0", 27)]),
        ("m_tiny_q8_0", &[("f32", 41), ("q8_0", 27)]),
    ];
    for (name, expected) in table {
        let gguf = Gguf::open(folder.join(name).with_extension("gguf")).unwrap();
        let mut found = std::collections::BTreeMap::new();
        for tensor in gguf.tensors() {
            let dtype = tensor.dtype().unwrap();
            *found.entry(dtype.name()).or_insert(0) += 1;
            let values: u64 = tensor.dims().iter().product();
            assert_eq!(gguf.data(tensor).len() as u64, dtype.row_bytes(values).unwrap(), "{name} {}", tensor.name);
            assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
        }
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected, "{name}");
        assert_eq!(gguf.metadata().str("general.architecture").unwrap(), "gemma4", "{name}");

        let end = gguf.tensors().iter().map(|t| t.offset + t.len).max().unwrap();
        assert!(gguf.files()[0].len - end < 32, "{name}: nothing but padding after the last tensor");

        let scale = gguf.tensor("rope_freqs.weight").unwrap();
        assert_eq!(&gguf.data(scale)[..4], 1f32.to_le_bytes(), "{name}");
    }
}

#[test]
fn scalars_that_may_be_arrays_are_read_a_layer_at_a_time() {
    let Some(folder) = golden::folder() else { return };
    let e = Gguf::open(folder.join("e_tiny_q8_0.gguf")).unwrap();
    let layers = e.metadata().u32("gemma4.block_count").unwrap();
    let widths = e.metadata().per_layer_u32("gemma4.feed_forward_length", layers).unwrap();
    assert_eq!(widths, [128, 128, 128, 128, 256, 256]);
    assert_eq!(e.metadata().per_layer_u32("gemma4.attention.head_count_kv", layers).unwrap(), [1; 6]);
    let sliding = e.metadata().per_layer_bool("gemma4.attention.sliding_window_pattern", layers).unwrap();
    assert_eq!(sliding, [true, false, true, false, true, false]);
}

#[test]
fn the_real_vocabulary_is_read_where_it_lies() {
    let Some(folder) = golden::folder() else { return };
    let gguf = Gguf::open(folder.join("ggml-vocab-gemma-4.gguf")).unwrap();
    assert!(gguf.tensors().is_empty());
    let tokens = gguf.metadata().array("tokenizer.ggml.tokens").unwrap();
    let merges = gguf.metadata().array("tokenizer.ggml.merges").unwrap();
    assert_eq!((tokens.element_type(), tokens.len()), (ValueType::Str, 262_144));
    assert_eq!((merges.element_type(), merges.len()), (ValueType::Str, 514_906));
    assert_eq!(merges.strings().unwrap().count(), merges.len());
    let special: Vec<&str> =
        tokens.strings().unwrap().enumerate().filter(|(i, _)| [2, 106].contains(i)).map(|t| t.1).collect();
    assert_eq!(special, ["<bos>", "<turn|>"]);
}
