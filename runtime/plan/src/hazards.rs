//! Which launches of a phase must wait for which: a launch that reads waits for the one that wrote, and a launch that
//! writes waits for all that read or wrote there before. Values share the arena, so places that are used again count as
//! much as values that are read.
//!
//! What a launch touches is what its arguments say; which of them it writes is what its kernel says. Weights and tables
//! on the host are never written by a phase, so nothing waits for them.
//!
//! A kernel may read some of its arguments before it waits for its predecessor (programmatic dependent launch). Whoever
//! writes there must have ended when the launch starts, which is less than what has ended when its wait returns
//! ([`Order::started`]).

use std::collections::{BTreeMap, BTreeSet};

use crate::cuda::{Argument, Kernel, KvLayout, Launch, Range, Region};

/// Pieces of memory that are looked at for one phase, at most: a hundred times what the largest model has. A plan from
/// elsewhere may cut its memory into anything.
const MOST_PIECES: usize = 1 << 23;

/// For each launch the earlier ones that it must wait for, ascending; those that follow from others may be left out.
/// `None` where memory is cut into more pieces than any plan has.
pub fn needs(launches: &[&Launch], kernels: &[Kernel]) -> Option<Vec<Vec<u32>>> {
    let mut history = History::default();
    let mut all = Vec::with_capacity(launches.len());
    for (at, launch) in launches.iter().enumerate() {
        let mut needed = BTreeSet::new();
        let kernel = kernels.get(launch.kernel as usize)?;
        for writes in [false, true] {
            for (index, argument) in launch.arguments.iter().enumerate() {
                match argument {
                    Argument::Memory(range) if kernel.writes_to(index) == writes => {
                        history.access(at as u32, range, writes, &mut needed)?;
                    }
                    _ => {}
                }
            }
        }
        needed.remove(&(at as u32));
        all.push(needed.into_iter().collect());
    }
    Some(all)
}

/// The same edges without those that follow from others.
pub fn reduced(edges: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let order = Order::of(edges);
    let is_implied = |own: &[u32], edge: u32| own.iter().any(|other| order.is_before(edge, *other));
    edges.iter().map(|own| own.iter().copied().filter(|edge| !is_implied(own, *edge)).collect()).collect()
}

/// Which steps have ended when a step runs, by the edges of all of them.
pub struct Order {
    /// A bit for each earlier step.
    ended: Vec<Vec<u64>>,
}

impl Order {
    /// Edges lead to earlier steps.
    pub fn of(edges: &[Vec<u32>]) -> Order {
        let mut ended: Vec<Vec<u64>> = Vec::with_capacity(edges.len());
        for (at, own) in edges.iter().enumerate() {
            let mut bits = vec![0; at.div_ceil(64)];
            for &edge in own {
                let edge = edge as usize;
                bits[edge / 64] |= 1u64 << (edge % 64);
                for (bit, of_edge) in bits.iter_mut().zip(&ended[edge]) {
                    *bit |= of_edge;
                }
            }
            ended.push(bits);
        }
        Order { ended }
    }

    /// Whether `earlier` has ended when `step` runs.
    pub fn is_before(&self, earlier: u32, step: u32) -> bool {
        let word = self.ended[step as usize].get(earlier as usize / 64);
        word.is_some_and(|bits| bits >> (earlier % 64) & 1 == 1)
    }

    /// For each step, the one with which all that had ended when it ran has ended when this one starts, before it waits
    /// for anybody. A step that may not overlap starts when it runs. Another starts when its predecessor lets it: if
    /// that waits first, then after all that it waited for; if not, it may be waiting still.
    pub fn started(edges: &[Vec<u32>], launches: &[&Launch], kernels: &[Kernel]) -> Vec<u32> {
        let mut started: Vec<u32> = Vec::with_capacity(launches.len());
        for (at, launch) in launches.iter().enumerate() {
            started.push(match edges[at][..] {
                [before] if launch.programmatic => {
                    let waits_first = kernels[launches[before as usize].kernel as usize].waits_first;
                    if waits_first { before } else { started[before as usize] }
                }
                _ => at as u32,
            });
        }
        started
    }
}

/// The first of the launches before one that may still be running when it starts, and that write where it reads before
/// it waits.
pub fn disturbed(
    at: usize,
    launches: &[&Launch],
    kernels: &[Kernel],
    layout: &KvLayout,
    has_ended: impl Fn(u32) -> bool,
) -> Option<u32> {
    let memory = |of: &'_ Launch, chosen: &dyn Fn(&Kernel, usize) -> bool| -> Vec<Range> {
        let kernel = &kernels[of.kernel as usize];
        let each = of.arguments.iter().enumerate();
        let ranges = each.filter_map(|(index, argument)| match argument {
            Argument::Memory(range) if chosen(kernel, index) => Some(*range),
            _ => None,
        });
        ranges.collect()
    };
    let reads = memory(launches[at], &Kernel::reads_early);
    let writes_there = |step: &u32| {
        let written = memory(launches[*step as usize], &Kernel::writes_to);
        written.iter().any(|range| reads.iter().any(|read| share_bytes(read, range, layout)))
    };
    if reads.is_empty() { None } else { (0..at as u32).filter(|step| !has_ended(*step)).find(writes_there) }
}

