//! The tensors of a Gemma 4 model, by name and shape, declared to a graph builder.
//!
//! Everything missing or misshapen is collected and reported at once. Tensors that the text model does not need (towers
//! for images and sound, the unused K/V of layers that share another's) are ignored.

use std::collections::BTreeMap;

use gemma4c_blocks::DType;
use gemma4c_graph::{Builder, WeightId};

use super::config::{Config, Keys, Mixture};
use crate::gguf::{Header, supported_types, type_name};

pub(super) struct Weights {
    pub token_embd: WeightId,
    /// The LM head's matrix: `token_embd` again unless the file has an `output.weight`.
    pub head: WeightId,
    pub output_norm: WeightId,
    /// Divisors of the global layers' rotation frequencies.
    pub rope_freqs: Option<WeightId>,
    pub per_layer: Option<PerLayer>,
    pub layers: Vec<LayerWeights>,
}

/// Per-layer embeddings, before the layers.
pub(super) struct PerLayer {
    pub token_embd: WeightId,
    pub model_proj: WeightId,
    pub proj_norm: WeightId,
}

pub(super) struct LayerWeights {
    pub attn_norm: WeightId,
    pub q: WeightId,
    pub q_norm: WeightId,
    pub k: Option<WeightId>,
    pub k_norm: Option<WeightId>,
    pub v: Option<WeightId>,
    pub attn_output: WeightId,
    pub post_attention_norm: WeightId,
    pub ffn_norm: WeightId,
    pub gate: WeightId,
    pub up: WeightId,
    pub down: WeightId,
    pub post_ffw_norm: WeightId,
    pub experts: Option<ExpertWeights>,
    pub per_layer: Option<PerLayerGate>,
    pub output_scale: WeightId,
}

/// Where a layer takes in its slice of the per-layer embeddings.
pub(super) struct PerLayerGate {
    pub gate: WeightId,
    pub proj: WeightId,
    pub post_norm: WeightId,
}

pub(super) struct ExpertWeights {
    pub router: WeightId,
    pub router_scale: WeightId,
    pub pre_norm: WeightId,
    pub dense_post_norm: WeightId,
    pub post_norm: WeightId,
    pub gate_up: GateUp,
    pub down: WeightId,
    pub down_scale: WeightId,
}

/// Experts' gate and up matrices: stacked in one tensor, or two.
pub(super) enum GateUp {
    Stacked(WeightId),
    Apart { gate: WeightId, up: WeightId },
}

/// What a file lacks of the model its metadata describes.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("the model's tensors do not fit its metadata:{}", listed(problems))]
    Misfit { problems: Vec<String> },
    /// Types that are not read, and in how many of the tensors that a model needs.
    #[error(
        "this file has {}, which no model is read in; files in these types run: {}",
        counted(types),
        supported_types()
    )]
    Types { types: BTreeMap<u32, usize> },
    #[error("this file has a vocabulary alone, and none of a model's weights")]
    VocabularyOnly,
}

fn counted(types: &BTreeMap<u32, usize>) -> String {
    let tensors = |count: &usize| if *count == 1 { "1 tensor".into() } else { format!("{count} tensors") };
    let each: Vec<String> =
        types.iter().map(|(id, count)| format!("{} in {}", type_name(*id), tensors(count))).collect();
    each.join(" and ")
}

fn listed(problems: &[String]) -> String {
    const SHOWN: usize = 200;
    let mut text: String = problems.iter().take(SHOWN).map(|p| format!("\n  {p}")).collect();
    if problems.len() > SHOWN {
        text += &format!("\n  and {} more", problems.len() - SHOWN);
    }
    text
}

/// Looks tensors up and remembers what was wrong.
pub(super) struct Inventory<'a> {
    file: &'a Header,
    builder: &'a mut Builder,
    problems: Vec<String>,
    /// Types that are not read, and how many tensors have them.
    unread: BTreeMap<u32, usize>,
}

