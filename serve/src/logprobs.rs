//! Log probabilities of the model's own distribution: after its softcap, before temperature, masks and penalties.

/// A token, and the likeliest ones at its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub token: u32,
    pub logprob: f32,
    /// The likeliest first; of equals the lower id.
    pub top: Vec<(u32, f32)>,
}

/// What a row of logits says of a token.
pub fn logprobs(logits: &[f32], token: u32, top: usize) -> Logprobs {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|x| ((x - largest) as f64).exp()).sum();
    let log_total = largest as f64 + total.ln();
    let logprob = |x: f32| (x as f64 - log_total) as f32;
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(top + 1);
    for (&x, id) in logits.iter().zip(0..) {
        if best.len() < top || best.last().is_some_and(|least| x > least.0) {
            let at = best.partition_point(|other| other.0 >= x);
            best.insert(at, (x, id));
            best.truncate(top);
        }
    }
    Logprobs {
        token,
        logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |x| logprob(*x)),
        top: best.into_iter().map(|(x, id)| (id, logprob(x))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_come_first_and_sum_to_one() {
        let found = logprobs(&[1.0, 3.0, 3.0, -2.0], 0, 4);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 0, 3]);
        assert_eq!(found.logprob, found.top[2].1);
        assert!((found.top.iter().map(|(_, p)| (*p as f64).exp()).sum::<f64>() - 1.0).abs() < 1e-6);
        assert_eq!(logprobs(&[1.0, 3.0], 1, 0).top, []);
        assert_eq!(logprobs(&[1.0, 3.0, 2.0], 1, 2).top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
    }
}
