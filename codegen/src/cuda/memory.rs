//! Memory that outlives a phase: keys and values in rings and blocks, and what the picks work with.

use gemma4c_graph::{CacheId, Graph, Group, NodeId};
use gemma4c_plan::cuda::{Form, KvCache, KvLayout, Launch, Places, RECORD_WORDS, Range, Region};

use super::common::{ALIGNMENT, Common, HISTORY, SUPPRESSED};
use super::error::LowerError;
use super::launch::{Span, bind_fixed};
use super::model::Options;
use super::phase::PhaseBuilder;
use crate::kernels::attention::address::BLOCK_ROWS;
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
    /// The pages of all slots.
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
        let (start, count, stride) = layout.pages(&place);
        let of = self.graph().cache(cache);
        let page = place.rows as u64 * self.common.can.kv.row_bytes(of.kv_heads, of.head_dim);
        let bytes = (count as u64).saturating_sub(1) * stride + page;
        let all = |offset| Span::Fixed(Range { region: Region::Kv, offset: start + offset, bytes });
        let words = layout.rings as u64 * places.max_pages as u64;
        Ok(CachePlace {
            keys: all(place.keys),
            values: all(place.values),
            pages: Span::Fixed(Range { region: Region::Arena, offset: places.pages, bytes: words * 4 }),
            window: place.window.unwrap_or(u32::MAX),
            capacity: place.rows,
            max_pages: places.max_pages,
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

/// Sequences, rings and blocks that keys and values have memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCapacity {
    /// Sequences at once.
    pub slots: u32,
    /// With those that hold snapshots.
    pub rings: u32,
    pub blocks: u32,
}

impl KvCapacity {
    /// All sequences may be as long as the context.
    pub fn of(options: &Options) -> KvCapacity {
        let slots = options.sequences.max(1);
        let snapshots = options.snapshots.unwrap_or_else(|| default_snapshots(slots));
        KvCapacity {
            slots,
            rings: slots.saturating_add(snapshots),
            blocks: slots.saturating_mul(pages_of(options.context)),
        }
    }
}

/// Blocks of a sequence.
pub fn pages_of(context: u32) -> u32 {
    context.div_ceil(BLOCK_ROWS)
}

/// Rings for snapshots where nobody says how many. One is enough for a chat: a turn's snapshot takes the place of the
/// one before. A second would keep the system prompt for the next chat, at the price of a window.
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

/// Divides keys and values into rings and blocks.
pub fn kv_layout(graph: &Graph, can: &Abilities, capacity: KvCapacity) -> KvLayout {
    let KvCapacity { slots, rings, blocks } = capacity;
    let (mut ring_bytes, mut block_bytes) = (0u64, 0u64);
    let mut caches = Vec::with_capacity(graph.caches.len());
    for cache in &graph.caches {
        let (end, rows) = match cache.window {
            Some(_) => (&mut ring_bytes, can.capacity(cache)),
            None => (&mut block_bytes, BLOCK_ROWS),
        };
        let row_bytes = can.kv.row_bytes(cache.kv_heads, cache.head_dim);
        let bytes = (rows as u64 * row_bytes).next_multiple_of(ALIGNMENT);
        caches.push(KvCache { keys: *end, values: *end + bytes, rows, window: cache.window });
        *end += 2 * bytes;
    }
    let blocks = if block_bytes == 0 { 0 } else { blocks };
    let blocks_at = rings as u64 * ring_bytes;
    KvLayout { slots, rings, ring_bytes, blocks, block_bytes, blocks_at, block_rows: BLOCK_ROWS, caches }
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
