//! What every kernel must do, as data: shapes, inputs, and what must come out by a plain oracle.
//!
//! A case knows nothing of who runs it: tests run it in the simulator and as host-compiled text, `gemma4c kernels --check`
//! on a GPU. A file has the cases of a family, or some of them, with their oracles; `families.rs` puts them together.

pub mod adapter;
pub mod attention;
mod cache;
pub mod draft;
pub mod gather;
pub mod gathered;
pub mod geglu;
pub mod gemm;
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
pub mod rows;
pub mod sample;
pub mod sound;
pub mod tower;
pub mod tower_fast;
pub mod wgmma;

use gemma4c_dsl::harness::{Case, Reference, Simulator};
use gemma4c_dsl::sim::Order;

/// What other launches leave in a parameter, as the simulator has it.
fn simulated(cases: Vec<Case>, param: &str) -> Reference {
    Reference::of(cases, param, &Simulator(Order::Forward))
}
