//! The one order in which products are summed.
//!
//! Element j of a row is accumulated in lane `j % 32` by a fused multiply-add, in the order of j, and the lanes are
//! summed as a fixed tree. A loop that follows the definition literally, a vector of any width and a register
//! tile that works on several rows at once all give the same bits, so each caller may pick what is fastest.

pub const LANES: usize = 32;

/// One step of a sum of products: 32 elements, one a lane.
#[inline(always)]
pub fn accumulate(acc: &mut [f32; LANES], a: &[f32; LANES], b: &[f32; LANES]) {
    for lane in 0..LANES {
        acc[lane] = a[lane].mul_add(b[lane], acc[lane]);
    }
}

/// The last step, of fewer than 32 elements.
#[inline(always)]
pub fn accumulate_tail(acc: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    for (acc, (a, b)) in acc.iter_mut().zip(a.iter().zip(b)) {
        *acc = a.mul_add(*b, *acc);
    }
}

/// All steps of a row, or of a piece of one that starts at a multiple of 32.
#[inline(always)]
pub fn accumulate_row(acc: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        accumulate(acc, a, b);
    }
    accumulate_tail(acc, a_tail, b_tail);
}

/// The sum of the lanes, halving until one is left.
#[inline(always)]
pub fn total(mut acc: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            acc[lane] += acc[lane + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Sum of products of two rows of equal length.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    accumulate_row(&mut acc, a, b);
    total(acc)
}

/// The sum of a row, in the order of [`dot`].
#[inline(always)]
pub fn sum(a: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (chunks, tail) = a.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            acc[lane] += chunk[lane];
        }
    }
    for (acc, a) in acc.iter_mut().zip(tail) {
        *acc += a;
    }
    total(acc)
}

/// [`dot`] of every pair of a row of `a` and a row of `b`, all of equal length.
#[inline(always)]
pub fn dot_tile<const A: usize, const B: usize>(a: [&[f32]; A], b: [&[f32]; B]) -> [[f32; B]; A] {
    let (a, a_tails) = chunked(a);
    let (b, b_tails) = chunked(b);
    let mut acc = [[[0.0; LANES]; B]; A];
    for step in 0..a[0].len() {
        for (acc, a) in acc.iter_mut().zip(&a) {
            for (acc, b) in acc.iter_mut().zip(&b) {
                accumulate(acc, &a[step], &b[step]);
            }
        }
    }
    std::array::from_fn(|i| {
        std::array::from_fn(|j| {
            accumulate_tail(&mut acc[i][j], a_tails[i], b_tails[j]);
            total(acc[i][j])
        })
    })
}

/// Each row as whole chunks and what is left, cut to equal lengths so that one bounds check serves all.
#[inline(always)]
fn chunked<const N: usize>(rows: [&[f32]; N]) -> ([&[[f32; LANES]]; N], [&[f32]; N]) {
    let chunks = rows[0].len() / LANES;
    (rows.map(|row| &row.as_chunks::<LANES>().0[..chunks]), rows.map(|row| row.as_chunks::<LANES>().1))
}
