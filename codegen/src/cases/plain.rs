//! Cases of the plain kernels: every operation alone, over strides, odd widths, several rows and rows left over.

use gemma4c_blocks::{DType, reference};
use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_plan::cuda::{KvType, Segment};

use super::cache;
use super::gather::{elements, table};
use super::geglu::gelu;
use super::heads::rotated;
use crate::kernels::heads::inverse_frequencies;
use crate::kernels::matvec::formats::types_with_kernels;
use crate::kernels::matvec::slots::{then_add, then_gelu, then_scale, then_scale_by, then_softcap, then_times};
use crate::kernels::plain::map::{then_times_part, then_times_weight};
use crate::kernels::plain::{experts, map, product, rope, rows};

pub fn cases() -> Vec<Case> {
    maps().into_iter().chain(moves()).chain(rotations()).chain(products()).chain(mixtures()).collect()
}

const CLOSE: Bound = Bound::Within { absolute: 2e-6, relative: 2e-6 };

// ---- element-wise ---------------------------------------------------------------------------------------------------

/// Every function of the chain alone, and the per-layer gate; widths beyond a block, rows with a stride.
pub fn maps() -> Vec<Case> {
    let one = |function: &'static DeviceDef| mapped(&[function], 40, 3, 40);
    let mut cases = vec![
        mapped(&[], 300, 2, 517),
        mapped(&[then_gelu::DEF, then_times_part::DEF], 96, 3, 96),
        mapped(&[then_times::DEF, then_scale_by::DEF], 520, 1, 520),
    ];
    cases.extend([then_add::DEF, then_scale::DEF, then_times_weight::DEF, then_softcap::DEF].map(one));
    cases
}

