//! RMS norms of whole rows, with what comes before and after them: residual, layer scale, the next norm, and every form
//! in which the next kernel may want the result ([`Outputs`]).
//!
//! A block takes a row and a thread eight neighbouring values, which it keeps in registers from the load to the last
//! store: a row of 8192 values is the widest. Weights are loaded before the wait for the activations.
//!
//! Kernels compute every row of the grid. Rows beyond those in use hold numbers that nobody reads.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::outputs::{OutputForms, OutputRows, Outputs, write8};

/// The weights of a residual update: of the norm before it (`post`), of the whole sum (`layer_scale`, one element), and
/// of the norm after it (`next`).
#[view]
pub struct ResidualWeights {
    post: Weights<f32>,
    layer_scale: Weights<f32>,
    next: Weights<f32>,
}

/// The experts' half of a mixture, added to the dense half x: `norm(x) * x_weight + norm(values) * weight`.
#[view]
pub struct ExpertBranch {
    values: Input<f32>,
    weight: Weights<f32>,
    x_weight: Weights<f32>,
}

#[device]
pub fn squares_of(x: F32x4) -> f32 {
    (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w)
}

#[device]
pub fn scaled4(x: F32x4, by: f32) -> F32x4 {
    f32x4(x.x * by, x.y * by, x.z * by, x.w * by)
}

#[device]
pub fn product4(x: F32x4, y: F32x4) -> F32x4 {
    f32x4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w)
}

#[device]
pub fn sum4(x: F32x4, y: F32x4) -> F32x4 {
    f32x4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w)
}

/// `x * factor * weight`: a norm's factor and its weight.
#[device]
pub fn normed4(x: F32x4, factor: f32, weight: F32x4) -> F32x4 {
    product4(scaled4(x, factor), weight)
}

/// `1 / rms` of the row of which every thread of the block holds eight values. A collective of the block.
#[device]
pub fn inverse_rms<const WIDTH: u32>(low: F32x4, high: F32x4, epsilon: f32) -> f32 {
    rsqrt(block_sum(squares_of(low) + squares_of(high)) / WIDTH as f32 + epsilon)
}

/// The norm of each row, times `weight` where it is WEIGHTED, in the forms that are asked for.
#[kernel(block = THREADS, dependent)]
pub fn rms_norm<const WIDTH: u32, const THREADS: u32, const WEIGHTED: bool, const FORMS: OutputForms>(
    x: Input<f32>,
    weight: Weights<f32>,
    out: OutputRows,
    epsilon: f32,
) {
    require!(WIDTH % 8 == 0 && WIDTH <= THREADS * 8);
    require!(!FORMS.QUANTISED || WIDTH % 32 == 0);
    let at = thread_idx() * 8;
    let inside = at < WIDTH;
    let start = block_idx() * WIDTH + at;
    let mut weight_low = F32x4::ZERO;
    let mut weight_high = F32x4::ZERO;
    if WEIGHTED && inside {
        weight_low = load::<F32x4>(weight, at);
        weight_high = load::<F32x4>(weight, at + 4);
    }

    grid_launch_dependents();
    grid_dependency_wait();
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    if inside {
        low = load::<F32x4>(x, start);
        high = load::<F32x4>(x, start + 4);
    }
    let factor = inverse_rms(low, high, epsilon);
    low = scaled4(low, factor);
    high = scaled4(high, factor);
    if WEIGHTED {
        low = product4(low, weight_low);
        high = product4(high, weight_high);
    }
    write8(low, high, start, inside, out);
}

/// Adds the norm of the experts' half to that of the dense half, of which every thread has the eight values from `at`
/// of a row on. A collective of the block.
#[device]
pub fn add_expert_branch<const WIDTH: u32>(
    low: &mut F32x4,
    high: &mut F32x4,
    branch: ExpertBranch,
    at: u32,
    inside: bool,
    epsilon: f32,
) {
    let start = block_idx() * WIDTH + at;
    let mut other_low = F32x4::ZERO;
    let mut other_high = F32x4::ZERO;
    if inside {
        other_low = load::<F32x4>(branch.values, start);
        other_high = load::<F32x4>(branch.values, start + 4);
    }
    let of_x = inverse_rms(*low, *high, epsilon);
    let of_branch = inverse_rms(other_low, other_high, epsilon);
    if inside {
        *low = normed4(*low, of_x, load::<F32x4>(branch.x_weight, at));
        *high = normed4(*high, of_x, load::<F32x4>(branch.x_weight, at + 4));
        *low = sum4(*low, normed4(other_low, of_branch, load::<F32x4>(branch.weight, at)));
        *high = sum4(*high, normed4(other_high, of_branch, load::<F32x4>(branch.weight, at + 4)));
    }
}

