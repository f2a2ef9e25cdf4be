//! Random projector files (mmproj): the towers of the real sizes, and tiny ones. Those for sound are in
//! [`sound`](super::sound).
//!
//! The numbers keep activations sane: norms undo whatever a matrix does to the size of a vector. Bounds of clipped
//! products are far outside, so that few values meet them.

use gemma4c_blocks::DType;

use super::error::SynthError;
use super::inventory::{Fill, TensorSpec};
use super::list::List;
use super::preset::{Preset, Shape};
use super::sound::SoundShape;
use crate::gguf::{WriteError, Writer};

/// A tower with layers, or none: patches are projected as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TowerShape {
    width: u32,
    encoder: Option<Encoder>,
    /// Rows of either position table.
    positions: u32,
    /// Width of the text.
    projection: u32,
    sound: Option<SoundShape>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Encoder {
    layers: u32,
    heads: u32,
    ffn: u32,
    clipped: bool,
    standardised: bool,
}

const PATCH: u32 = 16;
const POOL: u32 = 3;
const POSITIONS: u32 = 10_240;

impl TowerShape {
    pub fn of(preset: Preset, text: &Shape) -> TowerShape {
        let (small, large) = (
            Encoder { layers: 16, heads: 12, ffn: 3072, clipped: true, standardised: false },
            Encoder { layers: 27, heads: 16, ffn: 4304, clipped: false, standardised: true },
        );
        let (width, encoder, positions) = match preset {
            Preset::E2b | Preset::E4b => (768, Some(small), POSITIONS),
            Preset::Moe26bA4b | Preset::Dense31b => (1152, Some(large), POSITIONS),
            Preset::Dense12b => (text.hidden, None, 1120),
            Preset::TinyE => (192, Some(Encoder { layers: 2, heads: 3, ffn: 256, ..small }), 64),
            Preset::TinyMoe | Preset::TinyDense => (144, Some(Encoder { layers: 2, heads: 2, ffn: 272, ..large }), 64),
        };
        TowerShape { width, encoder, positions, projection: text.hidden, sound: SoundShape::of(preset) }
    }

    pub fn set_metadata(&self, writer: &mut Writer, name: &str) -> Result<(), WriteError> {
        writer.set("general.architecture", "clip")?;
        writer.set("general.type", "mmproj")?;
        writer.set("general.name", format!("Gemma 4 {name}, random tower").as_str())?;
        writer.set("clip.has_vision_encoder", true)?;
        writer.set("clip.vision.projector_type", if self.encoder.is_some() { "gemma4v" } else { "gemma4uv" })?;
        let Encoder { layers, heads, ffn, .. } =
            self.encoder.unwrap_or(Encoder { layers: 0, heads: 0, ffn: 0, clipped: false, standardised: false });
        writer.set("clip.vision.embedding_length", self.width)?;
        writer.set("clip.vision.feed_forward_length", ffn)?;
        writer.set("clip.vision.block_count", layers)?;
        writer.set("clip.vision.attention.head_count", heads)?;
        writer.set("clip.vision.projection_dim", self.projection)?;
        writer.set("clip.vision.patch_size", PATCH)?;
        writer.set("clip.vision.image_size", 224u32)?;
        writer.set_array("clip.vision.image_mean", [0f32; 3])?;
        writer.set_array("clip.vision.image_std", [1f32; 3])?;
        writer.set("clip.vision.attention.layer_norm_epsilon", 1e-6f32)?;
        self.sound.map_or(Ok(()), |sound| sound.set_metadata(writer, self.projection))
    }

    pub fn tensors(&self, dtype: DType) -> Vec<TensorSpec> {
        let mut list = List::new(dtype);
        let width = self.width;
        match self.encoder {
            Some(encoder) => {
                list.push("v.patch_embd.weight", &[PATCH, PATCH, 3, width], DType::F32, Fill::Symmetric { rms: 0.05 });
                (0..encoder.layers).for_each(|layer| push_layer(&mut list, encoder, width, layer));
                if encoder.standardised {
                    list.push("v.std_bias", &[width], DType::F32, Fill::Symmetric { rms: 1.0 });
                    list.vector("v.std_scale", width, 0.5, 1.5);
                }
            }
            None => {
                let patch = 3 * (PATCH * POOL) * (PATCH * POOL);
                let fill = Fill::Symmetric { rms: 1.0 / (patch as f32).sqrt() };
                list.push("v.patch_embd.weight", &[patch, width], DType::F32, fill);
                list.push("v.patch_embd.bias", &[width], DType::F32, Fill::Symmetric { rms: 0.1 });
                for (index, width) in [(1, patch), (2, width), (3, width)] {
                    list.vector(&format!("v.patch_norm.{index}.weight"), width, 0.5, 1.5);
                    let name = format!("v.patch_norm.{index}.bias");
                    list.push(&name, &[width], DType::F32, Fill::Symmetric { rms: 0.1 });
                }
            }
        }
        let positions = Fill::Symmetric { rms: 0.3 };
        list.push("v.position_embd.weight", &[width, self.positions, 2], DType::F32, positions);
        list.matrix("mm.input_projection.weight", width, self.projection);
        if let Some(sound) = self.sound {
            sound.push_to(&mut list, self.projection);
        }
        list.tensors
    }
}

fn push_layer(list: &mut List, encoder: Encoder, width: u32, layer: u32) {
    let Encoder { heads, ffn, .. } = encoder;
    let named = |tensor: &str| format!("v.blk.{layer}.{tensor}");
    for norm in ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"] {
        list.vector(&named(&format!("{norm}.weight")), width, 0.5, 1.5);
    }
    for norm in ["attn_q_norm", "attn_k_norm"] {
        list.vector(&named(&format!("{norm}.weight")), width / heads, 0.2, 0.6);
    }
    let matrices = [
        ("attn_q", width, width),
        ("attn_k", width, width),
        ("attn_v", width, width),
        ("attn_out", width, width),
        ("ffn_gate", width, ffn),
        ("ffn_up", width, ffn),
        ("ffn_down", ffn, width),
    ];
    for (name, inputs, outputs) in matrices {
        list.clipped(&named(name), inputs, outputs, encoder.clipped);
    }
}

/// A projector for a model of that preset: what to write, and its tensors.
pub(super) fn projector(preset: Preset, text: &Shape, dtype: DType) -> Result<(Writer, Vec<TensorSpec>), SynthError> {
    let shape = TowerShape::of(preset, text);
    let mut writer = Writer::new();
    shape.set_metadata(&mut writer, preset.name())?;
    let tensors = shape.tensors(dtype);
    for tensor in &tensors {
        writer.tensor(&tensor.name, &tensor.dims, tensor.dtype)?;
    }
    Ok((writer, tensors))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tensors of the real files, and the whole millions of parameters that their layouts add up to.
    #[test]
    fn the_real_towers_are_met_to_the_last_tensor() {
        for (preset, count, millions) in [
            (Preset::E2b, 1411, 475),
            (Preset::E4b, 1411, 478),
            (Preset::Moe26bA4b, 356, 572),
            (Preset::Dense12b, 11, 52),
        ] {
            let text = preset.shape(None).unwrap();
            let tensors = TowerShape::of(preset, &text).tensors(DType::BF16);
            let parameters: u64 = tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum();
            assert_eq!((tensors.len(), parameters / 1_000_000), (count, millions), "{preset:?}");
        }
    }
}
