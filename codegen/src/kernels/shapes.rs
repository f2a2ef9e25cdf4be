//! The sizes of the five models, in one table: what instances are listed for, compiled and tested.
//!
//! No kernel reads it, and no plan: a plan takes its sizes from the model file. It only says which instances such plans need.

/// A text model's sizes.
#[derive(Debug)]
pub struct Model {
    pub name: &'static str,
    /// Values of the residual stream.
    pub width: u32,
    pub layers: u32,
    pub q_heads: u32,
    /// Positions that a sliding layer sees.
    pub window: u32,
    pub sliding: Heads,
    pub global: Heads,
    /// Later layers have no keys and values of their own.
    pub shares_kv: bool,
    /// Hidden values of the dense feed-forward, for each kind of layer.
    pub hidden: &'static [u32],
    /// Values of a per-layer input.
    pub per_layer: Option<u32>,
    pub experts: Option<Experts>,
}

/// The heads of one kind of layer.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub kv: u32,
    /// Values of a head.
    pub dim: u32,
    /// Values are the keys before their norm: the layer has no matrix for them.
    pub values_are_keys: bool,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    pub count: u32,
    /// Experts that a row goes to.
    pub top: u32,
    /// Hidden values of one.
    pub hidden: u32,
}

/// Tokens of every model.
pub const VOCABULARY: u32 = 262_144;
/// The norms' epsilon, in every model.
pub const NORM_EPSILON: f32 = 1e-6;

const fn sliding(kv: u32) -> Heads {
    Heads { kv, dim: 256, values_are_keys: false }
}

const fn global(kv: u32, values_are_keys: bool) -> Heads {
    Heads { kv, dim: 512, values_are_keys }
}

pub static E2B: Model = Model {
    name: "e2b",
    width: 1536,
    layers: 35,
    q_heads: 8,
    window: 512,
    sliding: sliding(1),
    global: global(1, false),
    shares_kv: true,
    hidden: &[6144, 12288],
    per_layer: Some(256),
    experts: None,
};

pub static E4B: Model = Model {
    name: "e4b",
    width: 2560,
    layers: 42,
    q_heads: 8,
    window: 512,
    sliding: sliding(2),
    global: global(2, false),
    shares_kv: true,
    hidden: &[10240],
    per_layer: Some(256),
    experts: None,
};

pub static DENSE_12B: Model = Model {
    name: "12b",
    width: 3840,
    layers: 48,
    q_heads: 16,
    window: 1024,
    sliding: sliding(8),
    global: global(1, true),
    shares_kv: false,
    hidden: &[15360],
    per_layer: None,
    experts: None,
};

pub static MIXTURE_26B: Model = Model {
    name: "26b-a4b",
    width: 2816,
    layers: 30,
    q_heads: 16,
    window: 1024,
    sliding: sliding(8),
    global: global(2, true),
    shares_kv: false,
    hidden: &[2112],
    per_layer: None,
    experts: Some(Experts { count: 128, top: 8, hidden: 704 }),
};

pub static DENSE_31B: Model = Model {
    name: "31b",
    width: 5376,
    layers: 60,
    q_heads: 32,
    window: 1024,
    sliding: sliding(16),
    global: global(4, true),
    shares_kv: false,
    hidden: &[21504],
    per_layer: None,
    experts: None,
};

pub static MODELS: [&Model; 5] = [&E2B, &E4B, &DENSE_12B, &MIXTURE_26B, &DENSE_31B];

impl Model {
    /// Both kinds of layer, by name.
    pub fn kinds(&self) -> [(&'static str, Heads); 2] {
        [("sliding", self.sliding), ("global", self.global)]
    }

    /// Query heads to a key-value head.
    pub fn group(&self, heads: Heads) -> u32 {
        self.q_heads / heads.kv
    }
}

/// Those items that are not the same as an earlier one, in order.
pub fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for item in items {
        if !found.contains(&item) {
            found.push(item);
        }
    }
    found
}
