//! Mixture of experts: the router, and the products of the experts it chose, over repacked weights of any type.
//!
//! The experts' matrices lie one behind the other as one tall matrix, so expert e's rows start at `e * rows`. Which experts
//! a row goes to is known on the device alone: the products read their numbers from the router's output, and so cannot
//! fetch weights ahead of their predecessor. What they can do is have all weights on their way at once: an expert is
//! small, and a warp's share of it fits its registers.
//!
//! [`gate_up`] gives each (row, choice) its hidden values, [`down`] brings all choices of a row back together. Weight
//! formats are those of the matrix-vector product. For many rows these kernels are right, but read an expert once for
//! each row that chose it.

pub mod down;
pub mod gate_up;
pub mod router;

use gemma4c_blocks::DType;
use gemma4c_dsl::{DeviceDef, Instance};

use crate::kernels::matvec::formats::{Format, format};
use crate::kernels::matvec::slots;
use crate::kernels::shapes::{Experts, MODELS, Model};
use down::Down;
use gate_up::GateUp;
use router::Router;

/// Registers of a lane for weights on their way.
const AHEAD_REGISTERS: u32 = 60;

/// Activations between kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    F32,
    /// Codes, scales and sums of groups of 32. Only integer formats take them.
    Int8,
}

impl Activations {
    fn arrive(self) -> &'static DeviceDef {
        match self {
            Self::F32 => slots::f32_input::DEF,
            Self::Int8 => slots::int8_input::DEF,
        }
    }
}

/// Units of a row on their way to a lane: as many as registers hold, and no more than a row has.
fn depth(format: Format, rows: u32, units: u32) -> u32 {
    (AHEAD_REGISTERS / ((4 + format.side_words) * rows)).clamp(1, units.div_ceil(32))
}

/// The experts of the models that have some, in every type.
pub fn instances() -> Vec<(String, Instance)> {
    let of = |model: &&Model| Some(instances_of(model.width, model.experts?));
    MODELS.iter().filter_map(of).flatten().collect()
}

fn instances_of(width: u32, experts: Experts) -> Vec<(String, Instance)> {
    let Experts { count, top, hidden } = experts;
    let router = Router::new(width, count, top);
    let mut named = vec![
        ("one row".to_owned(), router.split_instance()),
        ("many rows".to_owned(), router.instance()),
        ("plain".to_owned(), router.plain_instance()),
    ];
    for dtype in DType::ALL {
        let activations = if format(dtype).integer { Activations::Int8 } else { Activations::F32 };
        let gate_up = GateUp { dtype, hidden, k: width, top, from: activations, to: activations };
        let down = Down { dtype, outputs: width, k: hidden, top, from: activations, epilogue: Vec::new() };
        named.push((dtype.to_string(), gate_up.instance()));
        named.push((format!("{dtype}, plain"), gate_up.plain_instance()));
        // Blocks of 256 values do not divide every expert's hidden values.
        if dtype.row_bytes(u64::from(hidden)).is_some() {
            named.push((dtype.to_string(), down.instance()));
            named.push((format!("{dtype}, plain"), down.plain_instance()));
        }
    }
    named.into_iter().map(|(name, instance)| (name, instance.expect("shapes fit the kernels"))).collect()
}
