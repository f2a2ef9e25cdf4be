//! Cases of the drafter's kernels: rows that are not the first, ties, scores that are no numbers, groups in any order,
//! and slices left over.

use gemma4c_blocks::{DType, reference};
use gemma4c_dsl::harness::{Bound, Case, Random};

use super::gather::{elements, table};
use crate::kernels::draft;

pub fn cases() -> Vec<Case> {
    let nobody = |scores: Vec<f32>| vec![f32::NAN; scores.len()];
    vec![
        enter(5376, 3, 2),
        enter(40, 1, 0),
        closest(2048, 32),
        closest(48, 6),
        closest(300, 256),
        scored(DType::Q8_0, 256, 128, &[5, 0, 31]),
        scored(DType::BF16, 96, 16, &[2, 1]),
        scored(DType::Q4_0, 64, 3, &[1, 0, 2]),
        chosen(5000, None, 0, 0, |scores| scores),
        chosen(100, None, 6, 0, |scores| scores),
        chosen(4096, Some((128, 64)), 2, 0, |scores| scores),
        chosen(96, Some((16, 48)), 3, 0, |scores| scores.iter().map(|score| score.round()).collect()),
        chosen(70, None, 1, 0, nobody),
        // Beyond the rows that can be verified nothing is left but in the drafter's own record.
        chosen(70, None, 7, 0, |scores| scores),
        // The drafter goes on with its own token, the row has another.
        chosen(100, None, 2, 12, |scores| scores),
        Round { drafted: 7, right: 7, ..ROUND }.case("all drafts are right"),
        Round { drafted: 7, right: 3, ..ROUND }.case("right ones behind a wrong one do not count"),
        Round { drafted: 4, right: 0, ..ROUND }.case("the first draft is wrong"),
        Round { drafted: 4, right: 4, ..ROUND }.case("rows that are free have no drafts"),
        Round { drafted: 0, right: 0, ..ROUND }.case("no drafts"),
        Round { drafted: 1, right: 1, most: 1, ..ROUND }.case("one draft at most"),
        Round { drafted: 31, right: 30, most: 31, ..ROUND }.case("a row for every lane"),
        Round { drafted: 5, right: 2, picks_nothing: true, ..ROUND }
            .case("the row behind the last right one picks nothing"),
    ]
}

fn enter(width: usize, rows: usize, row: usize) -> Case {
    let mut random = Random::new(width as u64);
    let (x, weight) = (random.floats(rows * width, -3.0, 3.0), random.floats(width, -2.0, 2.0));
    let of_row = &x[row * width..][..width];
    let squares: f64 = of_row.iter().map(|x| f64::from(*x).powi(2)).sum();
    let factor = 1.0 / (squares / width as f64 + 1e-6).sqrt();
    let expected: Vec<f32> =
        of_row.iter().zip(&weight).map(|(x, weight)| (f64::from(*x) * factor * f64::from(*weight)) as f32).collect();
    Case::new(format!("row {row} of {rows}, {width} wide"), draft::enter().expect("256 threads are a block"))
        .grid([1, 1, 1])
        .buffer("x", x)
        .buffer("weight", weight)
        .buffer("record", [&[7, 1, row as u32, 0][..], &[9; 12]].concat())
        .scalar("width", width as u32)
        .scalar("epsilon", 1e-6f32)
        .expect("out", expected, Bound::Within { absolute: 2e-6, relative: 2e-6 })
}

fn closest(groups: usize, kept: usize) -> Case {
    // Halves, so that many are equal; and one that is no number.
    let mut scores: Vec<f32> =
        Random::new(groups as u64).floats(groups, -60.0, 60.0).iter().map(|score| score.round() / 2.0).collect();
    scores[groups / 2] = f32::NAN;
    let mut order: Vec<u32> = (0..groups as u32).filter(|group| !scores[*group as usize].is_nan()).collect();
    order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
    let instance = draft::closest(groups as u32, kept as u32).expect("one block has them all");
    Case::new(format!("{kept} of {groups} groups"), instance)
        .grid([1, 1, 1])
        .buffer("scores", scores)
        .scalar("groups", groups as u32)
        .expect("ids", order[..kept].to_vec(), Bound::Exact)
}

