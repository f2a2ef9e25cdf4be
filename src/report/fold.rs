//! Folds equal entries of many layers into one, with the ranges of layers it applies to.

use std::collections::BTreeSet;

use gemma4c_graph::layer_ranges;

/// The layer that a value or tensor belongs to, by its name.
pub fn layer_of(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// A value's name without its layer.
pub fn local_name(name: &str) -> &str {
    match (layer_of(name), name.splitn(3, '.').nth(2)) {
        (Some(_), Some(local)) => local,
        _ => name,
    }
}

/// An entry, and the layers it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folded<T> {
    pub what: T,
    /// Empty: outside the layers.
    pub layers: Vec<u32>,
    pub count: usize,
}

impl<T> Folded<T> {
    /// `layers 0-3, 5`; nothing where it is outside of them.
    pub fn place(&self) -> String {
        match &self.layers[..] {
            [] => String::new(),
            [one] => format!("layer {one}"),
            many => format!("layers {}", layer_ranges(many)),
        }
    }
}

/// Equal entries as one, in the order of their first.
pub fn fold<T: PartialEq>(entries: impl IntoIterator<Item = (Option<u32>, T)>) -> Vec<Folded<T>> {
    let mut found: Vec<(Folded<T>, BTreeSet<u32>)> = Vec::new();
    for (layer, what) in entries {
        let equal =
            found.iter_mut().find(|(folded, _)| folded.what == what && folded.layers.is_empty() == layer.is_none());
        match (equal, layer) {
            (Some((folded, layers)), _) => {
                folded.count += 1;
                layers.extend(layer);
            }
            (None, Some(layer)) => {
                found.push((Folded { what, layers: vec![layer], count: 1 }, BTreeSet::from([layer])));
            }
            (None, None) => found.push((Folded { what, layers: Vec::new(), count: 1 }, BTreeSet::new())),
        }
    }
    found.into_iter().map(|(folded, layers)| Folded { layers: layers.into_iter().collect(), ..folded }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_know_their_layer() {
        assert_eq!((layer_of("blk.12.attention.q"), local_name("blk.12.attention.q")), (Some(12), "attention.q"));
        for plain in ["head.out", "blk.x.attention", "blk.3", "blk"] {
            assert_eq!((layer_of(plain), local_name(plain)), (None, plain));
        }
    }

    #[test]
    fn equal_entries_are_said_once() {
        let folded = fold([(Some(0), "a"), (Some(1), "b"), (None, "a"), (Some(2), "a"), (Some(0), "a"), (None, "a")]);
        let lines: Vec<_> = folded.iter().map(|f| (f.what, f.place(), f.count)).collect();
        assert_eq!(
            lines,
            [("a", "layers 0, 2".to_owned(), 3), ("b", "layer 1".to_owned(), 1), ("a", String::new(), 2)]
        );
    }
}
