//! Cases of rows that are sorted by expert: the sort, and the products of sorted rows, over repacked weights and over bf16 ones.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, ElementType, Float, U32x4};

use super::geglu::gelu;
use super::matvec::random_planes;
use super::wgmma::{Weights, bind_planes};
use crate::kernels::moe::group::Grouping;
use crate::kernels::planes::Repacked;
use crate::kernels::product::warpgroups::{Source, WgmmaProduct, WgmmaTile};
use crate::kernels::product::{Product, Tile};

/// Pairs sorted by expert, and the groups they are cut into; as many of either as there may be at most.
struct Sorted {
    order: Vec<u32>,
    groups: Vec<U32x4>,
    /// Of those, how many are in use, the first of the groups among them.
    used: [usize; 2],
}

impl Sorted {
    fn new(ids: &[u32], active: usize, grouping: Grouping) -> Self {
        let mut order: Vec<u32> = (0..active as u32).collect();
        order.sort_by_key(|pair| ids[*pair as usize]);
        let mut groups = vec![U32x4 { x: 0, y: 0, z: 0, w: 0 }];
        for expert in 0..grouping.experts {
            let first = order.iter().position(|pair| ids[*pair as usize] == expert).unwrap_or(0) as u32;
            let count = ids[..active].iter().filter(|id| **id == expert).count() as u32;
            for start in (0..count).step_by(grouping.height as usize) {
                let end = first + (start + grouping.height).min(count);
                groups.push(U32x4 { x: first + start, y: end, z: expert, w: 0 });
            }
        }
        groups[0].x = groups.len() as u32 - 1;
        let used = [order.len(), groups.len()];
        let nothing = U32x4 { x: 0, y: 0, z: 0, w: 0 };
        order.resize(ids.len(), 0);
        groups.resize(1 + grouping.most_groups() as usize, nothing);
        Self { order, groups, used }
    }
}

/// Choices of which the first experts get the most, and the last none.
fn choices(pairs: usize, experts: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..pairs).map(|_| (random.below(experts as u64) * random.below(experts as u64) / experts as u64) as u32).collect()
}

/// Few pairs and many, groups that are full and not, experts that nobody chose, rows past the end of a chunk.
pub fn sorts() -> Vec<Case> {
    // (experts, height of a group, choices of a row, rows in the buffers, rows in the chunk)
    let shapes =
        [(4, 16, 2, 1, 1), (8, 16, 2, 24, 24), (128, 16, 8, 32, 32), (128, 64, 8, 140, 133), (5, 64, 3, 900, 811)];
    let case = |(experts, height, top, rows, active): (u32, u32, usize, usize, usize)| {
        let grouping = Grouping { experts, height, pairs: (rows * top) as u32 };
        let ids = choices(rows * top, experts, rows as u64);
        let Sorted { order, groups, used } = Sorted::new(&ids, active * top, grouping);
        let name = format!("{active} of {rows} rows to {top} of {experts} experts, groups of {height}");
        let (order_end, groups_end) = (order.len(), groups.len());
        Case::new(name, grouping.instance().expect("any sort fits"))
            .grid([experts, 1, 1])
            .buffer("ids", ids)
            .buffer("state", vec![0, active as u32, 0])
            .scalar("top", top as u32)
            .expect("order", order, Bound::Exact)
            .except(used[0]..order_end)
            .expect("groups", groups, Bound::Exact)
            .except(used[1]..groups_end)
    };
    shapes.into_iter().map(case).collect()
}

/// Rows that go to experts, and the experts.
struct Problem {
    weights: Vec<BF16>,
    x: Vec<BF16>,
    ids: Vec<u32>,
    /// Rows of an expert.
    height: usize,
    k: usize,
    /// Pairs that share a row of x.
    share: usize,
    /// Pairs in the buffers, and in the chunk.
    pairs: [usize; 2],
    experts: u32,
}

impl Problem {
    fn new(weights: Vec<BF16>, height: usize, k: usize, share: usize, pairs: [usize; 2]) -> Self {
        let experts = (weights.len() / height / k) as u32;
        let mut random = Random::new(k as u64);
        let x = random.floats(pairs[0].div_ceil(share) * k, -2.0, 2.0).into_iter().map(BF16::from_f32).collect();
        // The first pairs are the same, however many follow.
        Self { weights, x, ids: choices(pairs[0], experts, 7), height, k, share, pairs, experts }
    }

