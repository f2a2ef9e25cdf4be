//! Which types the tensors of a file have: one for all matrices, or a mix as publishers make them.
//!
//! Mixes are for whoever looks at headers: a random model is written in one type.

use gemma4c_blocks::DType;

use super::inventory::TensorSpec;

/// The types of a model's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Types {
    /// Every matrix of this type, as `gemma4c synth` writes it.
    All(DType),
    /// Q4_K with more bits for values and down in some layers and for the tables, as `llama-quantize` mixes them; the
    /// per-layer matrices in f32, as most publishers leave them.
    Q4KMixed,
    /// Q4_0 with tables of Q6_K and the per-layer projection in f16: files of quantisation-aware training.
    Q4_0Trained,
    /// Q8_0 with experts of Q6_K, which leaves the dense half of a mixture alone.
    Q8_0WithQ6KExperts,
    /// Q8_0 with tables and per-layer matrices of another type.
    Q8_0WithTables(DType),
}

impl Types {
    pub fn name(self) -> String {
        match self {
            Types::All(dtype) => dtype.to_string(),
            Types::Q4KMixed => "q4_k_m".into(),
            Types::Q4_0Trained => "q4_0 with q6_k tables".into(),
            Types::Q8_0WithQ6KExperts => "q8_0 with q6_k experts".into(),
            Types::Q8_0WithTables(dtype) => format!("q8_0 with {dtype} tables"),
        }
    }

    /// The type of most matrices.
    pub fn base(self) -> DType {
        match self {
            Types::All(dtype) => dtype,
            Types::Q4KMixed => DType::Q4K,
            Types::Q4_0Trained => DType::Q4_0,
            Types::Q8_0WithQ6KExperts | Types::Q8_0WithTables(_) => DType::Q8_0,
        }
    }

    /// The type of a tensor that is of [`Types::base`] otherwise. `place` is its number among those of the same name in
    /// all layers, and how many of them there are.
    pub(super) fn of(self, tensor: &TensorSpec, place: (usize, usize)) -> DType {
        let name = name_in_layer(tensor);
        let is_table = matches!(name, "token_embd.weight" | "per_layer_token_embd.weight");
        let is_per_layer = matches!(name, "inp_gate.weight" | "proj.weight");
        match self {
            Types::Q8_0WithTables(dtype) if is_table || is_per_layer => dtype,
            Types::Q4KMixed | Types::Q4_0Trained if is_table => DType::Q6K,
            Types::Q4KMixed => match name {
                _ if is_per_layer => DType::F32,
                "attn_v.weight" | "ffn_down.weight" | "ffn_down_exps.weight" if has_more_bits(place) => {
                    // Rows that are not whole blocks of 256 values take the neighbouring type.
                    if tensor.dtype == DType::Q4K { DType::Q6K } else { DType::Q8_0 }
                }
                _ => tensor.dtype,
            },
            Types::Q4_0Trained if name == "per_layer_model_proj.weight" => DType::F16,
            Types::Q8_0WithQ6KExperts if name == "ffn_gate_up_exps.weight" => DType::Q6K,
            _ => tensor.dtype,
        }
    }
}

/// `attn_q.weight` of `blk.0.attn_q.weight`.
pub(super) fn name_in_layer(tensor: &TensorSpec) -> &str {
    let in_layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    in_layer.map_or(tensor.name.as_str(), |(_, name)| name)
}

/// Those that `llama-quantize` gives more bits: the first and the last eighth, and every third between.
fn has_more_bits((at, count): (usize, usize)) -> bool {
    let eighth = count / 8;
    at < eighth || at >= 7 * count / 8 || (at - eighth) % 3 == 2
}
