//! The tensors of a tower for sound, by name and shape.

use gemma4c_blocks::DType;
use gemma4c_graph::{Builder, WeightId};

use super::super::clipped::Clipped;
use super::super::weights::{Inventory, WeightsError};
use super::config::{AudioConfig, AudioKind};
use crate::gguf::Header;

pub(super) struct Weights {
    /// `None` where samples are projected as they are.
    pub conformer: Option<Conformer>,
    pub projection: WeightId,
}

pub(super) struct Conformer {
    pub convolutions: [Convolution; 2],
    pub input_projection: WeightId,
    pub layers: Vec<LayerWeights>,
    pub out: WeightId,
    pub out_bias: WeightId,
}

/// A convolution, the norm after it, and its channels.
pub(super) struct Convolution {
    pub weight: WeightId,
    pub norm: WeightId,
    pub inputs: u32,
    pub outputs: u32,
}

pub(super) struct FeedForward {
    pub norm: WeightId,
    pub up: Clipped,
    pub down: Clipped,
    pub post_norm: WeightId,
}

pub(super) struct LayerWeights {
    pub first: FeedForward,
    pub attn_pre_norm: WeightId,
    pub q: Clipped,
    pub k: Clipped,
    pub v: Clipped,
    pub per_dim_scale: WeightId,
    pub distances: WeightId,
    pub out: Clipped,
    pub attn_post_norm: WeightId,
    /// Before the module of the convolution.
    pub conv_norm: WeightId,
    pub conv_in: Clipped,
    pub depthwise: WeightId,
    /// After the convolution itself.
    pub norm_conv: WeightId,
    pub conv_out: Clipped,
    pub second: FeedForward,
    /// Closes the layer.
    pub ln2: WeightId,
}

/// Declares every tensor the tower needs.
pub(super) fn declare(file: &Header, config: &AudioConfig, builder: &mut Builder) -> Result<Weights, WeightsError> {
    let mut inventory = Inventory::new(file, builder);
    // The last dimension of a tensor, where nothing but the tensor says it.
    let last =
        |name: &str| file.tensor(name).and_then(|t| t.dims().last().copied()).and_then(|n| u32::try_from(n).ok());
    let weights = match config.kind {
        AudioKind::Samples { frame } => {
            let projection = inventory.matrix("mm.a.input_projection.weight", &[frame, config.projection]);
            Weights { conformer: None, projection }
        }
        AudioKind::Conformer { bins, width, layers, heads, ffn } => {
            let channels = [0, 1].map(|i| last(&format!("a.conv1d.{i}.weight")).unwrap_or(1));
            let mut convolution = |index: usize, inputs: u32| {
                let (outputs, name) = (channels[index], format!("a.conv1d.{index}"));
                Convolution {
                    weight: inventory.reshaped(
                        &format!("{name}.weight"),
                        &[3, 3, inputs, outputs],
                        &[9 * inputs, outputs],
                        None,
                    ),
                    norm: inventory.vector(&format!("{name}.norm.weight"), outputs),
                    inputs,
                    outputs,
                }
            };
            let convolutions = [convolution(0, 1), convolution(1, channels[0])];
            let out_width = last("a.pre_encode.out.weight").unwrap_or(1);
            let flat = (bins / 4).saturating_mul(channels[1]);
            let conformer = Conformer {
                convolutions,
                input_projection: inventory.matrix("a.input_projection.weight", &[flat, width]),
                layers: (0..layers).map(|index| layer(&mut inventory, index, width, heads, ffn)).collect(),
                out: inventory.matrix("a.pre_encode.out.weight", &[width, out_width]),
                out_bias: inventory.vector("a.pre_encode.out.bias", out_width),
            };
            let projection = inventory.matrix("mm.a.input_projection.weight", &[out_width, config.projection]);
            Weights { conformer: Some(conformer), projection }
        }
    };
    inventory.finish()?;
    Ok(weights)
}

fn layer(inventory: &mut Inventory<'_>, index: u32, width: u32, heads: u32, ffn: u32) -> LayerWeights {
    let name = |suffix: &str| format!("a.blk.{index}.{suffix}");
    let feed_forward = |inventory: &mut Inventory<'_>, ending: &str| FeedForward {
        norm: inventory.vector(&name(&format!("ffn_norm{ending}.weight")), width),
        up: Clipped::declare(inventory, &name(&format!("ffn_up{ending}")), width, ffn),
        down: Clipped::declare(inventory, &name(&format!("ffn_down{ending}")), ffn, width),
        post_norm: inventory.vector(&name(&format!("ffn_post_norm{ending}.weight")), width),
    };
    let (taps, square) = (5, [width, width]);
    LayerWeights {
        first: feed_forward(inventory, ""),
        attn_pre_norm: inventory.vector(&name("attn_pre_norm.weight"), width),
        q: Clipped::declare(inventory, &name("attn_q"), width, width),
        k: Clipped::declare(inventory, &name("attn_k"), width, width),
        v: Clipped::declare(inventory, &name("attn_v"), width, width),
        per_dim_scale: inventory.vector(&name("per_dim_scale.weight"), width / heads),
        distances: inventory.matrix(&name("attn_k_rel.weight"), &square),
        out: Clipped::declare(inventory, &name("attn_out"), width, width),
        attn_post_norm: inventory.vector(&name("attn_post_norm.weight"), width),
        conv_norm: inventory.vector(&name("conv_norm.weight"), width),
        conv_in: Clipped::declare(inventory, &name("conv_pw1"), width, 2 * width),
        depthwise: inventory.reshaped(&name("conv_dw.weight"), &[taps, width], &[taps, width], Some(DType::F32)),
        norm_conv: inventory.vector(&name("norm_conv.weight"), width),
        conv_out: Clipped::declare(inventory, &name("conv_pw2"), width, width),
        second: feed_forward(inventory, "_1"),
        ln2: inventory.vector(&name("ln2.weight"), width),
    }
}
