//! The shapes models come in: the five real sizes, and a tiny one of each kind for tests and demos.
//!
//! These numbers feed the writer of random models only. Nothing that reads a model looks here: a reader takes its shape
//! from the file, and the two meet in the tests.

use super::error::SynthError;

/// A model whose shape is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    E2b,
    E4b,
    Dense12b,
    Moe26bA4b,
    Dense31b,
    /// Per-layer embeddings and shared keys and values, as E2B.
    TinyE,
    /// As 12B and 31B.
    TinyDense,
    /// Experts, as 26B-A4B; their rows do not divide into blocks of 256 either.
    TinyMoe,
}

/// One number for sliding layers, one for global ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByKind {
    pub sliding: u32,
    pub global: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Experts {
    pub count: u32,
    pub used: u32,
    pub width: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub hidden: u32,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: ByKind,
    pub head_dim: ByKind,
    pub ffn: u32,
    /// Width of the feed-forward in layers that share keys and values.
    pub shared_ffn: u32,
    /// Every `period`-th layer is global.
    pub period: u32,
    pub window: u32,
    /// The last so many layers take the keys and values of earlier ones.
    pub shared: u32,
    /// Width of the per-layer embeddings, or 0.
    pub ple: u32,
    /// Global layers use their keys as values.
    pub k_eq_v: bool,
    pub experts: Option<Experts>,
    pub vocab: u32,
    pub context: u32,
}

const HEAD_DIM: ByKind = ByKind { sliding: 256, global: 512 };
const REAL_VOCAB: u32 = 262_144;
const TINY_VOCAB: u32 = 1024;

/// What E2B and E4B have in common.
const E: Shape = Shape {
    hidden: 0,
    layers: 0,
    heads: 8,
    kv_heads: ByKind { sliding: 1, global: 1 },
    head_dim: HEAD_DIM,
    ffn: 0,
    shared_ffn: 0,
    period: 0,
    window: 512,
    shared: 0,
    ple: 256,
    k_eq_v: false,
    experts: None,
    vocab: REAL_VOCAB,
    context: 131_072,
};

/// What 12B, 26B-A4B and 31B have in common.
const DENSE: Shape = Shape { period: 6, window: 1024, ple: 0, k_eq_v: true, context: 262_144, ..E };

const TINY: Shape = Shape {
    hidden: 256,
    heads: 4,
    ffn: 256,
    shared_ffn: 256,
    period: 2,
    window: 32,
    vocab: TINY_VOCAB,
    context: 8192,
    ..E
};

const fn kv(sliding: u32, global: u32) -> ByKind {
    ByKind { sliding, global }
}

impl Preset {
    pub const ALL: [Preset; 8] = {
        use Preset::*;
        [E2b, E4b, Dense12b, Moe26bA4b, Dense31b, TinyE, TinyDense, TinyMoe]
    };

