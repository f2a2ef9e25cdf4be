//! Rows and columns, copied as they are.

/// The rows of `x`, `width` wide, that `chosen` names.
pub fn take(x: &[f32], width: usize, chosen: &[usize], out: &mut [f32]) {
    for (to, row) in out.chunks_exact_mut(width).zip(chosen) {
        to.copy_from_slice(&x[row * width..][..width]);
    }
}

/// From column `first` on, `len` columns of every row of `x`, which is `width` wide.
pub fn columns(x: &[f32], width: usize, first: usize, len: usize, out: &mut [f32]) {
    for (to, from) in out.chunks_exact_mut(len).zip(x.chunks_exact(width)) {
        to.copy_from_slice(&from[first..first + len]);
    }
}

/// Each row of `a`, then the same row of `b`; a row of `a` is `a_width` wide, one of `out` `width`.
pub fn concat(a: &[f32], a_width: usize, b: &[f32], width: usize, out: &mut [f32]) {
    let rows = a.chunks_exact(a_width).zip(b.chunks_exact(width - a_width));
    for (out, (first, second)) in out.chunks_exact_mut(width).zip(rows) {
        out[..a_width].copy_from_slice(first);
        out[a_width..].copy_from_slice(second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_are_those_that_were_named() {
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut out = [f32::NAN; 6];
        take(&x, 3, &[3, 1], &mut out);
        assert_eq!(out, [9.0, 10.0, 11.0, 3.0, 4.0, 5.0]);
        columns(&x, 4, 1, 2, &mut out);
        assert_eq!(out, [1.0, 2.0, 5.0, 6.0, 9.0, 10.0]);
        concat(&x[..4], 2, &[-1.0, -2.0], 3, &mut out);
        assert_eq!(out, [0.0, 1.0, -1.0, 2.0, 3.0, -2.0]);
    }
}
