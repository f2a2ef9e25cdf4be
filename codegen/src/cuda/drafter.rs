//! A drafter on a GPU: a chain of steps over the text's caches, each from the token and the hidden state that the one
//! before it wrote.
//!
//! A step is lowered by the same passes as a decoded row. What is its own: its first hidden state is the norm of what a
//! decoded row wrote, embedding and hidden state are stored next to each other where they are read, queries look from
//! the position before their own, and its choice goes where the next step and the rows that verify it find it. Nothing
//! comes to the host between two steps, and nothing has to between two rounds of drafting: the last launch ends one,
//! after the picks of the rows that verify its drafts.

use gemma4c_graph::passes::{self, Goal};
use gemma4c_graph::{CacheId, Graph, NodeId, Op, WeightId};
use gemma4c_plan::cuda::{CudaDrafter, DrafterPlaces, Form, Places, RECORD_WORDS, Range, Region};

use super::common::{COUNTERS, Common, Drafting, index_of_values};
use super::error::LowerError;
use super::launch::Span;
use super::model::{Drafter, Options};
use super::phase::{PhaseBuilder, Place, RoutingPlace, Work};
use crate::kernels::draft::{self, DraftRoundArguments, TokenGroupsArguments};
use crate::kernels::sample::{RowSlicesArguments, TokenHistoryArguments};
use crate::kernels::values::value_arguments;
use crate::passes::{self as target_passes, PhaseRows};

/// Drafts in a row. A plan may verify more rows than these: tokens that are looked up cost no steps.
const MOST_STEPS: u32 = 7;

/// The text's graph, which keeps what enters the norm before its LM head.
pub fn with_lm_head_input(graph: &Graph) -> Result<Graph, LowerError> {
    let (_, norm) = last_norm(graph)?;
    Ok(Graph { kept: vec![graph.node(norm).inputs[0]], ..graph.clone() })
}

/// The weight of the norm before the LM head, and the norm.
fn last_norm(graph: &Graph) -> Result<(WeightId, NodeId), LowerError> {
    let mut at = graph.output;
    while let Some(id) = at {
        let node = graph.node(id);
        if let Op::RmsNorm { weight: Some(weight), .. } = node.op {
            return Ok((weight, id));
        }
        at = node.inputs.first().copied().filter(|_| matches!(node.op, Op::MatMul { .. } | Op::Softcap { .. }));
    }
    Err(LowerError::Drafter { why: "the model's LM head reads no normed state".into() })
}

