//! Products whose inputs and outputs are kept within bounds, as the towers of the small models have them.

use gemma4c_graph::{Builder, Value, WeightId};

use super::weights::Inventory;

/// A matrix whose inputs and outputs are kept within bounds, where the file has any.
pub(super) struct Clipped {
    weight: WeightId,
    input: Bounds,
    output: Bounds,
}

/// Numbers of one element; one that is missing does not bound.
#[derive(Clone, Copy)]
struct Bounds {
    low: Option<WeightId>,
    high: Option<WeightId>,
}

impl Clipped {
    /// Declares the tensors of `name`.
    pub(super) fn declare(inventory: &mut Inventory<'_>, name: &str, inputs: u32, outputs: u32) -> Clipped {
        let weight = inventory.matrix(&format!("{name}.weight"), &[inputs, outputs]);
        let mut bound = |suffix: &str| {
            let name = format!("{name}.{suffix}");
            inventory.has(&name).then(|| inventory.vector(&name, 1))
        };
        let input = Bounds { low: bound("input_min"), high: bound("input_max") };
        Clipped { weight, input, output: Bounds { low: bound("output_min"), high: bound("output_max") } }
    }

    /// Its product with `x`. The nodes are named by whoever calls it.
    pub(super) fn product(&self, g: &mut Builder, x: Value) -> Value {
        let x = bounded(g, self.input, x);
        let y = g.matmul(self.weight, x);
        bounded(g, self.output, y)
    }
}

fn bounded(g: &mut Builder, bounds: Bounds, x: Value) -> Value {
    let x = bounds.low.map_or(x, |low| g.at_least(x, low));
    bounds.high.map_or(x, |high| g.at_most(x, high))
}
