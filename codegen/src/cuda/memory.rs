//! Memory that outlives a phase: keys and values on pages, and what the picks work with.

use gemma4c_graph::{Cache, CacheId, Graph, Group, NodeId};
use gemma4c_plan::cuda::{Form, KvLayout, KvShape, Launch, Places, RECORD_WORDS, Range, Region};

use super::common::{ALIGNMENT, Common, HISTORY, SUPPRESSED};
use super::error::LowerError;
use super::launch::{Span, bind_fixed};
use super::model::Options;
use super::phase::PhaseBuilder;
use crate::kernels::attention::view::{KvViewArguments, KvViewMutArguments};
use crate::kernels::sample::{
    ExcludedTokensArguments, MOST_KEPT, Picker, RowSlicesArguments, TokenHistoryArguments, pick,
};
use crate::passes::Abilities;

/// A cache as kernels' arguments describe it.
#[derive(Clone, Copy, Debug, Default)]
pub struct CachePlace {
    /// From the first page's first row to the last page's last.
    pub keys: Span,
    pub values: Span,
    /// The tables of all slots.
    pub pages: Span,
    /// Launch arguments.
    pub window: u32,
    pub capacity: u32,
    pub max_pages: u32,
    pub page_stride: u32,
}

impl CachePlace {
    /// The argument of kernels that read it.
    pub fn view(self) -> KvViewArguments<Span> {
        let Self { keys: k, values: v, pages, window, capacity, max_pages, page_stride } = self;
        KvViewArguments { pages, k, v, window, capacity, max_pages, page_stride }
    }

    /// The argument of kernels that write it, too.
    pub fn view_mut(self) -> KvViewMutArguments<Span> {
        let Self { keys: k, values: v, pages, window, capacity, max_pages, page_stride } = self;
        KvViewMutArguments { pages, k, v, window, capacity, max_pages, page_stride }
    }
}

impl PhaseBuilder<'_, '_> {
    /// Keys and values of a cache.
    pub fn cache(&self, cache: CacheId) -> Result<CachePlace, LowerError> {
        let (layout, places) = (&self.common.kv_layout, &self.common.places);
        let of_text = self.common.drafting.as_ref().map_or(cache, |drafting| drafting.caches[cache.index()]);
        let place = layout.caches[of_text.index()];
        let element = self.common.can.kv.bytes();
        let (of, paging, stride) = (self.graph().cache(cache), layout.paging(&place), layout.page_bytes);
        let page = u64::from(paging.rows) * self.common.can.kv.row_bytes(of.kv_heads, of.head_dim);
        let bytes = u64::from(layout.pages.saturating_sub(1)) * stride + page;
        let all = |offset| Span::Fixed(Range { region: Region::Kv, offset, bytes });
        let table = if place.window.is_some() { places.windows } else { places.pages };
        let words = u64::from(layout.slots) * u64::from(paging.entries);
        Ok(CachePlace {
            keys: all(place.keys),
            values: all(place.values),
            pages: Span::Fixed(Range { region: Region::Arena, offset: table, bytes: words * 4 }),
            window: place.window.unwrap_or(u32::MAX),
            capacity: paging.rows,
            max_pages: paging.entries,
            page_stride: u32::try_from(stride / element).map_err(|_| LowerError::Page { bytes: stride })?,
        })
    }

    /// Where a group stores the keys and values of its rows: the cache itself, or the stage of a chunk.
    pub fn store_place(&mut self, group: &Group, cache: CacheId) -> Result<CachePlace, LowerError> {
        let (graph, place) = (self.graph(), self.cache(cache)?);
        if self.is_one_row(group) || !self.common.can.is_staged(graph.cache(cache)) {
            return Ok(place);
        }
        let of = graph.cache(cache);
        let bytes = self.rows() as u64 * self.common.can.kv.row_bytes(of.kv_heads, of.head_dim);
        let [keys, values] = [self.buffer(bytes), self.buffer(bytes)];
        self.stages.insert(cache, [keys, values]);
        // A capacity of 0 is a stage: the chunk's rows one after the other.
        Ok(CachePlace { keys, values, capacity: 0, page_stride: 0, window: 0, ..place })
    }

    /// Records that the last launch writes a chunk's keys and values to their stage.
    pub fn record_stage(&mut self, append: NodeId, cache: CacheId) {
        if let Some(stage) = self.stages.get(&cache).copied() {
            let rows = self.graph().node(append).inputs.clone();
            rows.into_iter().zip(stage).for_each(|(node, span)| self.record_output(node, Form::Kv, span));
        }
    }
}

