//! Every tensor of a model: its name, shape, type, and what random numbers suit it.
//!
//! The scales keep activations sane at any depth. Norms undo whatever a matrix does to the size of a vector, so what is
//! left to choose is how sharp attention and router are, how fast the residual forgets its input, and how wide the
//! logits spread; see the constants.
//!
//! Massive channels are asked for by their size. Trained models have a few channels of the residual that are thousands
//! of times the others, and about the same for every token; random ones have none. Here the first layer's feed-forward
//! makes them: its up is its gate again, so that no hidden value is negative, and its down adds all of them up in these
//! channels. The norms that read the residual from then on weigh them down, and the per-layer gate, which reads it
//! without a norm, has no weights there.

use gemma4c_blocks::DType;

use super::preset::Shape;

/// A tensor of the model to be written.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    pub name: String,
    /// Fastest dimension first.
    pub dims: Vec<u64>,
    pub dtype: DType,
    pub(super) fill: Fill,
    /// The tensor whose random numbers it has: most often itself.
    pub(super) random: String,
    pub(super) massive: Massive,
}

/// What is done to [`MASSIVE_CHANNELS`] in a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Massive {
    Untouched,
    /// These values of every row are multiplied; in formats of blocks by 0 alone.
    Times(f32),
    /// These rows have this value everywhere.
    Rows(f32),
}

/// Channels of the residual: two in one quantisation block of 32, and one in another. Every preset is wide enough.
pub(super) const MASSIVE_CHANNELS: [u64; 3] = [37, 50, 200];

/// What a tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Around zero, of this root mean square.
    Symmetric { rms: f32 },
    /// Evenly between two bounds; F32 only.
    Between { low: f32, high: f32 },
    /// 1 for the pairs that rotate, a factor so large that the angle vanishes for the others; F32 only.
    RopeFactors { rotated: u32 },
    /// Integers: every number below the tensor's length once, in no order.
    EveryToken,
}

/// The rms of an embedding row, scaled by √d, relative to what a layer adds to the residual. It is small: otherwise the
/// tied LM head would see its own input again, and a short model would only repeat it.
const EMBEDDING: f32 = 0.125;
/// Standard deviation of the logits.
const LOGITS: f32 = 3.0;
/// Standard deviation of attention scores (there is no 1/√head_dim: the query and key norms carry it).
const SCORES: f32 = 1.5;
/// Standard deviation of router logits.
const ROUTER: f32 = 1.5;
/// The rms of what a layer's branches add to the residual.
const BRANCH: f32 = 1.5;
/// The rms of random values of NVFP4 before their tensor's factor, as `fill` makes them.
pub(super) const NVFP4_UNIT_RMS: f32 = 2.8235;

/// All tensors, with matrices as `dtype` where their rows allow it.
pub(super) fn inventory(shape: &Shape, dtype: DType, massive: Option<f32>) -> Vec<TensorSpec> {
    let mut list = List::new(dtype, massive);
    let [hidden, vocab] = [shape.hidden, shape.vocab];
    let root = (hidden as f32).sqrt();

    list.matrix("token_embd.weight", &[hidden, vocab], EMBEDDING / root);
    list.residual_norm("output_norm.weight", shape, shape.layers, LOGITS / EMBEDDING);
    let pairs = shape.head_dim.global / 2;
    list.push("rope_freqs.weight", &[pairs], DType::F32, Fill::RopeFactors { rotated: pairs / 4 });
    if shape.ple > 0 {
        let all = shape.ple * shape.layers;
        // Its rows are scaled by √ple when they are looked up.
        list.matrix("per_layer_token_embd.weight", &[all, vocab], 1.0 / (shape.ple as f32).sqrt());
        let fill = Fill::Symmetric { rms: 1.0 / root };
        list.push("per_layer_model_proj.weight", &[hidden, all], unquantised(dtype), fill);
        list.norm("per_layer_proj_norm.weight", shape.ple, 1.0);
    }
    for layer in 0..shape.layers {
        list.layer(shape, layer);
    }
    list.tensors
}

/// The type of a matrix that is never quantised.
fn unquantised(dtype: DType) -> DType {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => dtype,
        _ => DType::BF16,
    }
}

/// The type a matrix gets: formats in blocks of 256 give way to their neighbours in blocks of 32 where a row is no
/// multiple of 256, as in the real files.
fn fitting(dtype: DType, row: u32) -> DType {
    if dtype.row_bytes(row.into()).is_some() {
        return dtype;
    }
    match dtype {
        DType::Q4K => DType::Q5_0,
        DType::Q5K => DType::Q5_1,
        DType::Q6K => DType::Q8_0,
        DType::Q2K | DType::Q3K => DType::Q4_0,
        DType::IQ4XS | DType::IQ2XXS | DType::IQ2XS | DType::IQ2S | DType::IQ3XXS | DType::IQ3S => DType::IQ4NL,
        other => other,
    }
}

