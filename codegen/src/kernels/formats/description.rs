//! What kernels ask of a format, as data.

use gemma4c_dsl::DeviceDef;

use super::pieces::{no_two_dots, start_biased, whole_biased};

/// What the kernels ask of a type.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    pub matvec: Format,
    /// `None` where int8 tensor cores cannot multiply it: several rows are multiplied by CUDA cores.
    pub tensor: Option<TensorFormat>,
    /// Eight values of a unit as bf16.
    pub decode: &'static DeviceDef,
    /// The same with fewer instructions, where there is such a function: a zero may have the other sign.
    pub decode_by_fma: &'static DeviceDef,
    /// For types with one scale of 16 bits for each 32 values.
    pub picked: Option<Picked>,
}

/// How the words that a lane picks out of the codes become pairs of 16-bit floats, next to the word that has the scale.
#[derive(Clone, Copy, Debug)]
pub struct Picked {
    pub to_bf16: &'static DeviceDef,
    pub to_f16: &'static DeviceDef,
    /// Codes are integers whose zero is the middle of their range, and scales bfloat16.
    pub centred: bool,
}

/// How a type is multiplied.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Values of a unit.
    pub unit: u32,
    /// Activations are int8, else f32.
    pub integer: bool,
    /// It needs the sum of a group's codes: it has a minimum or a zero point.
    pub summed: bool,
    /// Registers that a unit on its way takes beside its codes.
    pub side_words: u32,
    /// Units that share a word beside them, at most.
    pub units_beside: u32,
    pub side: &'static DeviceDef,
    /// The product of a unit by itself.
    pub dot: &'static DeviceDef,
    /// The same where activations have fine codes: it loses nothing beside the largest of them.
    pub fine_dot: &'static DeviceDef,
    /// The product of a unit where neighbouring lanes have neighbouring units.
    pub lane_dot: &'static DeviceDef,
    /// The products of the units of two rows, each for one of two lanes that are joined.
    pub two_dots: &'static DeviceDef,
    /// Two units are a block with one scale, and `lane_dot` adds the dots of both as integers.
    pub joined: bool,
}

impl Format {
    /// Registers of a unit's codes on their way: 16 bytes, or the 8 of thin types.
    pub fn code_words(&self) -> u32 {
        if self.side.thin { 2 } else { 4 }
    }

    /// Registers of a unit on its way.
    pub fn words(&self) -> u32 {
        self.code_words() + self.side_words
    }
}

/// How tensor cores multiply a type.
#[derive(Clone, Copy, Debug)]
pub struct TensorFormat {
    pub bytes: &'static DeviceDef,
    pub start: &'static DeviceDef,
    pub whole: &'static DeviceDef,
    pub factors: &'static DeviceDef,
    /// Pieces of 16 bytes of a unit of 32 values.
    pub parts: u32,
    /// Sums of a stretch of units: a unit's is the one of its number modulo this. As many as lanes, or pairs of lanes, have a row of their own.
    pub classes: u32,
    /// The halves of a unit are two dots.
    pub halves: bool,
    /// It has a minimum, by the sum of the activations.
    pub minimum: bool,
    /// Pieces to a word of the planes `scales` and `supers`; 0 without such a plane.
    pub scales: u32,
    pub supers: u32,
    /// Words of the plane `high` to a piece.
    pub high: u32,
    /// Pieces after which `factors` picks the same parts of words again.
    pub period: u32,
}

impl Format {
    /// A unit of 32 values as integers, with one word beside it that it shares with so many.
    pub fn integers(units_beside: u32, side: &'static DeviceDef, dot: &'static DeviceDef) -> Format {
        Format {
            unit: 32,
            integer: true,
            summed: false,
            side_words: 1,
            units_beside,
            side,
            dot,
            fine_dot: dot,
            lane_dot: dot,
            two_dots: no_two_dots::DEF,
            joined: false,
        }
    }
}

impl TensorFormat {
    /// A unit of 32 values in 16 bytes with one dot, which starts at the bias, and a word of factors to each `scales`.
    pub fn integers(scales: u32, bytes: &'static DeviceDef, factors: &'static DeviceDef) -> TensorFormat {
        TensorFormat {
            bytes,
            start: start_biased::DEF,
            whole: whole_biased::DEF,
            factors,
            parts: 1,
            classes: 8,
            halves: false,
            minimum: false,
            scales,
            supers: 0,
            high: 0,
            period: scales,
        }
    }
}