fn mapped(chain: &[&'static DeviceDef], width: usize, count: usize, stride: usize) -> Case {
    let mut random = Random::new((width * count) as u64);
    let x = random.floats(count * stride, -6.0, 6.0);
    let other = random.floats(count * width, -2.0, 2.0);
    let weight = random.floats(width, -2.0, 2.0);
    // The part lies 7 values into rows that are 11 wider.
    let part_stride = width + 11;
    let wide = random.floats(count * part_stride, -2.0, 2.0);
    let (scale, cap) = (0.37f32, 5.0f32);
    let expected: Vec<f32> = (0..count * width)
        .map(|at| {
            let (row, i) = (at / width, at % width);
            let start = f64::from(x[row * stride + i]);
            let value = chain.iter().fold(start, |value, function| match function.name {
                "then_gelu" => gelu(value as f32),
                "then_add" => value + f64::from(other[at]),
                "then_times" => value * f64::from(other[at]),
                "then_times_weight" => value * f64::from(weight[i]),
                "then_times_part" => value * f64::from(wide[row * part_stride + i]),
                "then_softcap" => f64::from(cap) * (value / f64::from(cap)).tanh(),
                _ => value * f64::from(scale),
            });
            value as f32
        })
        .collect();
    let names: Vec<&str> = chain.iter().map(|function| function.name).collect();
    let case = Case::new(
        format!("{count} rows of {width}, stride {stride}: {}", names.join(" ")),
        map::instance(chain).expect("256 threads are a block"),
    )
    .grid(map::grid(width as u32, count as u32))
    .buffer("x", x)
    .scalar("width", width as u32)
    .scalar("x_stride", stride as u32);
    let given = chain.iter().fold(case, |case, function| match function.name {
        "then_add" => case.buffer("chain_addend", other.clone()),
        "then_times" => case.buffer("chain_by", other.clone()),
        "then_times_weight" => case.buffer("chain_weight", weight.clone()).scalar("chain_width", width as u32),
        "then_times_part" => case
            .buffer("chain_part", wide.clone())
            .scalar("chain_width", width as u32)
            .scalar("chain_stride", part_stride as u32),
        "then_softcap" => case.scalar("chain_cap", cap),
        "then_scale" => case.scalar("chain_scale", scale),
        "then_scale_by" => case.buffer("chain_scale", vec![scale]),
        _ => case,
    });
    given.expect("out", expected, CLOSE)
}

// ---- rows -----------------------------------------------------------------------------------------------------------

/// The first and the last row of a chunk; caches of every type, across the ring's edge, with rows left over.
pub fn moves() -> Vec<Case> {
    vec![
        taken(300, 4, 3),
        taken(8, 1, 0),
        stored(KvType::F32, [1, 40], [3, 3], 6, 4),
        stored(KvType::F16, [2, 260], [3, 2], 1022, 1024),
        stored(KvType::BF16, [1, 8], [1, 1], 131_071, 5),
        stored(KvType::Q8_0, [3, 128], [3, 2], 1022, 1024),
        stored(KvType::Q8_0, [1, 512], [2, 2], 4, 5),
        stored(KvType::Fp8, [2, 64], [3, 3], 6, 4),
        stored_apart(KvType::F16, 8, 5),
        stored_apart(KvType::Q8_0, 64, 0),
    ]
}

fn taken(width: usize, count: usize, row: usize) -> Case {
    let x = Random::new(width as u64).floats(count * width, -1.0, 1.0);
    let expected = x[row * width..(row + 1) * width].to_vec();
    Case::new(format!("row {row} of {count} rows of {width}"), rows::take().expect("256 threads are a block"))
        .grid(rows::take_grid(width as u32))
        .buffer("x", x)
        .buffer("asked", vec![77u32, 1, row as u32])
        .scalar("width", width as u32)
        .expect("out", expected, Bound::Exact)
}

/// Two segments: one in the first slot, one in the second from row 64 on, each with two pages. `capacity` is 0: they go
/// to a stage.
fn stored_apart(kv: KvType, dim: usize, capacity: u32) -> Case {
    let segments = [Segment::alone(30, 3, 0), Segment { position: 2, rows: 2, first_row: 64, slot: 1 }];
    let count = 67;
    let mut random = Random::new(dim as u64);
    let [k, v] = [(); 2].map(|()| random.floats(count * dim, -3.0, 3.0));
    let (pages, rows) = if capacity == 0 { (1, count) } else { (4, capacity as usize) };
    let table = if capacity == 0 { vec![] } else { vec![1u32, 0, 3, 2] };
    let [mut k_cache, mut v_cache] = [(); 2].map(|()| random.floats(pages * rows * dim, -3.0, 3.0));
    let (k_before, v_before) = (cache::data(kv, dim, &k_cache), cache::data(kv, dim, &v_cache));
    for segment in segments {
        for at in 0..segment.rows {
            let row = (segment.first_row + at) as usize;
            let to = match capacity {
                0 => row,
                _ => {
                    let position = segment.position + at;
                    let page = table[(segment.slot * 2 + position / capacity % 2) as usize] as usize;
                    page * rows + (position % capacity) as usize
                }
            };
            k_cache[to * dim..][..dim].copy_from_slice(&k[row * dim..][..dim]);
            v_cache[to * dim..][..dim].copy_from_slice(&v[row * dim..][..dim]);
        }
    }
    let name = format!("two segments, {} rows a page, {}", rows, kv.name());
    Case::new(name, rows::store(kv).expect("256 threads are a block"))
        .grid(rows::store_grid(dim as u32, count as u32))
        .buffer("k", k)
        .buffer("v", v)
        .buffer("state", Segment::words(&segments, count as u32))
        .buffer("kv_pages", table)
        .buffer("kv_k", k_before)
        .buffer("kv_v", v_before)
        .scalar("width", dim as u32)
        .scalar("dim", dim as u32)
        .scalar("kv_capacity", capacity)
        .scalar("kv_window", u32::from(capacity != 0))
        .scalar("record_stride", 0u32)
        .scalar("kv_max_pages", if capacity == 0 { 0u32 } else { 2 })
        .scalar("kv_page_stride", if capacity == 0 { 0 } else { cache::elements(kv, dim, rows * dim) as u32 })
        .expect("kv_k", cache::data(kv, dim, &k_cache), Bound::Exact)
        .expect("kv_v", cache::data(kv, dim, &v_cache), Bound::Exact)
}

fn stored(kv: KvType, [heads, dim]: [usize; 2], [count, used]: [usize; 2], position: usize, capacity: usize) -> Case {
    let width = heads * dim;
    let mut random = Random::new((width + position) as u64);
    let [k, v] = [(); 2].map(|()| random.floats(count * width, -3.0, 3.0));
    let [mut k_cache, mut v_cache] = [(); 2].map(|()| random.floats(capacity * width, -3.0, 3.0));
    let (k_before, v_before) = (cache::data(kv, dim, &k_cache), cache::data(kv, dim, &v_cache));
    for row in 0..used {
        let (from, to) = (row * width, (position + row) % capacity * width);
        k_cache[to..to + width].copy_from_slice(&k[from..from + width]);
        v_cache[to..to + width].copy_from_slice(&v[from..from + width]);
    }
    let name = format!("{used} of {count} rows of {width} at {position} of {capacity}, {}", kv.name());
    Case::new(name, rows::store(kv).expect("256 threads are a block"))
        .grid(rows::store_grid(width as u32, count as u32))
        .buffer("k", k)
        .buffer("v", v)
        .buffer("state", vec![position as u32, used as u32, 0, 0])
        .buffer("kv_pages", vec![0u32])
        .buffer("kv_k", k_before)
        .buffer("kv_v", v_before)
        .scalar("width", width as u32)
        .scalar("dim", dim as u32)
        .scalar("kv_capacity", capacity as u32)
        .scalar("kv_window", 1u32)
        .scalar("record_stride", 0u32)
        .scalar("kv_max_pages", 1u32)
        .scalar("kv_page_stride", 0u32)
        .expect("kv_k", cache::data(kv, dim, &k_cache), Bound::Exact)
        .expect("kv_v", cache::data(kv, dim, &v_cache), Bound::Exact)
}

// ---- rotation -------------------------------------------------------------------------------------------------------

pub fn rotations() -> Vec<Case> {
    vec![
        rotation(3, 64, 0, &[Segment::alone(0, 2, 0)]),
        rotation(1, 512, 0, &[Segment::alone(262_143, 1, 0)]),
        rotation(5, 10, 0, &[Segment::alone(1000, 3, 0)]),
        rotation(1, 10, 2, &[Segment::alone(1000, 64, 0), Segment { position: 7, rows: 2, first_row: 64, slot: 1 }]),
    ]
}

/// Segments without a gap, and free rows behind the last.
fn rotation(heads: usize, dim: usize, free: usize, segments: &[Segment]) -> Case {
    let count = segments.iter().map(|segment| segment.rows as usize).sum::<usize>();
    let x = Random::new(dim as u64).floats((count + free) * heads * dim, -3.0, 3.0);
    let frequencies = inverse_frequencies(dim as u32, 1e4, None);
    let positions = segments.iter().flat_map(|segment| (segment.position..).take(segment.rows as usize));
    let positions: Vec<u32> = positions.flat_map(|position| vec![position; heads]).collect();
    let heads_of = x.chunks(dim).zip(&positions);
    let mut expected: Vec<f32> = heads_of.flat_map(|(head, at)| rotated(head, *at, &frequencies)).collect();
    let written = expected.len();
    expected.resize(x.len(), 0.0);
    let name = format!("{} rows of {heads} heads of {dim} at {}", count + free, segments[0].position);
    Case::new(name, rope::rotation().expect("256 threads are a block"))
        .grid(rope::grid(heads as u32, dim as u32, (count + free) as u32))
        .buffer("x", x)
        .buffer("inverse_frequencies", frequencies)
        .buffer("state", Segment::words(segments, (count + free) as u32))
        .scalar("record_stride", 0u32)
        .scalar("heads", heads as u32)
        .scalar("dim", dim as u32)
        .expect("out", expected, CLOSE)
        .except(written..(count + free) * heads * dim)
}

// ---- products -------------------------------------------------------------------------------------------------------

/// Blocks of a matrix of `rows` rows, as they lie in a file, and each value.
fn matrix(dtype: DType, rows: usize, k: usize) -> (Data, Vec<f32>) {
    let layout = dtype.layout();
    let bytes = table(dtype, rows * k, &mut Random::new((rows * k) as u64 + dtype as u64));
    let blocks = bytes.chunks_exact(layout.bytes);
    let values = blocks.flat_map(|block| (0..layout.len).map(|i| reference::value(layout, block, i))).collect();
    (elements(dtype, bytes), values)
}

/// The product of two rows, and the sum of its terms' sizes.
fn dot(a: &[f32], b: &[f32]) -> (f64, f64) {
    let terms = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
}

/// Each output within what an f32 sum of terms of that size may be off. The sizes differ much from row to row, because scales
/// are any half-precision numbers: so the bound is that of the largest.
fn within(sizes: &[f64]) -> Bound {
    let largest = sizes.iter().copied().fold(0.0, f64::max);
    Bound::Within { absolute: (largest * 2e-6) as f32, relative: 1e-6 }
}

/// Every type; outputs that are no whole blocks, widths that are no whole warps.
pub fn products() -> Vec<Case> {
    let mut cases: Vec<Case> = types_with_kernels().map(|dtype| multiplied(dtype, 11, 256, 1)).collect();
    cases.push(multiplied(DType::Q8_0, 9, 352, 3));
    cases.push(multiplied(DType::F32, 3, 7, 2));
    cases
}

fn multiplied(dtype: DType, outputs: usize, k: usize, count: usize) -> Case {
    let (tensor, values) = matrix(dtype, outputs, k);
    let x = Random::new(k as u64).floats(count * k, -2.0, 2.0);
    let (sums, sizes): (Vec<f64>, Vec<f64>) =
        x.chunks(k).flat_map(|x| values.chunks(k).map(move |row| dot(row, x))).unzip();
    let expected: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
    Case::new(
        format!("{dtype}, {outputs} x {k}, {count} rows"),
        product::instance(dtype).expect("256 threads are a block"),
    )
    .grid(product::grid(outputs as u32, count as u32))
    .buffer("value_tensor", tensor)
    .buffer("x", x)
    .scalar("k", k as u32)
    .scalar("outputs", outputs as u32)
    .expect("out", expected, within(&sizes))
}

// ---- experts --------------------------------------------------------------------------------------------------------

pub fn mixtures() -> Vec<Case> {
    vec![
        chosen(4, 2, 3),
        chosen(128, 8, 2),
        // A range of each expert's rows; then a row for each choice.
        expert(DType::Q4_0, 96, [7, 2, 5], 2, [3, 2], false),
        expert(DType::F16, 40, [6, 0, 6], 3, [2, 2], true),
        mixed(false, 40, 2, [3, 2]),
        mixed(true, 300, 8, [1, 1]),
    ]
}

fn chosen(count: usize, top: usize, rows: usize) -> Case {
    let mut random = Random::new((count * rows) as u64);
    // Few distinct values: ties everywhere, which the lower expert wins.
    let logits: Vec<f32> = (0..rows * count).map(|_| random.below(9) as f32 * 0.5 - 2.0).collect();
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks(count) {
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        let share = |expert: usize| f64::from(row[expert] - row[order[0]]).exp();
        let total: f64 = order[..top].iter().map(|&expert| share(expert)).sum();
        ids.extend(order[..top].iter().map(|&expert| expert as u32));
        weights.extend(order[..top].iter().map(|&expert| (share(expert) / total) as f32));
    }
    let instance = experts::choice(count as u32, top as u32).expect("a warp is a block");
    Case::new(format!("{top} of {count} experts, {rows} rows"), instance)
        .grid([rows as u32, 1, 1])
        .buffer("logits", logits)
        .expect("ids", ids, Bound::Exact)
        .expect("weights", weights, CLOSE)
}

/// Random choices among `count` experts, no expert twice in a row.
fn choices(random: &mut Random, rows: usize, top: usize, count: usize) -> Vec<u32> {
    let of_row = |_| {
        let start = random.below(count as u64) as usize;
        (0..top).map(move |j| ((start + j) % count) as u32)
    };
    (0..rows).flat_map(of_row).collect()
}

fn expert(
    dtype: DType,
    k: usize,
    [height, first, outputs]: [usize; 3],
    top: usize,
    [count, used]: [usize; 2],
    row_a_pair: bool,
) -> Case {
    let all = top + 2;
    let (tensor, values) = matrix(dtype, all * height, k);
    let mut random = Random::new(k as u64);
    let ids = choices(&mut random, count, top, all);
    let pairs_a_row = if row_a_pair { 1 } else { top };
    let x = random.floats(count * top / pairs_a_row * k, -2.0, 2.0);
    let product = |pair: usize, output: usize| {
        let row = ids[pair] as usize * height + first + output;
        dot(&values[row * k..(row + 1) * k], &x[pair / pairs_a_row * k..][..k])
    };
    let products = (0..count * top).flat_map(|pair| (0..outputs).map(move |output| (pair, output)));
    let (sums, sizes): (Vec<f64>, Vec<f64>) = products.map(|(pair, output)| product(pair, output)).unzip();
    let expected: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
    let case = Case::new(
        format!("{dtype}, rows {first}.. of {height} x {k}, {used} of {count} rows, {top} choices"),
        experts::product(dtype).expect("256 threads are a block"),
    )
    .grid(experts::product_grid(outputs as u32, top as u32, count as u32))
    .buffer("value_tensor", tensor)
    .buffer("x", x.clone())
    .buffer("ids", ids.clone())
    .buffer("state", vec![0, used as u32, 0])
    .scalar("matrix_k", k as u32)
    .scalar("matrix_height", height as u32)
    .scalar("matrix_first", first as u32)
    .scalar("matrix_outputs", outputs as u32)
    .scalar("top", top as u32)
    .scalar("pairs_a_row", pairs_a_row as u32)
    .expect("out", expected, within(&sizes));
    case.except(used * top * outputs..count * top * outputs)
}

fn mixed(scaled: bool, width: usize, top: usize, [count, used]: [usize; 2]) -> Case {
    let all = top + 1;
    let mut random = Random::new(width as u64);
    let ids = choices(&mut random, count, top, all);
    let weights = random.floats(count * top, 0.0, 1.0);
    let scale = random.floats(all, 0.5, 1.5);
    let x = random.floats(count * top * width, -2.0, 2.0);
    let sum = |at: usize| {
        let (row, i) = (at / width, at % width);
        let terms = (row * top..(row + 1) * top).map(|pair| {
            let scale = if scaled { scale[ids[pair] as usize] } else { 1.0 };
            f64::from(weights[pair]) * f64::from(scale) * f64::from(x[pair * width + i])
        });
        terms.sum::<f64>() as f32
    };
    let expected: Vec<f32> = (0..count * width).map(sum).collect();
    Case::new(
        format!("{top} choices of {width}, {used} of {count} rows, scaled: {scaled}"),
        experts::sum(scaled).expect("256 threads are a block"),
    )
    .grid(experts::sum_grid(width as u32, count as u32))
    .buffer("x", x.clone())
    .buffer("ids", ids.clone())
    .buffer("weights", weights.clone())
    .buffer("expert_scale", if scaled { scale.clone() } else { Vec::new() })
    .buffer("state", vec![0, used as u32, 0])
    .scalar("width", width as u32)
    .scalar("top", top as u32)
    .expect("out", expected, CLOSE)
    .except(used * width..count * width)
}