impl Drafter<'_> {
    /// Scores of a step, and the groups that they are of.
    fn scored(&self) -> (Option<NodeId>, u32, u32) {
        let spread = self.graph.output.filter(|id| matches!(self.graph.node(*id).op, Op::SpreadTokens { .. }));
        let scores = spread.map(|id| self.graph.node(id).inputs[0]).or(self.graph.output);
        let count = scores.map_or(0, |id| self.graph.node(id).ty.width);
        let routes = self.graph.nodes.iter().find(|node| matches!(node.op, Op::Route { .. }));
        (scores, count, routes.map_or(0, |node| node.ty.width))
    }

    /// Places for what host and drafter exchange; `reserve` takes words and gives an offset.
    pub fn places(
        &self,
        places: &Places,
        vocabulary: u32,
        decode_rows: u64,
        reserve: &mut dyn FnMut(u64) -> u64,
    ) -> DrafterPlaces {
        let hidden = self.graph.node(self.hidden).ty.width as u64;
        let (_, score_count, group_count) = self.scored();
        let record = reserve(2 * RECORD_WORDS as u64);
        let entering = reserve(hidden * decode_rows);
        // The embedding that a step reads is stored before its hidden state.
        let embedding = reserve(2 * hidden);
        DrafterPlaces {
            record,
            before: record + RECORD_WORDS as u64 * 4,
            entering,
            hidden: embedding + hidden * 4,
            drafts: reserve(decode_rows.max(RECORD_WORDS as u64 * 4)),
            given: reserve(decode_rows),
            scores: places.logits,
            score_count: score_count.min(vocabulary),
            groups: reserve(group_count.max(1) as u64),
            group_count,
        }
    }

    /// The launches of as many drafts as can be verified. `scratch` is where choices work, and `base` where values
    /// begin.
    pub fn lower(
        &self,
        common: &mut Common<'_>,
        text: &Graph,
        options: &Options,
        [scratch, base]: [u64; 2],
    ) -> Result<CudaDrafter, LowerError> {
        let places = common.drafter.ok_or_else(|| LowerError::Drafter { why: "it has no places".into() })?;
        let (scores, score_count, group_count) = self.scored();
        let graph = Graph { output: scores, kept: vec![self.hidden], ..self.graph.clone() };
        self.check(&graph, options)?;
        let of_text = |cache: &gemma4c_graph::Cache| {
            let own = text.caches.iter().position(|own| own == cache);
            own.map(|at| CacheId(at as u32)).ok_or_else(|| LowerError::Drafter {
                why: format!("the model's layer {} has no such keys and values", cache.layer),
            })
        };
        let caches = graph.caches.iter().map(of_text).collect::<Result<_, _>>()?;
        let order = match self.token_order {
            [] => Span::Unused,
            order => {
                let words = order.iter().map(|token| f32::from_bits(*token)).collect();
                common.weights.constant("tokens in groups", words)
            }
        };
        common.drafting = Some(Drafting { caches, order });
        let of_values = std::mem::replace(&mut common.value_index, index_of_values(self.meaning));
        let (weight, norm) = last_norm(text)?;
        let Op::RmsNorm { eps, .. } = text.node(norm).op else { return Err(no_value(text, norm)) };
        let (fused, _) = passes::fuse(&graph, Goal::Decode, &options.disabled);
        let (schedule, _) = target_passes::schedule(fused, PhaseRows::Decode(1), &common.can, &options.disabled);
        let decode_rows = common.counters.1 / 4 / COUNTERS;
        let mut builder = PhaseBuilder::new(common, &schedule);
        builder.enter_draft(places, weight, eps, decode_rows)?;
        let mut ends = Vec::new();
        for _ in 1..options.verified.min(MOST_STEPS + 1) {
            builder.forget_values();
            builder.lower()?;
            let grouped = group_count > 0;
            let each = if grouped { score_count / group_count } else { 1 };
            builder.choose_draft(places, each, decode_rows as u32 - 1, scratch)?;
            ends.push(builder.launches() as u32);
        }
        builder.accept_drafts(places, options.verified - 1, decode_rows as u32)?;
        let phase = builder.finish(format!("draft {}", ends.len()), 0, base)?;
        (common.drafting, common.value_index) = (None, of_values);
        Ok(CudaDrafter { phase, ends, places })
    }

    /// What the kernels cannot do.
    fn check(&self, graph: &Graph, options: &Options) -> Result<(), LowerError> {
        let refused = |why: String| Err(LowerError::Drafter { why });
        if options.verified < 2 {
            return refused("no decode of the plan verifies drafts".into());
        }
        let routed = graph.nodes.iter().find_map(|node| match node.op {
            Op::Route { top_k } => Some((graph.node(node.inputs[0]).ty.width, top_k)),
            _ => None,
        });
        match routed {
            Some((groups, top_k)) if groups > draft::MOST_GROUPS || top_k > draft::MOST_KEPT_GROUPS => {
                refused(format!(
                    "it looks at {top_k} of {groups} groups of tokens; {} of {} are the most",
                    draft::MOST_KEPT_GROUPS,
                    draft::MOST_GROUPS
                ))
            }
            _ => Ok(()),
        }
    }
}

fn no_value(graph: &Graph, node: NodeId) -> LowerError {
    LowerError::NoValue { node: graph.full_name(node) }
}

fn arena(offset: u64, words: u64) -> Span {
    Span::Fixed(Range { region: Region::Arena, offset, bytes: words * 4 })
}

impl PhaseBuilder<'_, '_> {
    /// The hidden state of a decoded row, for the first step.
    fn enter_draft(&mut self, own: DrafterPlaces, weight: WeightId, eps: f32, rows: u64) -> Result<(), LowerError> {
        let norm_weight = self.common.weights.floats(weight)?;
        let Span::Fixed(Range { bytes, .. }) = norm_weight else {
            return Err(LowerError::Drafter { why: "the model's last norm has no weights".into() });
        };
        let width = bytes / 4;
        let arguments = draft::enter_draft::Arguments {
            x: arena(own.entering, width * rows),
            weight: norm_weight,
            record: arena(own.before, RECORD_WORDS as u64),
            out: arena(own.hidden, width),
            width: width as u32,
            epsilon: eps,
        };
        let work = Work { bytes: width * 12, flops: 0 };
        self.launch(draft::enter()?, [1, 1, 1], arguments, &[], work, "what the LM head read of the last accepted row")
    }

