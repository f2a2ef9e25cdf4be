//! What the lowering's own passes did: how often each applied, and where it did not and why, as the graph's passes report it.
//!
//! A value counts once: a pass has applied to it, in whatever phase, or was refused at it, for the first reason it met.

use std::collections::HashSet;

use gemma4c_plan::cuda::{PassReport, Refusal};

/// Choices of the lowering that can be switched off as passes can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Int8,
    AbsorbNorms,
    AttentionStep,
    Clusters,
    PerLayerStep,
    Mixtures,
    Bf16Copies,
}

impl Pass {
    pub const ALL: [Pass; 7] = [
        Pass::Int8,
        Pass::AbsorbNorms,
        Pass::AttentionStep,
        Pass::Clusters,
        Pass::PerLayerStep,
        Pass::Mixtures,
        Pass::Bf16Copies,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Pass::Int8 => "int8",
            Pass::AbsorbNorms => "absorb-norms",
            Pass::AttentionStep => "attention-step",
            Pass::Clusters => "clusters",
            Pass::PerLayerStep => "per-layer-step",
            Pass::Mixtures => "mixtures",
            Pass::Bf16Copies => "bf16-copies",
        }
    }

    pub const fn about(self) -> &'static str {
        match self {
            Pass::Int8 => {
                "a row's products with 8-bit activations, over repacked weights; without it every product, prefill's too, is in f32 from the file's blocks"
            }
            Pass::AbsorbNorms => "decode: a product computes the norm before it itself",
            Pass::AttentionStep => {
                "decode: head norms, rotation, store, attention and the merge of its parts in one launch"
            }
            Pass::Clusters => {
                "decode: parts of an attention are merged in the shared memory of a cluster of blocks, not in memory"
            }
            Pass::PerLayerStep => "decode: the per-layer gate and its projection in one launch, by a cluster of blocks",
            Pass::Mixtures => {
                "a mixture's residual, norms and router in one launch; decode: its dense half in the launches of the experts"
            }
            Pass::Bf16Copies => {
                "prefill: bf16 copies of the weights for the product by warpgroups, where memory allows"
            }
        }
    }
}

/// Counts of one lowering.
#[derive(Debug, Default)]
pub struct Tally {
    counts: [Count; Pass::ALL.len()],
}

#[derive(Debug, Default)]
struct Count {
    off: bool,
    /// In this phase, and in the phase where it was most.
    now: u32,
    most: u32,
    /// The values it applied to, in whatever phase.
    applied: HashSet<String>,
    /// Those of all groups that it was refused at.
    refused_at: HashSet<String>,
    refused: Vec<Refusal>,
}

impl Tally {
    pub fn new(disabled: &[String]) -> Tally {
        let mut tally = Tally::default();
        for pass in Pass::ALL {
            tally.counts[pass as usize].off = disabled.iter().any(|name| name == pass.name());
        }
        tally
    }

    /// How often it applied in this phase so far.
    pub fn count(&self, pass: Pass) -> u32 {
        self.counts[pass as usize].now
    }

    /// Counts a group of values that it applied to.
    pub fn applied(&mut self, pass: Pass, values: Vec<String>) {
        let count = &mut self.counts[pass as usize];
        count.now += 1;
        count.applied.extend(values);
    }

    /// Says of a group of values, by its last one, that it could have applied and did not. What several phases refuse is said once, also
    /// where a later one has cut the group in two; a pass that is off refuses nothing.
    pub fn refused(&mut self, pass: Pass, values: Vec<String>, reason: &str) {
        let count = &mut self.counts[pass as usize];
        let Some(node) = values.last().cloned() else { return };
        if !count.off && !count.refused_at.contains(&node) {
            count.refused.push(Refusal { node, reason: reason.to_owned() });
            count.refused_at.extend(values);
        }
    }

    pub fn end_phase(&mut self) {
        for count in &mut self.counts {
            count.most = count.most.max(std::mem::take(&mut count.now));
        }
    }

    pub fn reports(&self) -> impl Iterator<Item = PassReport> {
        std::iter::zip(Pass::ALL, &self.counts).map(|(pass, count)| PassReport {
            name: pass.name().to_owned(),
            about: pass.about().to_owned(),
            enabled: !count.off,
            applied: count.most,
            refused: count.refused.iter().filter(|refusal| !count.applied.contains(&refusal.node)).cloned().collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    /// What one phase does to a value is not counted again, nor counted against what another phase does.
    #[test]
    fn a_value_counts_once() {
        let mut tally = Tally::new(&["clusters".to_owned()]);
        tally.applied(Pass::Int8, values(&["gate", "up"]));
        tally.refused(Pass::Int8, values(&["q", "k"]), "floats");
        tally.refused(Pass::Clusters, values(&["kv"]), "it is off");
        tally.end_phase();
        // The next phase has fewer, cuts a group in two, refuses for another reason, and refuses what was applied.
        tally.refused(Pass::Int8, values(&["q"]), "floats");
        tally.refused(Pass::Int8, values(&["q", "k"]), "too wide");
        tally.refused(Pass::Int8, values(&["gate", "up"]), "many rows");
        tally.refused(Pass::Int8, values(&["down"]), "floats");
        tally.end_phase();
        let reports: Vec<PassReport> = tally.reports().collect();
        let of = |pass: Pass| &reports[pass as usize];
        let refused: Vec<&str> = of(Pass::Int8).refused.iter().map(|refusal| refusal.node.as_str()).collect();
        assert_eq!((of(Pass::Int8).applied, refused), (1, vec!["k", "down"]));
        assert_eq!((of(Pass::Clusters).enabled, of(Pass::Clusters).refused.len()), (false, 0));
    }
}
