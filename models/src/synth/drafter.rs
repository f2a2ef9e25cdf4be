//! Random drafters: the shape of the one that belongs to each size, its metadata and its tensors.

use super::inventory::{Fill, List, TensorSpec};
use super::preset::{ByKind, Preset, Shape};
use crate::gguf::{WriteError, Writer};
use gemma4c_blocks::DType;

/// A drafter for a model.
pub(super) struct DrafterShape {
    /// Its own layers, which have no keys and values.
    pub body: Shape,
    /// The width of its model.
    target_width: u32,
    /// Groups of tokens, and how many of them a step looks at; none where it looks at all tokens.
    centroids: Option<(u32, u32)>,
}

const LAYERS: u32 = 4;

/// The drafter of a model of that shape.
pub(super) fn shape(preset: Preset, target: &Shape) -> DrafterShape {
    let (hidden, ffn, heads, groups) = match preset {
        Preset::E2b | Preset::E4b => (256, 2048, 4, Some((2048, 32))),
        Preset::Dense12b | Preset::Moe26bA4b => (1024, 8192, 16, None),
        Preset::Dense31b => (1024, 8192, 32, None),
        Preset::TinyE => (128, 256, 4, Some((64, 6))),
        Preset::TinyDense | Preset::TinyMoe => (128, 256, 4, None),
    };
    let body = Shape {
        hidden,
        layers: LAYERS,
        heads,
        ffn,
        shared_ffn: ffn,
        period: LAYERS,
        shared: LAYERS,
        ple: 0,
        k_eq_v: false,
        experts: None,
        ..*target
    };
    // Groups are of one size: with a vocabulary of another length there may be none.
    let centroids = groups.filter(|(count, _)| target.vocab.is_multiple_of(*count));
    DrafterShape { body, target_width: target.hidden, centroids }
}

/// The keys of a drafter's file.
pub(super) fn set_metadata(writer: &mut Writer, name: &str, of: &DrafterShape) -> Result<(), WriteError> {
    let DrafterShape { body, target_width, centroids } = of;
    let ByKind { sliding, global } = body.head_dim;
    writer.set("general.architecture", "gemma4-assistant")?;
    writer.set("general.type", "model")?;
    writer.set("general.name", format!("Drafter of Gemma 4 {name}, random weights").as_str())?;
    let mut number = |key: &str, value: u32| writer.set(&format!("gemma4-assistant.{key}"), value);
    number("block_count", LAYERS)?;
    number("nextn_predict_layers", LAYERS)?;
    number("attention.shared_kv_layers", LAYERS)?;
    number("context_length", body.context)?;
    number("embedding_length", body.hidden)?;
    number("embedding_length_out", *target_width)?;
    number("feed_forward_length", body.ffn)?;
    number("attention.head_count", body.heads)?;
    number("attention.sliding_window", body.window)?;
    for (key, value) in [("key_length", global), ("value_length", global)] {
        number(&format!("attention.{key}"), value)?;
        number(&format!("attention.{key}_swa"), sliding)?;
    }
    number("rope.dimension_count", global)?;
    number("rope.dimension_count_swa", sliding)?;
    number("embedding_length_per_layer_input", 0)?;
    if let Some((count, top_k)) = centroids {
        number("masked_embedding.centroid_count", *count)?;
        number("masked_embedding.top_k", *top_k)?;
    }
    writer.set("gemma4-assistant.attention.layer_norm_rms_epsilon", 1e-6f32)?;
    writer.set("gemma4-assistant.rope.freq_base", 1e6f32)?;
    writer.set("gemma4-assistant.rope.freq_base_swa", 1e4f32)?;
    let kv_heads = (0..LAYERS).map(|layer| body.kv_heads.of(body.is_global(layer)) as i32);
    writer.set_array("gemma4-assistant.attention.head_count_kv", kv_heads)?;
    let pattern = (0..LAYERS).map(|layer| !body.is_global(layer));
    writer.set_array("gemma4-assistant.attention.sliding_window_pattern", pattern)
}

/// All tensors, with matrices as `dtype` where their rows allow it.
pub(super) fn inventory(of: &DrafterShape, dtype: DType) -> Vec<TensorSpec> {
    let DrafterShape { body, target_width, centroids } = of;
    let mut list = List::new(dtype, None);
    list.linear("token_embd.weight", &[body.hidden, body.vocab]);
    list.norm("output_norm.weight", body.hidden, 1.0);
    let pairs = body.head_dim.global / 2;
    list.push("rope_freqs.weight", &[pairs], DType::F32, Fill::RopeFactors { rotated: pairs / 4 });
    list.linear("nextn.pre_projection.weight", &[2 * target_width, body.hidden]);
    list.linear("nextn.post_projection.weight", &[body.hidden, *target_width]);
    if let Some((count, _)) = centroids {
        list.linear("masked_embd_centroids.weight", &[body.hidden, *count]);
        list.push("masked_embd_ordering", &[body.vocab], DType::F32, Fill::EveryToken);
    }
    for layer in 0..LAYERS {
        list.layer(body, layer);
    }
    list.tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts that are known of the real files.
    #[test]
    fn the_real_drafters_are_met() {
        for (preset, tensors, millions) in [
            (Preset::E2b, 51, 77.7),
            (Preset::E4b, 51, 78.5),
            (Preset::Dense12b, 49, 422.9),
            (Preset::Moe26bA4b, 49, 419.7),
            (Preset::Dense31b, 49, 469.5),
        ] {
            let shape = shape(preset, &preset.shape(None).unwrap());
            let all = inventory(&shape, DType::Q8_0);
            assert_eq!(all.len(), tensors, "{preset:?}");
            let ordering = |tensor: &&TensorSpec| tensor.fill != Fill::EveryToken;
            let parameters: u64 = all.iter().filter(ordering).map(|t| t.dims.iter().product::<u64>()).sum();
            assert!((parameters as f64 / 1e6 - millions).abs() < 0.06, "{preset:?}: {parameters}");
        }
    }
}