/// The share of massive channels in the mean square of a vector of this width, for a size of 1.
fn massive_share(width: u32) -> f32 {
    MASSIVE_CHANNELS.len() as f32 / width as f32
}

pub(super) struct List {
    pub(super) tensors: Vec<TensorSpec>,
    dtype: DType,
    /// How much larger than the others massive channels are, if there are any.
    massive: Option<f32>,
}

impl List {
    pub(super) fn new(dtype: DType, massive: Option<f32>) -> List {
        List { tensors: Vec::new(), dtype, massive }
    }

    pub(super) fn push(&mut self, name: &str, dims: &[u32], dtype: DType, fill: Fill) {
        let dims = dims.iter().map(|&dim| dim.into()).collect();
        let (name, random, massive) = (name.to_owned(), name.to_owned(), Massive::Untouched);
        self.tensors.push(TensorSpec { name, dims, dtype, fill, random, massive });
    }

    /// Says what is done to the massive channels of the last tensor, by their size.
    fn on_massive_channels(&mut self, what: impl Fn(f32) -> Massive) {
        if let (Some(size), Some(last)) = (self.massive, self.tensors.last_mut()) {
            last.massive = what(size);
        }
    }

    /// A norm of the residual before layer `layer`. With massive channels its weights damp them. They also dominate the
    /// rms it divides by, so the other channels get larger weights, most in the first layers: the residual grows with
    /// every layer.
    fn residual_norm(&mut self, name: &str, shape: &Shape, layer: u32, centre: f32) {
        let added = layer * if shape.ple > 0 { 3 } else { 2 };
        let centre = match self.massive.filter(|_| layer > 0) {
            Some(size) => centre * (1.0 + massive_share(shape.hidden) * size * size).sqrt() / (added as f32).sqrt(),
            None => centre,
        };
        self.norm(name, shape.hidden, centre);
        if layer > 0 {
            self.on_massive_channels(|size| Massive::Times(1.0 / size));
        }
    }

    /// Gives the last tensor the random numbers of another, where there are massive channels.
    fn twin_of(&mut self, name: String) {
        if let (Some(_), Some(last)) = (self.massive, self.tensors.last_mut()) {
            last.random = name;
        }
    }

    fn matrix(&mut self, name: &str, dims: &[u32], rms: f32) {
        if self.dtype == DType::NVFP4 && name.ends_with("token_embd.weight") {
            // Publishers leave tables alone.
            return self.push(name, dims, DType::BF16, Fill::Symmetric { rms });
        }
        self.push(name, dims, fitting(self.dtype, dims[0]), Fill::Symmetric { rms });
        // The size of the values is a tensor of its own: one number for each matrix.
        let stem = name.strip_suffix("weight").filter(|_| self.dtype == DType::NVFP4);
        if let Some(stem) = stem.filter(|stem| !stem.ends_with("ffn_down_exps.")) {
            let (factor, count) = (rms / NVFP4_UNIT_RMS, dims.get(2).copied().unwrap_or(1));
            self.push(&format!("{stem}scale"), &[count], DType::F32, Fill::Between { low: factor, high: factor });
        }
    }

    /// A matrix that keeps the size of what it is applied to.
    pub(super) fn linear(&mut self, name: &str, dims: &[u32]) {
        self.matrix(name, dims, 1.0 / (dims[0] as f32).sqrt());
    }

    /// A vector that is never negative, from half to one and a half of `centre`.
    pub(super) fn norm(&mut self, name: &str, len: u32, centre: f32) {
        self.push(name, &[len], DType::F32, Fill::Between { low: 0.5 * centre, high: 1.5 * centre });
    }