/// Every token once, in no order.
fn order_of(tokens: usize, random: &mut Random) -> Vec<u32> {
    let keys = random.floats(tokens, 0.0, 1.0);
    let mut order: Vec<u32> = (0..tokens as u32).collect();
    order.sort_by(|a, b| keys[*a as usize].total_cmp(&keys[*b as usize]));
    order
}

fn scored(dtype: DType, k: usize, each: usize, ids: &[u32]) -> Case {
    let groups = *ids.iter().max().expect("there are groups") as usize + 1;
    let (tokens, layout) = (groups * each, dtype.layout());
    let mut random = Random::new((k * each) as u64);
    let order = order_of(tokens, &mut random);
    let x = random.floats(k, -2.0, 2.0);
    let bytes = table(dtype, tokens * k, &mut random);
    let value =
        |at: usize| reference::value(layout, &bytes[at / layout.len * layout.bytes..][..layout.bytes], at % layout.len);
    let score =
        |token: usize| -> f32 { (0..k).map(|i| f64::from(value(token * k + i)) * f64::from(x[i])).sum::<f64>() as f32 };
    let size = |token: usize| -> f64 { (0..k).map(|i| f64::from(value(token * k + i) * x[i]).abs()).sum() };
    let chosen = |i: usize| order[ids[i / each] as usize * each + i % each] as usize;
    let count = ids.len() * each;
    let expected: Vec<f32> = (0..count).map(|i| score(chosen(i))).collect();
    let largest = (0..count).map(|i| size(chosen(i))).fold(0.0, f64::max);
    let instance = draft::scores(dtype).expect("every type has a kernel");
    Case::new(format!("{dtype}, {} groups of {each}, {k} wide", ids.len()), instance)
        .grid(draft::scores_grid(count as u32))
        .buffer("x", x)
        .buffer("groups_ids", ids.to_vec())
        .buffer("groups_order", order)
        .buffer("value_tensor", elements(dtype, bytes.clone()))
        .scalar("k", k as u32)
        .scalar("groups_each", each as u32)
        .scalar("count", count as u32)
        .expect("out", expected, Bound::Within { absolute: (largest * 2e-6) as f32, relative: 0.0 })
}

/// `groups` is the tokens of each, and their number: scores are of some of them.
fn chosen(
    count: usize,
    groups: Option<(usize, usize)>,
    drafted: u32,
    given: u32,
    scores: fn(Vec<f32>) -> Vec<f32>,
) -> Case {
    let mut random = Random::new(count as u64 + 1);
    let scores = scores(random.floats(count, -9.0, 9.0));
    let (order, ids, each) = match groups {
        None => (vec![0], vec![0], 1),
        Some((each, all)) => {
            let ids: Vec<u32> = order_of(all, &mut random)[..count / each].to_vec();
            (order_of(each * all, &mut random), ids, each)
        }
    };
    let token = |at: usize| match groups {
        None => at as u32,
        Some(_) => order[ids[at / each] as usize * each + at % each],
    };
    let key = |at: usize| -> u64 {
        let bits = scores[at].to_bits();
        let ordered = if scores[at].is_sign_negative() { !bits } else { bits | 1 << 31 };
        if scores[at].is_nan() { 0 } else { u64::from(ordered) << 32 | u64::from(!token(at)) }
    };
    let slices = draft::slices(count as u32) as usize;
    let of_slice = |slice: usize| (slice * 2048..count.min((slice + 1) * 2048)).map(key).max().unwrap_or(0);
    let largest: Vec<u64> = (0..slices).map(of_slice).collect();
    let picked = !(largest.iter().max().copied().unwrap_or(0) as u32);
    let most = 7;
    let record: Vec<u32> = [&[9, 1, 5, 0, drafted][..], &[3; 11]].concat();
    let after: Vec<u32> = [&[9, 1, picked, 0, drafted + 1][..], &[3; 11]].concat();
    let rows: Vec<u32> = (0..(most + 1) * 16).collect();
    let (mut rows_after, mut drafts_after) = (rows.clone(), vec![1000; most as usize]);
    if drafted < most {
        let verified = if given == 0 { picked } else { given - 1 };
        rows_after[(drafted as usize + 1) * 16 + 1..][..2].copy_from_slice(&[1, verified]);
        drafts_after[drafted as usize] = verified;
    }
    let named = if groups.is_some() { "some groups" } else { "all tokens" };
    let instance = draft::choice(groups.is_some()).expect("256 threads are a block");
    let instead = if given == 0 { "" } else { ", given another" };
    Case::new(format!("the largest of {count}, {named}, after {drafted}{instead}"), instance)
        .grid([slices as u32, 1, 1])
        .buffer("scores", scores.clone())
        .buffer("groups_ids", ids.clone())
        .buffer("groups_order", order.clone())
        .buffer("slices_largest", vec![7u64; slices])
        .buffer("slices_counters", vec![0u32])
        .buffer("round_record", record)
        .buffer("round_rows", rows)
        .buffer("round_drafts", vec![1000u32; most as usize])
        .buffer("round_given", vec![given; most as usize])
        .scalar("count", count as u32)
        .scalar("groups_each", each as u32)
        .scalar("round_most", most)
        .expect("slices_largest", largest, Bound::Exact)
        .expect("slices_counters", vec![0u32], Bound::Exact)
        .expect("round_record", after, Bound::Exact)
        .expect("round_rows", rows_after, Bound::Exact)
        .expect("round_drafts", drafts_after, Bound::Exact)
}

