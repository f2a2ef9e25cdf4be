//! What the lowering's own passes did: how often each applied, and where it did not and why, as the graph's passes report it.

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
                "products over repacked weights with 8-bit or bf16 activations; without it, all in f32 from the file's blocks"
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

    pub fn applied(&mut self, pass: Pass) {
        self.counts[pass as usize].now += 1;
    }

    /// Says where it could have applied and did not. What several phases refuse is said once; a pass that is off refuses nothing.
    pub fn refused(&mut self, pass: Pass, node: String, reason: &str) {
        let count = &mut self.counts[pass as usize];
        let refusal = Refusal { node, reason: reason.to_owned() };
        if !count.off && !count.refused.contains(&refusal) {
            count.refused.push(refusal);
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
            refused: count.refused.clone(),
        })
    }
}