    pub(super) fn layer(&mut self, shape: &Shape, layer: u32) {
        let named = |tensor: &str| format!("blk.{layer}.{tensor}");
        let global = shape.is_global(layer);
        let (hidden, head) = (shape.hidden, shape.head_dim.of(global));
        let (queries, keys) = (shape.heads * head, shape.kv_heads.of(global) * head);
        let sharpness = (SCORES / (head as f32).sqrt()).sqrt();

        self.residual_norm(&named("attn_norm.weight"), shape, layer, 1.0);
        self.linear(&named("attn_q.weight"), &[hidden, queries]);
        self.norm(&named("attn_q_norm.weight"), head, sharpness);
        if shape.owns_kv(layer) {
            self.linear(&named("attn_k.weight"), &[hidden, keys]);
            self.norm(&named("attn_k_norm.weight"), head, sharpness);
            if !(global && shape.k_eq_v) {
                self.linear(&named("attn_v.weight"), &[hidden, keys]);
            }
        }
        self.linear(&named("attn_output.weight"), &[queries, hidden]);
        self.norm(&named("post_attention_norm.weight"), hidden, BRANCH);

        let ffn = shape.ffn_of(layer);
        self.residual_norm(&named("ffn_norm.weight"), shape, layer, 1.0);
        self.linear(&named("ffn_gate.weight"), &[hidden, ffn]);
        self.linear(&named("ffn_up.weight"), &[hidden, ffn]);
        if layer == 0 {
            self.twin_of(named("ffn_gate.weight"));
        }
        self.linear(&named("ffn_down.weight"), &[ffn, hidden]);
        let root = (ffn as f32).sqrt();
        if layer == 0 {
            self.on_massive_channels(|_| Massive::Rows(1.0 / root));
        }
        self.norm(&named("post_ffw_norm.weight"), hidden, BRANCH);
        if layer == 0 {
            // gelu(z) z is 0.5 on average and 1.2 in its square, so the sums are that much of the vector's rms.
            let summed = 0.5 * root / (1.2 + massive_share(hidden) * 0.25 * ffn as f32).sqrt();
            self.on_massive_channels(|size| Massive::Times(size / summed));
        }

        if let Some(experts) = shape.experts {
            // The router's input is scaled by 1/√d already.
            let router = Fill::Symmetric { rms: ROUTER };
            self.push(&named("ffn_gate_inp.weight"), &[hidden, experts.count], DType::F32, router);
            self.residual_norm(&named("ffn_gate_inp.scale"), shape, layer, 1.0);
            self.residual_norm(&named("pre_ffw_norm_2.weight"), shape, layer, 1.0);
            self.linear(&named("ffn_gate_up_exps.weight"), &[hidden, 2 * experts.width, experts.count]);
            self.linear(&named("ffn_down_exps.weight"), &[experts.width, hidden, experts.count]);
            // Where experts have a factor anyway, it is a part of this one.
            let factor = match self.dtype {
                DType::NVFP4 => 1.0 / (experts.width as f32).sqrt() / NVFP4_UNIT_RMS,
                _ => 1.0,
            };
            self.norm(&named("ffn_down_exps.scale"), experts.count, factor);
            self.norm(&named("post_ffw_norm_1.weight"), hidden, 1.0);
            self.norm(&named("post_ffw_norm_2.weight"), hidden, 1.0);
        }
        if shape.ple > 0 {
            self.linear(&named("inp_gate.weight"), &[hidden, shape.ple]);
            self.on_massive_channels(|_| Massive::Times(0.0));
            self.linear(&named("proj.weight"), &[shape.ple, hidden]);
            self.norm(&named("post_norm.weight"), hidden, BRANCH);
        }
        // Massive channels come once: layers must not forget them.
        let scale = match self.massive {
            Some(_) => Fill::Between { low: 0.95, high: 1.05 },
            None => Fill::Between { low: 0.6, high: 0.95 },
        };
        self.push(&named("layer_output_scale.weight"), &[1], DType::F32, scale);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Preset;
    use super::*;

    /// Tensor counts of the real files without dead keys and values, and parameter totals of the models.
    #[test]
    fn the_real_sizes_are_met_to_the_last_tensor() {
        for (preset, count, total) in [
            (Preset::E2b, 541, 4_647_450_147),
            (Preset::E4b, 666, 7_518_069_290),
            (Preset::Dense12b, 667, 11_907_350_576),
            (Preset::Moe26bA4b, 658, 25_233_142_046),
            (Preset::Dense31b, 833, 30_697_345_596),
        ] {
            let shape = preset.shape(None).unwrap();
            let tensors = inventory(&shape, DType::Q8_0, None);
            assert_eq!(tensors.len(), count, "{preset:?}");
            // The published totals count the keys and values that shared layers have in older files.
            let dead: u64 = (0..shape.layers)
                .filter(|&l| !shape.owns_kv(l))
                .map(|l| {
                    let head = u64::from(shape.head_dim.of(shape.is_global(l)));
                    let rows = head * u64::from(shape.kv_heads.of(shape.is_global(l)));
                    2 * rows * u64::from(shape.hidden) + head
                })
                .sum();
            let parameters: u64 = tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum();
            assert_eq!(parameters + dead, total, "{preset:?}");
        }
    }

    #[test]
    fn rows_that_do_not_divide_fall_back_as_in_the_real_files() {
        let shape = Preset::Moe26bA4b.shape(Some(2)).unwrap();
        for (dtype, narrow) in [
            (DType::Q4K, DType::Q5_0),
            (DType::Q5K, DType::Q5_1),
            (DType::Q6K, DType::Q8_0),
            (DType::IQ4XS, DType::IQ4NL),
            (DType::Q3K, DType::Q4_0),
            (DType::IQ2S, DType::IQ4NL),
            (DType::Q4_0, DType::Q4_0),
        ] {
            for tensor in inventory(&shape, dtype, None) {
                let expected = match tensor.name.rsplit_once("blk.").map_or(&*tensor.name, |t| &t.1[2..]) {
                    "ffn_down.weight" | "ffn_down_exps.weight" => narrow,
                    "ffn_gate_inp.weight" => DType::F32,
                    _ if tensor.dims.len() == 1 => DType::F32,
                    _ => dtype,
                };
                assert_eq!(tensor.dtype, expected, "{} as {dtype}", tensor.name);
            }
        }
    }
}
