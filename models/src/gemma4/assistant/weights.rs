//! The tensors of a drafter, by name and shape.

use gemma4c_blocks::DType;
use gemma4c_graph::{Builder, WeightId};

use super::super::config::{Config, Reach};
use super::super::weights::{Inventory, Weights as BodyWeights, WeightsError};
use super::config::DrafterConfig;
use crate::gguf::Header;

/// The table of embeddings, in the model's file and in the drafter's.
pub(super) const TABLE: &str = "token_embd.weight";

pub(super) struct Weights {
    /// The model's table, under a name of its own: the drafter has a table of the same name.
    pub embedding: WeightId,
    pub pre_projection: WeightId,
    pub post_projection: WeightId,
    pub centroids: Option<WeightId>,
    /// Layers, the norm behind them and the LM head.
    pub body: BodyWeights,
}

pub(super) fn declare(
    file: &Header,
    config: &DrafterConfig,
    target_file: &Header,
    target: &Config,
    builder: &mut Builder,
) -> Result<Weights, WeightsError> {
    let shape = [target.hidden as u64, target.vocab_size as u64];
    // That the model has it was found when the model's own graph was declared.
    let dtype = target_file.tensor(TABLE).and_then(|table| table.dtype().ok()).unwrap_or(DType::F32);
    let embedding = builder.weight(&format!("target.{TABLE}"), dtype, &shape);
    let mut inventory = Inventory::new(file, builder);
    let (body, width) = (&config.body, config.body.hidden);
    let head = inventory.matrix(TABLE, &[width, body.vocab_size]);
    let global = body.layers.iter().find(|layer| layer.attention.reach == Reach::Global);
    let weights = Weights {
        embedding,
        pre_projection: inventory.matrix("nextn.pre_projection.weight", &[2 * target.hidden, width]),
        post_projection: inventory.matrix("nextn.post_projection.weight", &[width, target.hidden]),
        centroids: config
            .centroids
            .map(|centroids| inventory.matrix("masked_embd_centroids.weight", &[width, centroids.count])),
        body: BodyWeights {
            token_embd: head,
            head,
            output_norm: inventory.vector("output_norm.weight", width),
            rope_freqs: global.map(|layer| inventory.vector("rope_freqs.weight", layer.attention.head_dim / 2)),
            per_layer: None,
            layers: (0..body.layers.len()).map(|index| inventory.layer(body, index)).collect(),
        },
    };
    inventory.finish()?;
    Ok(weights)
}
