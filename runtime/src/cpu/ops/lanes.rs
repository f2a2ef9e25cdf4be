//! The one order in which products are summed. A lane here is a partial sum, as in a vector register.
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

/// The largest value of a row.
#[inline(always)]
pub fn largest(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    lanes.into_iter().chain(tail.iter().copied()).fold(f32::NEG_INFINITY, larger)
}