    /// A step's draft: to the record of the next step, and to those of the rows that verify it.
    fn choose_draft(&mut self, own: DrafterPlaces, each: u32, most: u32, scratch: u64) -> Result<(), LowerError> {
        let grouped = own.group_count > 0;
        let slices = draft::slices(own.score_count);
        let ids = if grouped { arena(own.groups, own.group_count as u64) } else { Span::Unused };
        let groups = TokenGroupsArguments { ids, order: self.token_order(), each };
        let counters = self.common.counters().take(4);
        let round = DraftRoundArguments {
            record: arena(own.record, RECORD_WORDS as u64),
            rows: arena(self.common.places.rows, (most as u64 + 1) * RECORD_WORDS as u64),
            drafts: arena(own.drafts, most as u64),
            given: arena(own.given, most as u64),
            most,
        };
        let arguments = draft::draft_token::Arguments {
            scores: arena(own.scores, own.score_count as u64),
            count: own.score_count,
            groups,
            slices: RowSlicesArguments { largest: arena(scratch, slices as u64 * 2), counters },
            round,
        };
        let work = Work { bytes: own.score_count as u64 * 4, flops: 0 };
        let why = "the likeliest token, for the next step and for the row that verifies it";
        self.launch(draft::choice(grouped)?, [slices, 1, 1], arguments, &[], work, why)
    }

    /// The end of a round: what is kept of its drafts, for the host and for the next round.
    fn accept_drafts(&mut self, own: DrafterPlaces, most: u32, history_rows: u32) -> Result<(), LowerError> {
        let places = self.common.places;
        let arguments = draft::accept_drafts::Arguments {
            drafts: arena(own.drafts, most as u64),
            rows: arena(places.rows, (most as u64 + 1) * RECORD_WORDS as u64),
            record: arena(own.record, 2 * RECORD_WORDS as u64),
            given: arena(own.given, most as u64),
            history: TokenHistoryArguments {
                tokens: arena(places.history, places.history_len as u64 * history_rows as u64),
                len: places.history_len,
                rows: history_rows,
            },
        };
        let why = "how many drafts were right is decided here: the next round does not wait for the host";
        self.launch(draft::accept(most)?, [1, 1, 1], arguments, &[], Work::default(), why)
    }

    fn token_order(&self) -> Span {
        self.common.drafting.as_ref().map_or(Span::Unused, |drafting| drafting.order)
    }

    /// The groups of tokens that a step looks at.
    pub fn closest_groups(&mut self, id: NodeId, top_k: u32) -> Result<(), LowerError> {
        let own = self.drafter_places().ok_or_else(|| no_value(self.graph(), id))?;
        let scores = self.graph().node(id).inputs[0];
        let groups = self.graph().node(scores).ty.width;
        let ids = arena(own.groups, top_k as u64);
        let arguments = draft::closest_groups::Arguments { scores: self.whole_rows(scores)?, ids, groups };
        let work = Work { bytes: groups as u64 * 4, flops: 0 };
        let why = format!("{top_k} of {groups} groups: one block has them all");
        self.launch(draft::closest(groups, top_k)?, [1, 1, 1], arguments, &[id], work, why)?;
        self.record_output(id, Form::Experts, ids);
        self.bind_routing(id, RoutingPlace { ids, weights: Span::Unused });
        Ok(())
    }

    /// The scores of the tokens in these groups.
    pub fn token_scores(&mut self, id: NodeId, weight: WeightId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (x, candidates, count) = (self.whole_rows(node.inputs[0])?, node.inputs[1], node.ty.width);
        let Op::Candidates { each } = self.graph().node(candidates).op else {
            return Err(no_value(self.graph(), candidates));
        };
        let ids = self.routing(self.graph().node(candidates).inputs[0])?.ids;
        let w = self.graph().weight(weight);
        let (dtype, k) = (w.dtype, w.dim(0) as u32);
        let groups = TokenGroupsArguments { ids, order: self.token_order(), each };
        let out = self.alloc_value(id, Form::F32, 1);
        let arguments = draft::token_scores::Arguments { x, groups, out, k, count };
        let values = value_arguments(dtype, self.common.weights.blocks(weight));
        let arguments = arguments.with_slot(draft::token_scores::slot::value, values);
        let bytes = count as u64 * dtype.row_bytes(k as u64).unwrap_or(0);
        let work = Work { bytes, flops: 2 * count as u64 * k as u64 };
        let why = format!("{count} tokens of the closest groups, straight from the file's blocks");
        self.launch(draft::scores(dtype)?, draft::scores_grid(count), arguments, &[id], work, why)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// The hidden state, and the embedding and it as one row.
    pub fn drafters_view(&mut self, id: NodeId) -> Result<(), LowerError> {
        let own = self.drafter_places().ok_or_else(|| no_value(self.graph(), id))?;
        let width = self.graph().node(id).ty.width;
        let before = match self.graph().node(id).op {
            Op::Concat => self.graph().node(self.graph().node(id).inputs[0]).ty.width as u64,
            _ => 0,
        };
        let start = arena(own.hidden - before * 4, width as u64);
        self.bind_location(id, Form::F32, Place { start, stride: width, part: None });
        Ok(())
    }
}
