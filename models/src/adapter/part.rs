//! The parts of a model that an adapter can change: the text model, and the towers of its projector.

/// A part, by the names of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Text,
    Vision,
    Audio,
}

impl Part {
    /// The one that has a tensor of such a name.
    pub fn of(tensor: &str) -> Part {
        match tensor {
            _ if tensor.starts_with("a.") || tensor.starts_with("mm.a.") => Part::Audio,
            _ if tensor.starts_with("v.") || tensor.starts_with("mm.") => Part::Vision,
            _ => Part::Text,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Part::Text => "text",
            Part::Vision => "vision",
            Part::Audio => "audio",
        }
    }
}

/// Modules of an encoder's layer for pictures, and the tensors' names in a projector.
const OF_VISION_LAYER: [(&str, &str); 7] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_out"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The same for sound.
const OF_AUDIO_LAYER: [(&str, &str); 11] = [
    ("feed_forward1.ffw_layer_1", "ffn_up"),
    ("feed_forward1.ffw_layer_2", "ffn_down"),
    ("feed_forward2.ffw_layer_1", "ffn_up_1"),
    ("feed_forward2.ffw_layer_2", "ffn_down_1"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.post", "attn_out"),
    ("self_attn.relative_k_proj", "attn_k_rel"),
    ("lconv1d.linear_start", "conv_pw1"),
    ("lconv1d.linear_end", "conv_pw2"),
];

/// Outside of layers. The product with a picture's patches is not among them: a projector has its columns in another
/// order.
const OF_TOWERS: [(&str, &str); 4] = [
    ("embed_vision.embedding_projection", "mm.input_projection.weight"),
    ("embed_audio.embedding_projection", "mm.a.input_projection.weight"),
    ("audio_tower.subsample_conv_projection.input_proj_linear", "a.input_projection.weight"),
    ("audio_tower.output_proj", "a.pre_encode.out.weight"),
];

/// Where the names of towers' modules begin, without what precedes them in a checkpoint.
const TOWERS: [&str; 6] =
    ["vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.", "multi_modal_projector."];

/// Whether a module is of a tower.
pub fn is_of_tower(module: &str) -> bool {
    TOWERS.iter().any(|tower| module.starts_with(tower))
}

/// What a tower's module is called in a projector. Where a product's values are kept within bounds, the matrix is a
/// module in that one, `linear`.
pub fn in_projector(module: &str) -> Option<String> {
    let module = module.strip_suffix(".linear").unwrap_or(module);
    let find = |names: &[(&str, &'static str)], module: &str| {
        names.iter().find(|(name, _)| *name == module).map(|(_, tensor)| *tensor)
    };
    if let Some(tensor) = find(&OF_TOWERS, module) {
        return Some(tensor.into());
    }
    let layers: [(&str, &str, &[_]); 2] =
        [("vision_tower.encoder.layers.", "v", &OF_VISION_LAYER), ("audio_tower.layers.", "a", &OF_AUDIO_LAYER)];
    layers.iter().find_map(|(prefix, tower, names)| {
        let (layer, rest) = module.strip_prefix(prefix)?.split_once('.')?;
        let layer: u32 = layer.parse().ok()?;
        Some(format!("{tower}.blk.{layer}.{}.weight", find(names, rest)?))
    })
}
