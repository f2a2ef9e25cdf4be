//! The tensors of a vision tower, by name and shape.

use gemma4c_blocks::DType;
use gemma4c_graph::{Builder, WeightId};

use super::super::clipped::Clipped;
use super::super::weights::{Inventory, WeightsError};
use super::config::{Encoder, VisionConfig};
use crate::gguf::Header;

pub(super) struct Weights {
    pub patch_embd: WeightId,
    /// Two tables, of columns and of rows.
    pub position_embd: WeightId,
    pub body: Body,
    pub projection: WeightId,
}

/// What lies between patches and their projection.
pub(super) enum Body {
    Encoder {
        layers: Vec<LayerWeights>,
        standardisation: Option<Standardisation>,
    },
    /// Norms before and after the patches' product, and after their positions.
    Norms {
        patch: LayerNorm,
        patch_bias: WeightId,
        dense: LayerNorm,
        position: LayerNorm,
    },
}

/// A norm with the mean taken off.
#[derive(Clone, Copy)]
pub(super) struct LayerNorm {
    pub weight: WeightId,
    pub bias: WeightId,
}

pub(super) struct LayerWeights {
    pub ln1: WeightId,
    pub q: Clipped,
    pub q_norm: WeightId,
    pub k: Clipped,
    pub k_norm: WeightId,
    pub v: Clipped,
    pub out: Clipped,
    pub attn_post_norm: WeightId,
    pub ln2: WeightId,
    pub gate: Clipped,
    pub up: Clipped,
    pub down: Clipped,
    pub ffn_post_norm: WeightId,
}

/// `(t - bias) * scale` of the pooled rows.
pub(super) struct Standardisation {
    pub bias: WeightId,
    pub scale: WeightId,
}

/// Declares every tensor the tower needs.
pub(super) fn declare(file: &Header, config: &VisionConfig, builder: &mut Builder) -> Result<Weights, WeightsError> {
    let mut inventory = Inventory::new(file, builder);
    let (width, patch) = (config.width, config.patch);
    // How many positions there are is known by the table alone.
    let positions = file.tensor("v.position_embd.weight").and_then(|table| table.dims().get(1).copied());
    let positions = positions.and_then(|n| u32::try_from(n).ok()).unwrap_or(1);
    // Stored by column, row and channel of a pixel, or as one row of that order: that is how patches are laid out for
    // it.
    let rows = [config.patch_width(), width];
    let stored: &[u32] = if config.encoder.is_some() { &[patch, patch, 3, width] } else { &rows };
    let weights = Weights {
        patch_embd: inventory.reshaped("v.patch_embd.weight", stored, &rows, None),
        position_embd: inventory.reshaped(
            "v.position_embd.weight",
            &[width, positions, 2],
            &[width, positions, 2],
            Some(DType::F32),
        ),
        body: match config.encoder {
            Some(encoder) => encoder_weights(&mut inventory, encoder, width),
            None => norms(&mut inventory, config),
        },
        projection: inventory.matrix("mm.input_projection.weight", &[width, config.projection]),
    };
    inventory.finish()?;
    Ok(weights)
}

fn encoder_weights(inventory: &mut Inventory<'_>, encoder: Encoder, width: u32) -> Body {
    let standardised = inventory.has("v.std_bias") || inventory.has("v.std_scale");
    Body::Encoder {
        layers: (0..encoder.layers).map(|index| layer(inventory, encoder, width, index)).collect(),
        standardisation: standardised.then(|| Standardisation {
            bias: inventory.vector("v.std_bias", width),
            scale: inventory.vector("v.std_scale", width),
        }),
    }
}

/// They are counted from 1, in some files from 0.
fn norms(inventory: &mut Inventory<'_>, config: &VisionConfig) -> Body {
    let first = if inventory.has("v.patch_norm.0.weight") { 0 } else { 1 };
    let mut norm = |index: u32, width: u32| LayerNorm {
        weight: inventory.vector(&format!("v.patch_norm.{}.weight", first + index), width),
        bias: inventory.vector(&format!("v.patch_norm.{}.bias", first + index), width),
    };
    let (patch, dense, position) = (norm(0, config.patch_width()), norm(1, config.width), norm(2, config.width));
    Body::Norms { patch, patch_bias: inventory.vector("v.patch_embd.bias", config.width), dense, position }
}

fn layer(inventory: &mut Inventory<'_>, encoder: Encoder, width: u32, index: u32) -> LayerWeights {
    let Encoder { ffn, head_dim, .. } = encoder;
    let name = |suffix: &str| format!("v.blk.{index}.{suffix}");
    LayerWeights {
        ln1: inventory.vector(&name("ln1.weight"), width),
        q: Clipped::declare(inventory, &name("attn_q"), width, width),
        q_norm: inventory.vector(&name("attn_q_norm.weight"), head_dim),
        k: Clipped::declare(inventory, &name("attn_k"), width, width),
        k_norm: inventory.vector(&name("attn_k_norm.weight"), head_dim),
        v: Clipped::declare(inventory, &name("attn_v"), width, width),
        out: Clipped::declare(inventory, &name("attn_out"), width, width),
        attn_post_norm: inventory.vector(&name("attn_post_norm.weight"), width),
        ln2: inventory.vector(&name("ln2.weight"), width),
        gate: Clipped::declare(inventory, &name("ffn_gate"), width, ffn),
        up: Clipped::declare(inventory, &name("ffn_up"), width, ffn),
        down: Clipped::declare(inventory, &name("ffn_down"), ffn, width),
        ffn_post_norm: inventory.vector(&name("ffn_post_norm.weight"), width),
    }
}
