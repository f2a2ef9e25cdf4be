//! Cases of the drafter's kernels: rows that are not the first, ties, scores that are no numbers, groups in any order, and slices left over.

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
        chosen(5000, None, 0, |scores| scores),
        chosen(100, None, 6, |scores| scores),
        chosen(4096, Some((128, 64)), 2, |scores| scores),
        chosen(96, Some((16, 48)), 3, |scores| scores.iter().map(|score| score.round()).collect()),
        chosen(70, None, 1, nobody),
        // Beyond the rows that can be verified nothing is left but in the drafter's own record.
        chosen(70, None, 7, |scores| scores),
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
        .buffer("ids", ids.to_vec())
        .buffer("order", order)
        .buffer("value_tensor", elements(dtype, bytes.clone()))
        .scalar("k", k as u32)
        .scalar("each", each as u32)
        .scalar("count", count as u32)
        .expect("out", expected, Bound::Within { absolute: (largest * 2e-6) as f32, relative: 0.0 })
}

/// `groups` is the tokens of each, and their number: scores are of some of them.
fn chosen(count: usize, groups: Option<(usize, usize)>, drafted: u32, scores: fn(Vec<f32>) -> Vec<f32>) -> Case {
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
        rows_after[(drafted as usize + 1) * 16 + 2] = picked;
        drafts_after[drafted as usize] = picked;
    }
    let named = if groups.is_some() { "some groups" } else { "all tokens" };
    let instance = draft::choice(groups.is_some()).expect("256 threads are a block");
    Case::new(format!("the largest of {count}, {named}, after {drafted}"), instance)
        .grid([slices as u32, 1, 1])
        .buffer("scores", scores.clone())
        .buffer("ids", ids.clone())
        .buffer("order", order.clone())
        .buffer("largest", vec![7u64; slices])
        .buffer("counters", vec![0u32])
        .buffer("record", record)
        .buffer("rows", rows)
        .buffer("drafts", vec![1000u32; most as usize])
        .scalar("count", count as u32)
        .scalar("each", each as u32)
        .scalar("most", most)
        .expect("largest", largest, Bound::Exact)
        .expect("counters", vec![0u32], Bound::Exact)
        .expect("record", after, Bound::Exact)
        .expect("rows", rows_after, Bound::Exact)
        .expect("drafts", drafts_after, Bound::Exact)
}