    pub fn name(self) -> &'static str {
        match self {
            Preset::E2b => "e2b",
            Preset::E4b => "e4b",
            Preset::Dense12b => "12b",
            Preset::Moe26bA4b => "26b-a4b",
            Preset::Dense31b => "31b",
            Preset::TinyE => "tiny-e",
            Preset::TinyDense => "tiny-dense",
            Preset::TinyMoe => "tiny-moe",
        }
    }

    pub fn from_name(name: &str) -> Option<Preset> {
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// Layers of the whole model.
    pub fn layers(self) -> u32 {
        self.full_shape().layers
    }

    /// The least layers that keep the model's kind: one sliding and one global layer that own their keys and values,
    /// and one that shares them where the model has such.
    pub fn least_layers(self) -> u32 {
        if self.full_shape().shared > 0 { 3 } else { 2 }
    }

    #[rustfmt::skip]
    pub(super) fn full_shape(self) -> Shape {
        match self {
            Preset::E2b => Shape {
                hidden: 1536, layers: 35, ffn: 6144, shared_ffn: 12_288, period: 5, shared: 20, ..E
            },
            Preset::E4b => Shape {
                hidden: 2560, layers: 42, ffn: 10_240, shared_ffn: 10_240, period: 6, shared: 18, kv_heads: kv(2, 2), ..E
            },
            Preset::Dense12b => Shape {
                hidden: 3840, layers: 48, heads: 16, kv_heads: kv(8, 1), ffn: 15_360, ..DENSE
            },
            Preset::Moe26bA4b => Shape {
                hidden: 2816, layers: 30, heads: 16, kv_heads: kv(8, 2), ffn: 2112,
                experts: Some(Experts { count: 128, used: 8, width: 704 }), ..DENSE
            },
            Preset::Dense31b => Shape {
                hidden: 5376, layers: 60, heads: 32, kv_heads: kv(16, 4), ffn: 21_504, ..DENSE
            },
            Preset::TinyE => Shape { layers: 6, shared: 2, shared_ffn: 512, ..TINY },
            Preset::TinyDense => Shape { layers: 4, kv_heads: kv(2, 1), ple: 0, k_eq_v: true, ..TINY },
            Preset::TinyMoe => Shape {
                layers: 3, period: 3, kv_heads: kv(2, 1), ffn: 288, ple: 0, k_eq_v: true,
                experts: Some(Experts { count: 8, used: 2, width: 160 }), ..TINY
            },
        }
    }

    /// The shape with so many layers. A short model keeps the share of layers that own their keys and values, ends them
    /// with a global layer as the real ones do, and puts its global layers closer together where it would have none.
    pub(super) fn shape(self, layers: Option<u32>) -> Result<Shape, SynthError> {
        let full = self.full_shape();
        let layers = layers.unwrap_or(full.layers);
        let (least, most) = (self.least_layers(), full.layers);
        if !(least..=most).contains(&layers) {
            return Err(SynthError::Layers { preset: self.name(), layers, least, most });
        }
        if full.shared == 0 {
            return Ok(Shape { layers, period: full.period.min(layers), ..full });
        }
        let owning = (layers * (full.layers - full.shared)).div_ceil(full.layers).max(2);
        let period = full.period.min(owning);
        Ok(Shape { layers, period, shared: layers - owning / period * period, ..full })
    }
}

impl Shape {
    pub fn is_global(&self, layer: u32) -> bool {
        (layer + 1).is_multiple_of(self.period)
    }

    pub fn owns_kv(&self, layer: u32) -> bool {
        layer < self.layers - self.shared
    }

    pub fn ffn_of(&self, layer: u32) -> u32 {
        if self.owns_kv(layer) { self.ffn } else { self.shared_ffn }
    }
}

impl ByKind {
    pub fn of(self, global: bool) -> u32 {
        if global { self.global } else { self.sliding }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_models_keep_their_kind() {
        for preset in Preset::ALL {
            let full = preset.full_shape();
            assert_eq!(preset.shape(None).unwrap(), full);
            assert_eq!(preset.shape(Some(full.layers)).unwrap(), full);
            assert!(preset.shape(Some(preset.least_layers() - 1)).is_err());
            assert!(preset.shape(Some(full.layers + 1)).is_err());
            for layers in preset.least_layers()..=full.layers {
                let shape = preset.shape(Some(layers)).unwrap();
                let owners: Vec<u32> = (0..layers).filter(|&l| shape.owns_kv(l)).collect();
                assert_eq!(shape.layers, layers);
                assert!(owners.iter().any(|&l| shape.is_global(l)), "{preset:?} {layers}");
                assert!(owners.iter().any(|&l| !shape.is_global(l)), "{preset:?} {layers}");
                assert_eq!(shape.shared > 0, full.shared > 0, "{preset:?} {layers}");
                if shape.shared > 0 {
                    // So that the donors are the last two owners, whatever the rule a reader finds them by.
                    let last = owners.len() as u32 - 1;
                    assert!(shape.is_global(last) && !shape.is_global(last - 1), "{preset:?} {layers}");
                }
            }
        }
    }
}