/// Whether two ranges have bytes in common. Those of different caches overlap, page by page in turn, and have none.
fn share_bytes(a: &Range, b: &Range, layout: &KvLayout) -> bool {
    let overlap = a.region == b.region
        && a.offset < b.offset.saturating_add(b.bytes)
        && b.offset < a.offset.saturating_add(a.bytes);
    let pages = |range: &Range| layout.whole_pages(range.offset, range.bytes);
    let are_others = a.region == Region::Kv
        && matches!((pages(a), pages(b)), (Some(pages_of_a), Some(pages_of_b)) if pages_of_a != pages_of_b);
    overlap && !are_others
}

/// Who touched which bytes last.
#[derive(Default)]
struct History {
    kv: BTreeMap<u64, Piece>,
    arena: BTreeMap<u64, Piece>,
    looked_at: usize,
}

/// Bytes with one past.
#[derive(Clone)]
struct Piece {
    end: u64,
    writer: Option<u32>,
    /// Since then, ascending.
    readers: Vec<u32>,
}

impl History {
    /// Adds to `needed` whom an access must wait for, and remembers it; `None` where there are too many pieces.
    fn access(&mut self, step: u32, range: &Range, writes: bool, needed: &mut BTreeSet<u32>) -> Option<()> {
        let pieces = match range.region {
            Region::Kv => &mut self.kv,
            Region::Arena => &mut self.arena,
            Region::Weights | Region::Host | Region::Seats => return Some(()),
        };
        let (start, end) = (range.offset, range.offset.checked_add(range.bytes)?);
        if start == end {
            return Some(());
        }
        let mut looked_at = split(pieces, start) + split(pieces, end);
        let inside: Vec<u64> = pieces.range(start..end).map(|(at, _)| *at).collect();
        let mut next = start;
        for at in inside {
            if let (false, true) = (writes, next < at) {
                pieces.insert(next, Piece { end: at, writer: None, readers: vec![step] });
            }
            let piece = pieces.get_mut(&at)?;
            next = piece.end;
            needed.extend(piece.writer);
            if writes {
                looked_at += piece.readers.len();
                needed.extend(&piece.readers);
                pieces.remove(&at);
            } else if piece.readers.last() != Some(&step) {
                piece.readers.push(step);
            }
            looked_at += 1;
        }
        if writes {
            pieces.insert(start, Piece { end, writer: Some(step), readers: Vec::new() });
        } else if next < end {
            pieces.insert(next, Piece { end, writer: None, readers: vec![step] });
        }
        self.looked_at += looked_at + 1;
        (self.looked_at <= MOST_PIECES).then_some(())
    }
}