/// Ends a sub-layer and begins the next: `h_out = (h + norm(x) * post) * layer_scale`, then, of that, the NEXT norm or
/// the value itself, in the forms that are asked for. With BRANCHES, x is the sum of both halves of a mixture. `h_out`
/// may be `h`.
#[kernel(block = THREADS, dependent)]
pub fn residual_norm<
    const WIDTH: u32,
    const THREADS: u32,
    const BRANCHES: bool,
    const SCALED: bool,
    const NEXT: bool,
    const FORMS: OutputForms,
>(
    h: Input<f32>,
    x: Input<f32>,
    branch: ExpertBranch,
    norms: ResidualWeights,
    h_out: Output<f32>,
    out: OutputRows,
    epsilon: f32,
) {
    require!(WIDTH % 8 == 0 && WIDTH <= THREADS * 8);
    require!(!FORMS.QUANTISED || WIDTH % 32 == 0);
    let at = thread_idx() * 8;
    let inside = at < WIDTH;
    let start = block_idx() * WIDTH + at;
    let mut post_low = F32x4::ZERO;
    let mut post_high = F32x4::ZERO;
    let mut next_low = F32x4::ZERO;
    let mut next_high = F32x4::ZERO;
    if inside {
        post_low = load::<F32x4>(norms.post, at);
        post_high = load::<F32x4>(norms.post, at + 4);
    }
    if NEXT && inside {
        next_low = load::<F32x4>(norms.next, at);
        next_high = load::<F32x4>(norms.next, at + 4);
    }

    grid_launch_dependents();
    grid_dependency_wait();
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    let mut h_low = F32x4::ZERO;
    let mut h_high = F32x4::ZERO;
    if inside {
        low = load::<F32x4>(x, start);
        high = load::<F32x4>(x, start + 4);
        h_low = load::<F32x4>(h, start);
        h_high = load::<F32x4>(h, start + 4);
    }
    if BRANCHES {
        add_expert_branch(&mut low, &mut high, branch, at, inside, epsilon);
    }

    let factor = inverse_rms(low, high, epsilon);
    low = sum4(h_low, normed4(low, factor, post_low));
    high = sum4(h_high, normed4(high, factor, post_high));
    if SCALED {
        let scale = norms.layer_scale[0u32];
        low = scaled4(low, scale);
        high = scaled4(high, scale);
    }
    if inside {
        store(h_out, start, low);
        store(h_out, start + 4, high);
    }
    if NEXT {
        let factor = inverse_rms(low, high, epsilon);
        low = normed4(low, factor, next_low);
        high = normed4(high, factor, next_high);
    }
    write8(low, high, start, inside, out);
}

/// The norm of each row, plainly: a warp takes a row of any width.
#[kernel(block = 32, dependent)]
pub fn rms_norm_plain<const WEIGHTED: bool>(
    x: Input<f32>,
    weight: Weights<f32>,
    out: Output<f32>,
    width: u32,
    epsilon: f32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let start = block_idx() * width;
    let mut squares = 0.0f32;
    for i in (lane_id()..width).by(32) {
        squares += x[start + i] * x[start + i];
    }
    let factor = rsqrt(warp_sum(squares) / width as f32 + epsilon);
    for i in (lane_id()..width).by(32) {
        let normed = x[start + i] * factor;
        out[start + i] = if WEIGHTED { normed * weight[i] } else { normed };
    }
}

/// Whole warps, eight values a thread.
fn threads(width: u32) -> u32 {
    width.div_ceil(256) * 32
}

/// A [`rms_norm`]; its grid is `[rows, 1, 1]`.
pub fn norm(width: u32, weighted: bool, outputs: Outputs) -> Result<Instance, InstanceError> {
    let forms = outputs.config();
    rms_norm::Chosen { WIDTH: width, THREADS: threads(width), WEIGHTED: weighted, FORMS: forms }.build()
}

/// The choices of a [`residual_norm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residual {
    /// x is the sum of two normed branches.
    pub branches: bool,
    /// The layer's scale multiplies the sum.
    pub scaled: bool,
    /// The outputs are of the sum's norm; without it, of the sum itself.
    pub next: bool,
    /// Besides the residual.
    pub outputs: Outputs,
}

/// A [`residual_norm`]; its grid is `[rows, 1, 1]`.
pub fn residual(width: u32, of: Residual) -> Result<Instance, InstanceError> {
    residual_norm::Chosen {
        WIDTH: width,
        THREADS: threads(width),
        BRANCHES: of.branches,
        SCALED: of.scaled,
        NEXT: of.next,
        FORMS: of.outputs.config(),
    }
    .build()
}

pub fn plain(weighted: bool) -> Result<Instance, InstanceError> {
    rms_norm_plain::Chosen { WEIGHTED: weighted }.build()
}
