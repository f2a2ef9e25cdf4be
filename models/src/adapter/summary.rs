//! What can be told of an adapter without its model, for people and programs that look at one.

use std::collections::BTreeSet;

use crate::checkpoint::shown;

/// An adapter by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Which of the two forms it has.
    pub form: &'static str,
    pub name: Option<String>,
    /// The model that it says it was trained for.
    pub base: Option<String>,
    pub alpha: f64,
    /// Each rank that a pair has, in order.
    pub ranks: Vec<u64>,
    pub pairs: usize,
    /// What is changed, by the kind of matrix, and how often.
    pub targets: Vec<(String, usize)>,
    pub layers: usize,
}

impl Summary {
    /// By targets and ranks.
    pub(super) fn of<'a>(
        form: &'static str,
        name: Option<String>,
        base: Option<String>,
        alpha: f64,
        pairs: impl Iterator<Item = (&'a str, u64)> + Clone,
    ) -> Summary {
        let layer = |target: &'a str| target.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let ranks: BTreeSet<u64> = pairs.clone().map(|(_, rank)| rank).collect();
        let layers: BTreeSet<&str> = pairs.clone().filter_map(|(target, _)| Some(layer(target)?.0)).collect();
        let mut targets: Vec<(String, usize)> = Vec::new();
        for (target, _) in pairs.clone() {
            let kind = layer(target).map_or(target, |(_, kind)| kind);
            let kind = shown(kind.strip_suffix(".weight").unwrap_or(kind));
            match targets.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => targets.push((kind, 1)),
            }
        }
        let (ranks, layers) = (ranks.into_iter().collect(), layers.len());
        Summary { form, name, base, alpha, ranks, pairs: pairs.count(), targets, layers }
    }
}
