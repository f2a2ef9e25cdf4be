//! A product of several rows as plans ask for it, and what follows from that for every kernel.

use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::{self, Prologue};

/// In which order the kernel of one row adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumOrder {
    /// As [`matvec`](crate::kernels::matvec::matvec) does.
    Matvec,
    /// As the dense half of a mixture's gate and up: 32 lanes, however short the row.
    GateUp,
    /// As the dense half of its down product: 32 lanes, and a unit's product is rounded before it is added.
    Down,
}

/// A product of several rows: everything that decides its instances.
#[derive(Clone, Debug)]
pub struct Product {
    /// The product as one row has it, on the same GPU: its lanes decide the bits. Whether it leaves int8 counts for that alone:
    /// several rows have [`Product::leaves_panels`].
    pub one: matvec::Product,
    pub rows: u32,
    pub order: SumOrder,
    /// Int8 activations that arrive lie in panels of eight rows, as a product before has left them.
    pub arrives_in_panels: bool,
    /// Joined results are left as int8, in panels of eight rows, for the next product.
    pub leaves_panels: bool,
}

impl Product {
    /// A product whose neighbours do not leave it panels, nor want them.
    pub fn new(one: matvec::Product, rows: u32, order: SumOrder) -> Product {
        Product { one, rows, order, arrives_in_panels: false, leaves_panels: false }
    }

    /// Two lanes share a block of 32 values and add their dots as integers: the products of a mixture do not.
    pub fn is_joined(&self) -> bool {
        self.one.is_joined() && self.order == SumOrder::Matvec
    }

    pub(super) fn is_integer(&self) -> bool {
        format(self.one.dtype).integer
    }

    /// Unbounded activations that are quantised have second and third digits.
    pub fn is_fine(&self) -> bool {
        self.one.unbounded && self.is_integer() && self.one.prologue != Prologue::Int8
    }

    /// Whether results are multiplied by a norm's factor.
    pub fn is_normed(&self) -> bool {
        matches!(self.one.prologue, Prologue::Norm | Prologue::ResidualNorm)
    }

    /// Whether int8 activations lie in panels of eight rows, for a kernel of tensor cores.
    pub fn takes_panels(&self) -> bool {
        self.arrives_in_panels || self.is_prepared()
    }

    /// Whether a kernel makes the activations: else the product reads them as they arrive.
    pub fn is_prepared(&self) -> bool {
        match self.one.prologue {
            Prologue::Int8 => false,
            Prologue::Plain => self.is_integer(),
            _ => true,
        }
    }
}
