//! Logits of some tokens only: those of the groups that a row was routed to.

use super::matmul::{self, Matrix};

/// The tokens of each group in `groups`, one after the other; a group is `each` tokens of `order`.
pub fn list(groups: &[u32], order: &[u32], each: usize) -> Vec<u32> {
    groups.iter().flat_map(|group| &order[*group as usize * each..][..each]).copied().collect()
}

/// `out[i]` is row `tokens[i]` of `w` times its row of `x`; `tokens` has as many for each row of `x` (n × cols).
pub fn matmul(w: &Matrix, tokens: &[u32], x: &[f32], out: &mut [f32]) {
    assert_eq!(tokens.len(), out.len());
    // A matrix of one row is an expert of its own.
    let experts = matmul::Experts { dtype: w.dtype, bytes: w.bytes, experts: w.rows, rows: 1, cols: w.cols };
    matmul::expert_matmul(&experts, tokens, x, 0..1, out);
}

/// Rows of `width` values: token t has the value that `tokens` puts there, and the others the least of these less 1.
/// `x` and `tokens` have as many for each row of `out`.
pub fn spread(x: &[f32], tokens: &[u32], width: usize, out: &mut [f32]) {
    assert!(x.len() == tokens.len() && out.len().is_multiple_of(width));
    if out.is_empty() {
        return;
    }
    let each = x.len() / (out.len() / width);
    let rows = std::iter::zip(x.chunks_exact(each), tokens.chunks_exact(each));
    for (out, (x, tokens)) in out.chunks_exact_mut(width).zip(rows) {
        let least = x.iter().copied().fold(f32::INFINITY, f32::min);
        out.fill(least - 1.0);
        for (token, value) in tokens.iter().zip(x) {
            out[*token as usize] = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::DType;

    use super::super::testing::Random;
    use super::*;

    #[test]
    fn tokens_of_groups_have_the_bits_of_the_whole_product() {
        let (vocab, cols, each) = (24, 64, 4);
        let order: Vec<u32> = (0..vocab as u32).map(|i| i * 7 % vocab as u32).collect();
        let tokens = list(&[5, 0, 3, /**/ 1, 2, 4], &order, each);
        assert_eq!(tokens[..5], [20, 3, 10, 17, 0]);
        let bytes = Random::new(1).encoded(DType::Q8_0, vocab * cols);
        let w = Matrix { dtype: DType::Q8_0, bytes: &bytes, rows: vocab, cols };
        let x = Random::new(2).values(2 * cols);
        let (mut all, mut some) = (vec![0.0; 2 * vocab], vec![0.0; 2 * 3 * each]);
        matmul::matmul(&w, &x, &mut all);
        matmul(&w, &tokens, &x, &mut some);
        for (i, token) in tokens.iter().enumerate() {
            assert_eq!(some[i].to_bits(), all[i / 12 * vocab + *token as usize].to_bits());
        }

        let mut out = vec![f32::NAN; 2 * vocab];
        spread(&some, &tokens, vocab, &mut out);
        for row in 0..2 {
            let (scored, out) = (&tokens[row * 12..][..12], &out[row * vocab..][..vocab]);
            let least = some[row * 12..][..12].iter().copied().fold(f32::INFINITY, f32::min);
            for (token, value) in out.iter().enumerate() {
                let expected = if scored.contains(&(token as u32)) { all[row * vocab + token] } else { least - 1.0 };
                assert_eq!(*value, expected, "row {row}, token {token}");
            }
        }
    }
}
