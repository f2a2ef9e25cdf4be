//! What every kernel must do, as data: shapes, inputs, and what must come out by a plain oracle.
//!
//! A case knows nothing of who runs it: tests run it in the simulator and as host-compiled text, `gemma4c kernels --check`
//! on a GPU. One file a family, with the family's oracles; [`crate::kernels::FAMILIES`] names its `cases`.

pub mod attention;
pub mod gather;
pub mod geglu;
pub mod grouped;
pub mod heads;
pub mod matvec;
pub mod moe;
pub mod norm;
pub mod per_layer;
pub mod plain;
pub mod probe;
pub mod product;
pub mod quantise;
pub mod repack;
pub mod sample;
pub mod wide;

use gemma4c_dsl::harness::Case;

use crate::kernels::FAMILIES;

/// The cases of every family, by the family's name.
pub fn all() -> Vec<(&'static str, Vec<Case>)> {
    FAMILIES.iter().map(|family| (family.name, (family.cases)())).collect()
}

/// A launch of a real size, to be timed. What its case expects is not compared: it only says how long the outputs are.
#[derive(Clone, Debug)]
pub struct Bench {
    /// Whose product it is, and its rows and columns.
    pub shape: String,
    /// The type of its weights.
    pub weights: String,
    pub case: Case,
    /// Operations of a product of many rows, whose speed they tell; of a single row's it is the bytes of the weights.
    pub flops: Option<u64>,
}

/// Makes the launches of a family that are worth timing, one at a time: some are hundreds of megabytes.
type Benches = fn() -> Box<dyn Iterator<Item = Bench>>;

/// The families that are timed on their own.
static BENCHES: &[(&str, Benches)] = &[("matvec", matvec::benches), ("product", wide::benches)];

/// The launches of a family that are worth timing.
pub fn benches(family: &str) -> impl Iterator<Item = Bench> {
    let timed = BENCHES.iter().filter(move |(name, _)| *name == family);
    timed.flat_map(|(_, benches)| benches())
}