    /// A pair's product with a row of its expert.
    fn dot(&self, pair: usize, row: usize) -> (f64, f64) {
        let x = &self.x[pair / self.share * self.k..][..self.k];
        let w = &self.weights[(self.ids[pair] as usize * self.height + row) * self.k..][..self.k];
        let terms = x.iter().zip(w).map(|(x, w)| f64::from(x.to_f32()) * f64::from(w.to_f32()));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }

    /// What both kernels are given and must make. `active` is what a chunk's rows are, in pairs.
    fn finish(&self, case: Case, height: u32, columns: u32, geglu: bool, out: ElementType) -> Case {
        let outputs = if geglu { self.height / 2 } else { self.height };
        let grouping = Grouping { experts: self.experts, height, pairs: self.pairs[0] as u32 };
        let Sorted { order, groups, .. } = Sorted::new(&self.ids, self.pairs[1], grouping);
        let (mut expected, mut size) = (vec![0.0f32; self.pairs[0] * outputs], 1e-3f64);
        for (at, value) in expected[..self.pairs[1] * outputs].iter_mut().enumerate() {
            let (pair, output) = (at / outputs, at % outputs);
            let (sum, absolute) = self.dot(pair, output);
            size = size.max(absolute);
            let by = if geglu { self.dot(pair, outputs + output).0 } else { 1.0 };
            *value = (if geglu { gelu(sum as f32) * by } else { sum }) as f32;
        }
        let absolute = (size * if geglu { 2e-5 } else { 2e-6 }) as f32;
        let (expected, relative) = match out {
            ElementType::BF16 => {
                (Data::from(expected.into_iter().map(BF16::from_f32).collect::<Vec<_>>()), 1.0 / 128.0)
            }
            _ => (Data::from(expected), 1e-5),
        };
        let has = |name: &str| case.instance.params().iter().any(|param| param.name == name);
        let case = if has("x_part") { case.scalar("x_part", 0u32).scalar("part_columns", 0u32) } else { case };
        case.grid([grouping.most_groups(), (outputs as u32).div_ceil(columns), 1])
            .buffer("x", self.x.clone())
            .buffer("order", order)
            .buffer("groups", groups)
            .buffer("state", vec![0u32, 1, 0])
            .scalar("outputs", outputs as u32)
            .scalar("k", self.k as u32)
            .expect("out", expected, Bound::Within { absolute, relative })
            .except(self.pairs[1] * outputs..self.pairs[0] * outputs)
    }
}

/// Over repacked weights of `experts` experts.
fn over_planes(dtype: DType, tile: Tile, [experts, outputs, k]: [usize; 3], share: usize, pairs: [usize; 2]) -> Case {
    let planes = random_planes(dtype, experts * outputs, k, (outputs * k) as u64);
    let matrix = Repacked { dtype, rows: experts * outputs, k, planes };
    let weights = matrix.dequantise().iter().map(|w| BF16::from_f32(*w)).collect();
    let product = Product { dtype, k: k as u32, out: ElementType::F32, pairs: share as u32, epilogue: Vec::new() };
    let name = format!(
        "by expert, {} x {}, {} of {} pairs, {dtype}, {experts} experts of {outputs} x {k}, {share} pairs a row",
        tile.rows, tile.columns, pairs[1], pairs[0]
    );
    let case = bind_planes(Case::new(name, product.instance(tile).expect("a shape that fits the kernel")), &matrix);
    Problem::new(weights, outputs, k, share, pairs).finish(case, tile.rows, tile.columns, false, product.out)
}

/// By warpgroups, over bf16 weights or over planes.
fn by_warpgroups(
    wgmma: WgmmaProduct,
    tile: WgmmaTile,
    [experts, outputs, k]: [usize; 3],
    pairs: [usize; 2],
    blocks: u32,
) -> Case {
    let height = wgmma.matrix_rows(outputs as u32) as usize;
    let name = format!(
        "wgmma by expert{}, {} x {}, {} of {} pairs, {experts} experts of {outputs} x {k} to {}{}, {} pairs a row",
        if wgmma.source == Source::Copy { "" } else { " over planes" },
        tile.rows,
        tile.columns,
        pairs[1],
        pairs[0],
        if wgmma.geglu { "gated " } else { "" },
        wgmma.out.name(),
        wgmma.pairs
    );
    let weights = Weights::random(wgmma.source, experts * height, k, k as u64);
    let case = weights.bind(Case::new(name, wgmma.instance(tile).expect("a tile that fits the kernel")));
    Problem::new(weights.values(), height, k, wgmma.pairs as usize, pairs)
        .finish(case, tile.rows, tile.columns, wgmma.geglu, wgmma.out)
        .grid([blocks, 1, 1])
}