impl<'a> Inventory<'a> {
    pub(super) fn new(file: &'a Header, builder: &'a mut Builder) -> Inventory<'a> {
        Inventory { file, builder, problems: Vec::new(), unread: BTreeMap::new() }
    }

    /// All that was wrong, if anything was.
    pub(super) fn finish(self) -> Result<(), WeightsError> {
        if self.file.tensors().is_empty() {
            return Err(WeightsError::VocabularyOnly);
        }
        if !self.unread.is_empty() {
            return Err(WeightsError::Types { types: self.unread });
        }
        match self.problems.is_empty() {
            true => Ok(()),
            false => Err(WeightsError::Misfit { problems: self.problems }),
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    /// A matrix of any type: `[inputs, outputs]`, or with experts `[inputs, outputs, experts]`.
    pub(super) fn matrix(&mut self, name: &str, dims: &[u32]) -> WeightId {
        self.declare(name, dims, None)
    }

    /// A vector of f32: norms, scales and the like are never stored otherwise.
    pub(super) fn vector(&mut self, name: &str, len: u32) -> WeightId {
        self.declare(name, &[len], Some(DType::F32))
    }

    fn declare(&mut self, name: &str, dims: &[u32], only: Option<DType>) -> WeightId {
        self.reshaped(name, dims, dims, only)
    }

    /// A tensor that the file has in the shape `stored`, and the graph in the shape `dims`, of as many values in the
    /// same order.
    pub(super) fn reshaped(&mut self, name: &str, stored: &[u32], dims: &[u32], only: Option<DType>) -> WeightId {
        let [stored, shape] = [stored, dims].map(|dims| dims.iter().map(|d| *d as u64).collect::<Vec<u64>>());
        let dims = stored;
        let mut dtype = DType::F32;
        match self.file.tensor(name) {
            None => self.problems.push(format!("{} {dims:?} is missing", self.file.called(name))),
            Some(tensor) if tensor.dims() != dims => {
                let name = self.file.called(name);
                self.problems.push(format!("{name} has the shape {:?}, expected {dims:?}", tensor.dims()));
            }
            Some(tensor) => match tensor.dtype() {
                Err(_) => *self.unread.entry(tensor.ggml_type).or_default() += 1,
                Ok(found) if only.is_some_and(|only| only != found) => {
                    self.problems.push(format!("{} is {found}, expected f32", self.file.called(name)));
                }
                Ok(found) => dtype = found,
            },
        }
        self.builder.weight(name, dtype, &shape)
    }

    pub(super) fn layer(&mut self, config: &Config, index: usize) -> LayerWeights {
        let (layer, hidden) = (&config.layers[index], config.hidden);
        let attention = &layer.attention;
        let (query_width, key_width) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let owns_keys = !matches!(attention.keys, Keys::SharedWith { .. });
        let owns_values = attention.keys == Keys::Projected;
        LayerWeights {
            attn_norm: self.vector(&name("attn_norm.weight"), hidden),
            q: self.matrix(&name("attn_q.weight"), &[hidden, query_width]),
            q_norm: self.vector(&name("attn_q_norm.weight"), attention.head_dim),
            k: owns_keys.then(|| self.matrix(&name("attn_k.weight"), &[hidden, key_width])),
            k_norm: owns_keys.then(|| self.vector(&name("attn_k_norm.weight"), attention.head_dim)),
            v: owns_values.then(|| self.matrix(&name("attn_v.weight"), &[hidden, key_width])),
            attn_output: self.matrix(&name("attn_output.weight"), &[query_width, hidden]),
            post_attention_norm: self.vector(&name("post_attention_norm.weight"), hidden),
            ffn_norm: self.vector(&name("ffn_norm.weight"), hidden),
            gate: self.matrix(&name("ffn_gate.weight"), &[hidden, layer.ffn]),
            up: self.matrix(&name("ffn_up.weight"), &[hidden, layer.ffn]),
            down: self.matrix(&name("ffn_down.weight"), &[layer.ffn, hidden]),
            post_ffw_norm: self.vector(&name("post_ffw_norm.weight"), hidden),
            experts: config.mixture.map(|mixture| self.experts(&name, mixture, hidden)),
            per_layer: config.per_layer_width.map(|width| PerLayerGate {
                gate: self.matrix(&name("inp_gate.weight"), &[hidden, width]),
                proj: self.matrix(&name("proj.weight"), &[width, hidden]),
                post_norm: self.vector(&name("post_norm.weight"), hidden),
            }),
            output_scale: self.vector(&name("layer_output_scale.weight"), 1),
        }
    }

    fn experts(&mut self, name: &dyn Fn(&str) -> String, mixture: Mixture, hidden: u32) -> ExpertWeights {
        let Mixture { experts, ffn, .. } = mixture;
        let apart = self.file.tensor(&name("ffn_gate_exps.weight")).is_some();
        ExpertWeights {
            router: self.declare(&name("ffn_gate_inp.weight"), &[hidden, experts], Some(DType::F32)),
            router_scale: self.vector(&name("ffn_gate_inp.scale"), hidden),
            pre_norm: self.vector(&name("pre_ffw_norm_2.weight"), hidden),
            dense_post_norm: self.vector(&name("post_ffw_norm_1.weight"), hidden),
            post_norm: self.vector(&name("post_ffw_norm_2.weight"), hidden),
            gate_up: match apart {
                false => GateUp::Stacked(self.matrix(&name("ffn_gate_up_exps.weight"), &[hidden, 2 * ffn, experts])),
                true => GateUp::Apart {
                    gate: self.matrix(&name("ffn_gate_exps.weight"), &[hidden, ffn, experts]),
                    up: self.matrix(&name("ffn_up_exps.weight"), &[hidden, ffn, experts]),
                },
            },
            down: self.matrix(&name("ffn_down_exps.weight"), &[ffn, hidden, experts]),
            down_scale: self.vector(&name("ffn_down_exps.scale"), experts),
        }
    }
}

/// Declares every tensor the model needs.
pub(super) fn declare(file: &Header, config: &Config, builder: &mut Builder) -> Result<Weights, WeightsError> {
    let mut inventory = Inventory::new(file, builder);
    let (hidden, vocab) = (config.hidden, config.vocab_size);
    let token_embd = inventory.matrix("token_embd.weight", &[hidden, vocab]);
    let untied = file.tensor("output.weight").is_some();
    let global = config.layers.iter().find(|l| l.attention.reach == super::Reach::Global);
    let weights = Weights {
        token_embd,
        head: if untied { inventory.matrix("output.weight", &[hidden, vocab]) } else { token_embd },
        output_norm: inventory.vector("output_norm.weight", hidden),
        rope_freqs: global.map(|l| inventory.vector("rope_freqs.weight", l.attention.head_dim / 2)),
        per_layer: config.per_layer_width.map(|width| {
            let all = width * config.layers.len() as u32;
            PerLayer {
                token_embd: inventory.matrix("per_layer_token_embd.weight", &[all, vocab]),
                model_proj: inventory.matrix("per_layer_model_proj.weight", &[hidden, all]),
                proj_norm: inventory.vector("per_layer_proj_norm.weight", width),
            }
        }),
        layers: (0..config.layers.len()).map(|i| inventory.layer(config, i)).collect(),
    };
    inventory.finish()?;
    Ok(weights)
}