/// A round that is to be ended.
#[derive(Clone, Copy)]
struct Round {
    /// Drafts, and how many of them are right before one is wrong.
    drafted: u32,
    right: u32,
    /// Drafts at most.
    most: u32,
    /// Whether the row behind the last right draft has no number among its logits.
    picks_nothing: bool,
}

const ROUND: Round = Round { drafted: 0, right: 0, most: 7, picks_nothing: false };

impl Round {
    fn case(self, named: &str) -> Case {
        const POSITION: u32 = 500;
        const TICK: u32 = 9;
        // The entry that the picks wrote is the first of the ring.
        let (history_len, history_rows) = (8, self.most + 1);
        let Round { drafted, right, most, picks_nothing } = self;
        let picked = |row: u32| if picks_nothing && row == right { u32::MAX } else { 70 + row };
        // One wrong draft; those behind it are what their rows pick, which counts for nothing.
        let drafts: Vec<u32> = (0..most).map(|at| picked(at) + u32::from(at == right && !picks_nothing)).collect();
        let drafts: Vec<u32> = drafts.iter().map(|draft| if *draft == u32::MAX { 5 } else { *draft }).collect();
        let record = |row: u32, position: u32, in_use: u32, token: u32, tick: u32| -> Vec<u32> {
            [&[position, in_use, token, 3, tick][..], &[row + 40; 11]].concat()
        };
        let (mut rows, mut history) = (Vec::new(), vec![1000; (history_len * history_rows) as usize]);
        for row in 0..=most {
            let used = row <= drafted;
            let (position, token, tick) = (POSITION + row + u32::from(used), picked(row), TICK - u32::from(!used));
            rows.extend(record(row, position, used.into(), token, tick));
            if used {
                history[row as usize] = token;
            }
        }
        let accepted = right.min(drafted);
        let next = POSITION + 1 + accepted;
        let mut rows_after = Vec::new();
        for row in 0..=most {
            let token = if row == 0 { picked(accepted) } else { 0 };
            rows_after.extend(record(row, next + row, (row == 0).into(), token, TICK));
        }
        let mut history_after = history.clone();
        let kept = if picks_nothing { 0 } else { accepted as usize + 1 };
        history_after[kept..=most as usize].fill(u32::MAX);
        let two = |first: [u32; 5], second: [u32; 5]| [&first[..], &[6; 11], &second, &[8; 11]].concat();
        Case::new(format!("{named}: {accepted} of {drafted}"), draft::accept(most).expect("a lane for every row"))
            .grid([1, 1, 1])
            .buffer("drafts", drafts)
            .buffer("rows", rows)
            .buffer("record", two([POSITION, 1, 33, 3, drafted], [POSITION - 1, 1, 2, 3, 0]))
            .buffer("given", vec![4u32; most as usize])
            .buffer("history_tokens", history)
            .scalar("history_len", history_len)
            .scalar("history_rows", history_rows)
            .expect("rows", rows_after, Bound::Exact)
            .expect("record", two([next, 1, picked(accepted), 3, 0], [next - 1, 1, accepted, 3, 0]), Bound::Exact)
            .expect("given", vec![0u32; most as usize], Bound::Exact)
            .expect("history_tokens", history_after, Bound::Exact)
    }
}
