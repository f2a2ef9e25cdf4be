//! Random towers for sound, beside the vision towers of the same files.

use gemma4c_blocks::DType;

use super::inventory::Fill;
use super::list::List;
use super::preset::Preset;
use crate::gguf::{WriteError, Writer};

/// A conformer, or frames of samples that are projected as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SoundShape {
    Conformer { width: u32, layers: u32, heads: u32, ffn: u32, out: u32, channels: [u32; 2] },
    Samples { frame: u32 },
}

const BINS: u32 = 128;
const TAPS: u32 = 5;

impl SoundShape {
    /// The largest models read no sound.
    pub fn of(preset: Preset) -> Option<SoundShape> {
        let channels = [128, 32];
        match preset {
            Preset::E2b | Preset::E4b => {
                Some(SoundShape::Conformer { width: 1024, layers: 12, heads: 8, ffn: 4096, out: 1536, channels })
            }
            Preset::TinyE => {
                Some(SoundShape::Conformer { width: 128, layers: 2, heads: 4, ffn: 256, out: 192, channels: [16, 8] })
            }
            Preset::Dense12b => Some(SoundShape::Samples { frame: 640 }),
            Preset::Moe26bA4b | Preset::Dense31b | Preset::TinyMoe | Preset::TinyDense => None,
        }
    }

    pub fn set_metadata(&self, writer: &mut Writer, projection: u32) -> Result<(), WriteError> {
        let (kind, width, ffn, layers, heads) = match *self {
            SoundShape::Conformer { width, layers, heads, ffn, .. } => ("gemma4a", width, ffn, layers, heads),
            SoundShape::Samples { frame } => ("gemma4ua", frame, 0, 0, 0),
        };
        writer.set("clip.has_audio_encoder", true)?;
        writer.set("clip.audio.projector_type", kind)?;
        writer.set("clip.audio.embedding_length", width)?;
        writer.set("clip.audio.feed_forward_length", ffn)?;
        writer.set("clip.audio.block_count", layers)?;
        writer.set("clip.audio.attention.head_count", heads)?;
        writer.set("clip.audio.num_mel_bins", BINS)?;
        writer.set("clip.audio.projection_dim", projection)?;
        writer.set("clip.audio.attention.layer_norm_epsilon", 1e-6f32)
    }

    pub fn push_to(&self, list: &mut List, projection: u32) {
        let SoundShape::Conformer { width, layers, heads, ffn, out, channels } = *self else {
            let SoundShape::Samples { frame } = *self else { return };
            return list.matrix("mm.a.input_projection.weight", frame, projection);
        };
        for (index, inputs, outputs) in [(0, 1, channels[0]), (1, channels[0], channels[1])] {
            let fill = Fill::Symmetric { rms: 1.0 / (9.0 * inputs as f32).sqrt() };
            list.push(&format!("a.conv1d.{index}.weight"), &[3, 3, inputs, outputs], DType::F32, fill);
            list.vector(&format!("a.conv1d.{index}.norm.weight"), outputs, 0.5, 1.5);
        }
        let flat = BINS / 4 * channels[1];
        let fill = Fill::Symmetric { rms: 1.0 / (flat as f32).sqrt() };
        list.push("a.input_projection.weight", &[flat, width], DType::F32, fill);
        (0..layers).for_each(|layer| push_layer(list, layer, width, heads, ffn));
        list.matrix("a.pre_encode.out.weight", width, out);
        list.push("a.pre_encode.out.bias", &[out], DType::F32, Fill::Symmetric { rms: 0.1 });
        list.matrix("mm.a.input_projection.weight", out, projection);
    }
}

fn push_layer(list: &mut List, layer: u32, width: u32, heads: u32, ffn: u32) {
    let named = |tensor: &str| format!("a.blk.{layer}.{tensor}");
    let norms =
        ["ffn_norm", "ffn_post_norm", "ffn_norm_1", "ffn_post_norm_1", "attn_pre_norm", "attn_post_norm", "ln2"];
    for norm in norms.into_iter().chain(["conv_norm", "norm_conv"]) {
        list.vector(&named(&format!("{norm}.weight")), width, 0.5, 1.5);
    }
    list.vector(&named("per_dim_scale.weight"), width / heads, 0.5, 0.9);
    let fill = Fill::Symmetric { rms: 1.0 / (TAPS as f32).sqrt() };
    list.push(&named("conv_dw.weight"), &[TAPS, width], DType::F32, fill);
    list.matrix(&named("attn_k_rel.weight"), width, width);
    let matrices = [
        ("ffn_up", width, ffn),
        ("ffn_down", ffn, width),
        ("ffn_up_1", width, ffn),
        ("ffn_down_1", ffn, width),
        ("attn_q", width, width),
        ("attn_k", width, width),
        ("attn_v", width, width),
        ("attn_out", width, width),
        ("conv_pw1", width, 2 * width),
        ("conv_pw2", width, width),
    ];
    for (name, inputs, outputs) in matrices {
        list.clipped(&named(name), inputs, outputs, true);
    }
}