/// Pages of keys and values beside those of one sequence, at most: all sequences may be as long as the context, and
/// some pages are for snapshots.
pub fn pages_of_use(options: &Options, layout: &KvLayout) -> u32 {
    let snapshots = options.snapshots.unwrap_or_else(|| default_snapshots(layout.slots));
    // A snapshot has the pages of a window and that of its last positions.
    let of_snapshots = snapshots.saturating_mul(layout.sliding.entries + 1);
    layout.slots.saturating_mul(layout.pages_for(options.context)).saturating_add(of_snapshots)
}

/// Snapshots that there is room for where nobody says how many. One is enough for a chat: a turn's snapshot takes the
/// place of the one before. A second would keep the system prompt for the next chat, at the price of a window.
fn default_snapshots(slots: u32) -> u32 {
    (slots / 2).clamp(1, 16)
}

/// The most rows that are decoded at once.
const MOST_ROWS: u32 = 128;

/// The most rows for the sake of drafts alone: beyond them a row of a decode costs as much as a token.
const MOST_VERIFYING_ROWS: u32 = 32;

/// Rows of the decode phases: powers of two, up to all sequences or, where drafts are verified, all rows of some of
/// them.
pub fn decode_ladder(slots: u32, verified: u32) -> Vec<u32> {
    let verifying =
        if verified > 1 { slots.saturating_mul(verified).min(MOST_VERIFYING_ROWS.max(verified)) } else { 1 };
    let most = slots.max(verifying).clamp(1, MOST_ROWS).next_power_of_two();
    (0..=most.ilog2()).map(|power| 1 << power).collect()
}

/// Divides keys and values into pages: as many as are of use.
pub fn kv_layout(graph: &Graph, can: &Abilities, options: &Options) -> KvLayout {
    let shape = |cache: &Cache| KvShape {
        window: cache.window,
        kept: can.capacity(cache),
        row_bytes: can.kv.row_bytes(cache.kv_heads, cache.head_dim),
    };
    let shapes: Vec<KvShape> = graph.caches.iter().map(shape).collect();
    let layout = KvLayout { slots: options.sequences.max(1), ..KvLayout::divide(&shapes, options.context) };
    KvLayout { pages: pages_of_use(options, &layout), ..layout }
}

/// Bytes that the picks of so many rows work in.
pub fn pick_scratch(vocabulary: u32, rows: u64) -> u64 {
    let keys = |kept| Picker { vocabulary, kept }.slices() as u64 * kept as u64 * 8 * rows;
    keys(1).max(keys(MOST_KEPT)).next_multiple_of(ALIGNMENT)
}

/// What a phase picks tokens for.
#[derive(Clone, Copy, Debug)]
pub struct Picked {
    pub vocabulary: u32,
    /// Records of its rows.
    pub records: u64,
    pub rows: u32,
    /// Words of an entry of the history.
    pub history_rows: u32,
}

/// From the logits to the next tokens, among the `kept` largest. The scratch starts at `scratch`.
pub fn picks(common: &mut Common<'_>, of: Picked, kept: u32, scratch: u64) -> Result<Vec<Launch>, LowerError> {
    let arena = |offset, bytes| Span::Fixed(Range { region: Region::Arena, offset, bytes });
    let Picked { vocabulary, records, rows, history_rows } = of;
    let (places, words) = (common.places, rows as u64 * 4);
    let mask_words = Places::mask_words(vocabulary);
    let picker = Picker { vocabulary, kept };
    let instance = picker.pick(&[])?;
    let excluded = ExcludedTokensArguments {
        tokens: arena(places.suppress, SUPPRESSED as u64 * 4),
        count: SUPPRESSED,
        masks: arena(places.masks, mask_words as u64 * words),
        mask_words,
    };
    let largest = arena(scratch, picker.slices() as u64 * kept as u64 * words * 2);
    let tokens = arena(places.history, HISTORY as u64 * history_rows as u64 * 4);
    let arguments = pick::Arguments {
        logits: arena(places.logits, vocabulary as u64 * words),
        vocabulary,
        excluded,
        slices: RowSlicesArguments { largest, counters: common.counters().take(words) },
        records: arena(records, RECORD_WORDS as u64 * words),
        history: TokenHistoryArguments { tokens, len: HISTORY, rows: history_rows },
    };
    let arguments = bind_fixed(arguments.into(), &instance)?;
    let programmatic = instance.def.launch.dependent && common.can.target.arch.has_pdl();
    let kernel = common.kernels.index(instance);
    Ok(vec![Launch { kernel, grid: [picker.slices(), rows, 1], arguments, programmatic }])
}