/// Groups that are full and not, rows that pairs share and rows of their own, in both products.
pub fn products() -> Vec<Case> {
    let wgmma = |out, geglu, pairs| WgmmaProduct { geglu, pairs, ..WgmmaProduct::plain(out, Source::Copy) };
    let over = |dtype, wgmma| WgmmaProduct { source: Source::Planes(dtype), ..wgmma };
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let tile = |rows, columns| WgmmaTile { rows, columns, team: 0, bulk: false };
    let team = WgmmaTile { rows: 64, columns: 64, team: 5, bulk: false };
    let fed = |rows, columns, team| WgmmaTile { rows, columns, team, bulk: false };
    vec![
        over_planes(DType::Q4_0, Tile::SMALL, [4, 24, 96], 2, [6, 4]),
        over_planes(DType::Q8_0, Tile::SMALL, [3, 70, 64], 1, [50, 49]),
        over_planes(DType::Q6K, Tile::GROUPED, [3, 130, 256], 3, [200, 180]),
        by_warpgroups(wgmma(f32, false, 1), tile(64, 64), [3, 68, 64], [70, 67], 3),
        by_warpgroups(wgmma(f32, false, 1), tile(128, 128), [2, 132, 128], [300, 290], 2),
        by_warpgroups(wgmma(bf16, true, 2), tile(64, 128), [3, 72, 128], [100, 98], 2),
        by_warpgroups(wgmma(bf16, true, 8), tile(128, 256), [2, 132, 64], [160, 160], 1),
        by_warpgroups(over(DType::Q4_0, wgmma(f32, false, 1)), tile(64, 64), [3, 68, 64], [70, 67], 3),
        by_warpgroups(over(DType::Q4_0, wgmma(f32, false, 1)), team, [3, 68, 64], [70, 67], 3),
        by_warpgroups(over(DType::Q8_0, wgmma(bf16, true, 8)), tile(128, 256), [2, 132, 64], [160, 160], 1),
        // A ring that is fed: fewer steps than decoders and more than stages, a warpgroup without rows, several tiles a block.
        by_warpgroups(over(DType::Q4_0, wgmma(f32, false, 1)), fed(64, 128, 4), [3, 132, 64], [70, 67], 3),
        by_warpgroups(over(DType::Q8_0, wgmma(f32, false, 1)), fed(64, 128, 4), [2, 20, 704], [90, 90], 1),
        by_warpgroups(over(DType::Q4_0, wgmma(bf16, true, 8)), fed(192, 128, 2), [3, 100, 448], [300, 296], 2),
        by_warpgroups(over(DType::Q6K, wgmma(f32, false, 1)), fed(192, 128, 2), [2, 196, 256], [450, 440], 1),
    ]
}

/// The first pair of each is the same product: alone, and with neighbours in its group and in others.
pub fn first_pairs() -> Vec<Case> {
    let planes = |pairs, tile| over_planes(DType::Q4_0, tile, [3, 19, 96], 1, [pairs, pairs]);
    vec![planes(1, Tile::SMALL), planes(90, Tile::SMALL), planes(90, Tile::GROUPED)]
}

/// The same, by warpgroups.
pub fn first_pairs_of_warpgroups() -> Vec<Case> {
    let wgmma = WgmmaProduct { pairs: 1, ..WgmmaProduct::plain(ElementType::F32, Source::Copy) };
    let of = |pairs, rows| {
        by_warpgroups(
            wgmma.clone(),
            WgmmaTile { rows, columns: 128, team: 0, bulk: false },
            [3, 20, 128],
            [pairs, pairs],
            2,
        )
    };
    vec![of(1, 64), of(90, 64), of(200, 128)]
}