/// Cuts the piece that `at` lies in; returns how much was copied.
fn split(pieces: &mut BTreeMap<u64, Piece>, at: u64) -> usize {
    let Some((_, piece)) = pieces.range_mut(..at).next_back().filter(|(_, piece)| piece.end > at) else { return 0 };
    let after = piece.clone();
    piece.end = at;
    let copied = after.readers.len();
    pieces.insert(at, after);
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::KvCache;

    /// From one byte to another.
    type Bytes = (u64, u64);

    /// Launches of kernels that read their first argument and write their second.
    fn needs_of(accesses: &[(Bytes, Bytes)]) -> Vec<Vec<u32>> {
        let kernel = Kernel {
            name: "k".into(),
            instance: "k".into(),
            block: 32,
            shared: 0,
            written: 0b10,
            waits: true,
            waits_first: false,
            early: 0,
        };
        let range =
            |(start, end): Bytes| Argument::Memory(Range { region: Region::Arena, offset: start, bytes: end - start });
        let launch = |(read, write): &(Bytes, Bytes)| Launch {
            kernel: 0,
            grid: [1; 3],
            arguments: vec![range(*read), range(*write)],
            programmatic: false,
        };
        let launches: Vec<Launch> = accesses.iter().map(launch).collect();
        needs(&launches.iter().collect::<Vec<_>>(), &[kernel]).expect("few pieces")
    }

    #[test]
    fn reading_waits_for_writing_and_writing_for_both() {
        const NONE: Bytes = (0, 0);
        // What is written, then read.
        assert_eq!(needs_of(&[(NONE, (0, 8)), ((4, 6), (16, 20))]), [vec![], vec![0]]);
        // A place that is used again: after who wrote it, and after who read it.
        assert_eq!(needs_of(&[(NONE, (0, 8)), (NONE, (6, 9))]), [vec![], vec![0]]);
        assert_eq!(needs_of(&[((0, 8), (8, 9)), ((2, 3), (9, 10)), (NONE, (0, 4))]), [vec![], vec![], vec![0, 1]]);
        // Two that only read, and two beside each other.
        assert_eq!(needs_of(&[((0, 8), (8, 9)), ((0, 8), (9, 10))]), [vec![], vec![]]);
        assert_eq!(needs_of(&[(NONE, (0, 8)), (NONE, (8, 16))]), [vec![], vec![]]);
        // Only the last writer of a byte counts: it has waited for those before it.
        assert_eq!(needs_of(&[(NONE, (0, 8)), (NONE, (0, 8)), ((0, 8), NONE)]), [vec![], vec![0], vec![1]]);
        // Of a piece that was written in part, both.
        assert_eq!(needs_of(&[(NONE, (0, 8)), (NONE, (2, 4)), ((0, 8), NONE)]), [vec![], vec![0], vec![0, 1]]);
        // A kernel may read what it writes.
        assert_eq!(needs_of(&[((0, 8), (0, 8))]), [Vec::<u32>::new()]);
    }

    #[test]
    fn edges_that_follow_from_others_go() {
        let edges = [vec![], vec![0], vec![0, 1], vec![0, 2], vec![1]];
        assert_eq!(reduced(&edges), [vec![], vec![0], vec![1], vec![2], vec![1]]);
        let order = Order::of(&edges);
        assert!(order.is_before(0, 4) && order.is_before(1, 3));
        assert!(!order.is_before(2, 4) && !order.is_before(3, 3) && !order.is_before(4, 3));
    }

    #[test]
    fn what_is_read_before_the_wait_was_written_before_the_launch_started() {
        let of_kernel = |written, waits_first, early| Kernel {
            name: "k".into(),
            instance: "k".into(),
            block: 32,
            shared: 0,
            written,
            waits: true,
            waits_first,
            early,
        };
        // One that writes and lets its successor start at once, one that waits first, and one that reads early.
        let kernels = [of_kernel(0b1, false, 0), of_kernel(0b1, true, 0), of_kernel(0, false, 0b1)];
        let launch = |kernel, region, offset, bytes| Launch {
            kernel,
            grid: [1; 3],
            arguments: vec![Argument::Memory(Range { region, offset, bytes })],
            programmatic: true,
        };
        let layout = KvLayout {
            slots: 2,
            pages: 2,
            page_bytes: 64,
            caches: [0, 32].map(|keys| KvCache { keys, values: keys + 16, window: Some(1) }).to_vec(),
            ..KvLayout::default()
        };
        let disturbed_last = |launches: &[Launch]| {
            let edges: Vec<Vec<u32>> =
                (0..launches.len() as u32).map(|at| at.checked_sub(1).into_iter().collect()).collect();
            let (launches, order, at) = (launches.iter().collect::<Vec<_>>(), Order::of(&edges), launches.len() - 1);
            let started = Order::started(&edges, &launches, &kernels);
            disturbed(at, &launches, &kernels, &layout, |step| order.is_before(step, started[at]))
        };
        let arena = |kernel, offset| launch(kernel, Region::Arena, offset, 8);
        // Its predecessor writes there, or what was let start by one that had not waited.
        assert_eq!(disturbed_last(&[arena(0, 0), arena(2, 4)]), Some(0));
        assert_eq!(disturbed_last(&[arena(0, 0), arena(0, 16), arena(0, 16), arena(2, 4)]), Some(0));
        assert_eq!(disturbed_last(&[arena(0, 8), arena(0, 16), arena(2, 0)]), None);
        // One between them that waits first has let nobody start before the writer had ended; but it may be the writer.
        assert_eq!(disturbed_last(&[arena(0, 0), arena(1, 16), arena(0, 16), arena(2, 4)]), None);
        assert_eq!(disturbed_last(&[arena(0, 16), arena(1, 0), arena(0, 16), arena(2, 4)]), Some(1));
        // A launch that may not overlap has nobody beside it.
        let alone = Launch { programmatic: false, ..arena(2, 4) };
        assert_eq!(disturbed_last(&[arena(0, 0), alone]), None);
        // Pages of caches lie between each other.
        let pages = |kernel, offset| launch(kernel, Region::Kv, offset, 64 + 16);
        assert_eq!(disturbed_last(&[pages(0, 0), pages(2, 32)]), None);
        assert_eq!(disturbed_last(&[pages(0, 0), pages(2, 16)]), None);
        assert_eq!(disturbed_last(&[pages(0, 32), pages(2, 32)]), Some(0));
        assert_eq!(disturbed_last(&[launch(0, Region::Kv, 8, 64 + 16), pages(2, 32)]), Some(0));
    }

    #[test]
    fn memory_in_more_pieces_than_any_plan_has_is_given_up() {
        let kernel = Kernel {
            name: "k".into(),
            instance: "k".into(),
            block: 32,
            shared: 0,
            written: 0b1,
            waits: false,
            waits_first: false,
            early: 0,
        };
        let reader = Kernel { written: 0, ..kernel.clone() };
        let launch = |kernel, offset, bytes| Launch {
            kernel,
            grid: [1; 3],
            arguments: vec![Argument::Memory(Range { region: Region::Kv, offset, bytes })],
            programmatic: false,
        };
        let mut launches: Vec<Launch> = (0..4096).map(|at| launch(0, at * 8, 4)).collect();
        launches.extend((0..4096).map(|_| launch(1, 0, 1 << 20)));
        assert_eq!(needs(&launches.iter().collect::<Vec<_>>(), &[kernel, reader]), None);
    }
}
