//! The metadata of a random model: the keys of the real files, in their types.

use gemma4c_blocks::DType;

use super::preset::Shape;
use super::vocab::{Vocabulary, chat_template};
use crate::gguf::{Gguf, WriteError, Writer};

/// Everything but the tokenizer.
pub(super) fn set_model(writer: &mut Writer, name: &str, shape: &Shape, dtype: DType) -> Result<(), WriteError> {
    writer.set("general.architecture", "gemma4")?;
    writer.set("general.type", "model")?;
    writer.set("general.name", format!("Gemma 4 {name}, random weights").as_str())?;
    writer.set("general.file_type", file_type(dtype))?;
    writer.set("general.quantization_version", 2u32)?;
    writer.set("general.sampling.top_k", 64i32)?;
    writer.set("general.sampling.top_p", 0.95f32)?;
    writer.set("general.sampling.temp", 1.0f32)?;

    let layers = 0..shape.layers;
    writer.set("gemma4.block_count", shape.layers)?;
    writer.set("gemma4.context_length", shape.context)?;
    writer.set("gemma4.embedding_length", shape.hidden)?;
    per_layer(writer, "gemma4.feed_forward_length", layers.clone().map(|l| shape.ffn_of(l)).collect())?;
    writer.set("gemma4.attention.head_count", shape.heads)?;
    let kv_heads = layers.clone().map(|l| shape.kv_heads.of(shape.is_global(l)));
    per_layer(writer, "gemma4.attention.head_count_kv", kv_heads.collect())?;
    writer.set("gemma4.attention.key_length", shape.head_dim.global)?;
    writer.set("gemma4.attention.value_length", shape.head_dim.global)?;
    writer.set("gemma4.attention.key_length_swa", shape.head_dim.sliding)?;
    writer.set("gemma4.attention.value_length_swa", shape.head_dim.sliding)?;
    writer.set("gemma4.attention.layer_norm_rms_epsilon", 1e-6f32)?;
    writer.set("gemma4.attention.sliding_window", shape.window)?;
    writer.set_array("gemma4.attention.sliding_window_pattern", layers.map(|l| !shape.is_global(l)))?;
    writer.set("gemma4.attention.shared_kv_layers", shape.shared)?;
    writer.set("gemma4.embedding_length_per_layer_input", shape.ple)?;
    writer.set("gemma4.rope.freq_base", 1e6f32)?;
    writer.set("gemma4.rope.freq_base_swa", 1e4f32)?;
    writer.set("gemma4.rope.dimension_count", shape.head_dim.global)?;
    writer.set("gemma4.rope.dimension_count_swa", shape.head_dim.sliding)?;
    writer.set("gemma4.final_logit_softcapping", 30f32)?;
    if let Some(experts) = shape.experts {
        writer.set("gemma4.expert_count", experts.count)?;
        writer.set("gemma4.expert_used_count", experts.used)?;
        writer.set("gemma4.expert_feed_forward_length", experts.width)?;
    }
    Ok(())
}

/// One number where all layers agree, an array where they do not.
fn per_layer(writer: &mut Writer, key: &str, values: Vec<u32>) -> Result<(), WriteError> {
    match values.as_slice() {
        [first, rest @ ..] if rest.iter().all(|value| value == first) => writer.set(key, *first),
        _ => writer.set_array(key, values.into_iter().map(|value| value as i32)),
    }
}

/// The tokenizer's keys, for a vocabulary of our own.
pub(super) fn set_vocabulary(writer: &mut Writer, shape: &Shape) -> Result<(), WriteError> {
    let vocabulary = Vocabulary::generate(shape.vocab as usize);
    let text = String::as_str;
    writer.set("tokenizer.ggml.model", "gemma4")?;
    writer.set_array("tokenizer.ggml.tokens", vocabulary.tokens.iter().map(text))?;
    writer.set_array("tokenizer.ggml.scores", vocabulary.tokens.iter().map(|_| -1000f32))?;
    writer.set_array("tokenizer.ggml.token_type", vocabulary.kinds.iter().copied())?;
    writer.set_array("tokenizer.ggml.merges", vocabulary.merges.iter().map(text))?;
    for (key, id) in [("bos", 2u32), ("eos", 1), ("unknown", 3), ("padding", 0), ("mask", 4)] {
        writer.set(&format!("tokenizer.ggml.{key}_token_id"), id)?;
    }
    writer.set("tokenizer.ggml.add_space_prefix", false)?;
    writer.set("tokenizer.ggml.add_bos_token", true)?;
    // The models with per-layer embeddings were trained without the empty thought.
    writer.set("tokenizer.chat_template", chat_template(shape.ple == 0).as_str())
}

/// The tokenizer's keys, as another file has them.
pub(super) fn copy_vocabulary(writer: &mut Writer, from: &Gguf) -> Result<(), WriteError> {
    let mut tokenizer = from.metadata().iter().filter(|(key, _)| key.starts_with("tokenizer."));
    tokenizer.try_for_each(|(key, value)| writer.set(key, value))
}

/// What llama.cpp calls a file whose matrices are mostly of this type.
fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        DType::Q4K => 14,
        DType::Q5K => 16,
        DType::Q6K => 18,
        DType::IQ4NL => 25,
        DType::IQ4XS => 30,
        DType::BF16 => 32,
        DType::Q2K => 10,
        DType::Q3K => 11,
        DType::IQ2XXS => 19,
        DType::IQ2XS => 20,
        DType::IQ2S => 28,
        DType::IQ3XXS => 23,
        DType::IQ3S => 26,
        DType::MXFP4 => 38,
        DType::NVFP4 => 39,
        // No file has them: checkpoints' types.
        DType::I2 | DType::I4 | DType::I4Z | DType::I8 | DType::F8 | DType::F8S => 0,
    }
}
