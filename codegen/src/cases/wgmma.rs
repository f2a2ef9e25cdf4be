//! Cases of the product by warpgroups, over bf16 weights and over planes: every tile, full and not, plain and gated; and of the widening of weights for it.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, ElementType, Float, U32x4};

use super::geglu::gelu;
use super::matvec::random_planes;
use crate::kernels::matvec::formats::types_with_kernels;
use crate::kernels::matvec::slots::then_add;
use crate::kernels::planes::Repacked;
use crate::kernels::product::warpgroups::{Source, WgmmaProduct, WgmmaTile};
use crate::kernels::product::widen;

pub fn cases() -> Vec<Case> {
    tiles()
        .into_iter()
        .chain(gated())
        .chain(by_bulk_copies())
        .chain(decoding())
        .chain(by_teams())
        .chain(widening())
        .collect()
}

/// A product of random operands and what must come out.
struct Problem {
    wgmma: WgmmaProduct,
    weights: Weights,
    x: Vec<BF16>,
    addend: Vec<f32>,
    outputs: usize,
    k: usize,
    /// In the buffers, and in the chunk.
    rows: [usize; 2],
    expected: Data,
    bound: Bound,
}

/// Weights as a kernel takes them.
pub enum Weights {
    Rounded(Vec<BF16>),
    Planes(Repacked),
}

impl Weights {
    pub fn random(source: Source, rows: usize, k: usize, seed: u64) -> Self {
        match source {
            Source::Copy => Weights::Rounded(random_bf16(&mut Random::new(seed), rows * k, 0.5)),
            Source::Planes(dtype) => {
                Weights::Planes(Repacked { dtype, rows, k, planes: random_planes(dtype, rows, k, seed) })
            }
        }
    }

    pub fn values(&self) -> Vec<BF16> {
        match self {
            Weights::Rounded(values) => values.clone(),
            Weights::Planes(matrix) => matrix.dequantise().iter().map(|weight| BF16::from_f32(*weight)).collect(),
        }
    }

    pub fn bind(&self, case: Case) -> Case {
        match self {
            Weights::Rounded(values) => case.buffer("weights", values.clone()),
            Weights::Planes(matrix) => bind_planes(case, matrix),
        }
    }
}

/// A case with the planes of a matrix, as slots and kernels call them.
pub fn bind_planes(mut case: Case, matrix: &Repacked) -> Case {
    for (plane, bytes) in &matrix.planes {
        let param = if plane.name == "codes" { "codes".to_owned() } else { format!("side_{}", plane.name) };
        case = case.buffer(&param, Data::new(plane.element(), bytes.clone()));
    }
    case
}

fn random_bf16(random: &mut Random, count: usize, size: f32) -> Vec<BF16> {
    random.floats(count, -size, size).into_iter().map(BF16::from_f32).collect()
}

impl Problem {
    fn new(wgmma: WgmmaProduct, outputs: usize, k: usize, rows: [usize; 2]) -> Self {
        let matrix_rows = wgmma.matrix_rows(outputs as u32) as usize;
        let weights = Weights::random(wgmma.source, matrix_rows, k, (outputs * k) as u64);
        // The first rows are the same, however many follow.
        let mut random = Random::new(k as u64);
        let parts = match wgmma.part_columns as usize {
            0 => 1,
            columns => outputs / columns,
        };
        let x = random_bf16(&mut random, parts * rows[0] * k, 2.0);
        let addend = random.floats(rows[0] * outputs, -9.0, 9.0);
        let numbers = |values: &[BF16]| values.iter().map(|value| f64::from(value.to_f32())).collect::<Vec<f64>>();
        let (weight_numbers, x_numbers) = (numbers(&weights.values()), numbers(&x));
        let dot = |row: usize, column: usize| -> f64 {
            let part = if parts == 1 { 0 } else { column / (outputs / parts) };
            let (x, w) = (&x_numbers[(part * rows[0] + row) * k..][..k], &weight_numbers[column * k..][..k]);
            x.iter().zip(w).map(|(x, w)| x * w).sum()
        };
        let mut expected = vec![0.0f32; rows[0] * outputs];
        for (at, value) in expected[..rows[1] * outputs].iter_mut().enumerate() {
            let (row, column) = (at / outputs, at % outputs);
            let sum = dot(row, column);
            let sum = if wgmma.geglu { gelu(sum as f32) * dot(row, outputs + column) } else { sum };
            *value = (sum + if wgmma.epilogue.is_empty() { 0.0 } else { f64::from(addend[at]) }) as f32;
        }
        // f32 sums of k terms of at most so much; gated, two of those are multiplied.
        let largest = |of: &[f64]| of.iter().fold(0.0f64, |most, value| most.max(value.abs())) as f32;
        let term = largest(&weight_numbers) * largest(&x_numbers);
        let absolute = k as f32 * 2e-6 * if wgmma.geglu { 20.0 * term * term } else { term };
        let (expected, relative) = match wgmma.out {
            ElementType::BF16 => {
                (Data::from(expected.into_iter().map(BF16::from_f32).collect::<Vec<_>>()), 1.0 / 128.0)
            }
            _ => (Data::from(expected), 1e-5),
        };
        let bound = Bound::Within { absolute, relative };
        Self { wgmma, weights, x, addend, outputs, k, rows, expected, bound }
    }

    fn case(&self, tile: WgmmaTile) -> Case {
        let WgmmaProduct { out, geglu, epilogue, source, .. } = &self.wgmma;
        let of = match source {
            Source::Copy => String::new(),
            Source::Planes(dtype) => format!("{dtype} of "),
        };
        let parts = if self.wgmma.part_columns > 0 { ", x in parts" } else { "" };
        let name = format!(
            "wgmma {} x {}{}, {} of {} rows, {of}{} x {} to {}{}, {} epilogues{parts}",
            tile.rows,
            tile.columns,
            match (tile.team, tile.bulk) {
                (0, false) => String::new(),
                (0, true) => " in bulk".to_owned(),
                (team, _) => format!(" by {team}"),
            },
            self.rows[1],
            self.rows[0],
            self.outputs,
            self.k,
            if *geglu { "gated " } else { "" },
            out.name(),
            epilogue.len(),
        );
        let mut case = Case::new(name, self.wgmma.instance(tile).expect("a tile that fits the kernel"));
        if !epilogue.is_empty() {
            case = case.buffer("epilogue_addend", self.addend.clone());
        }
        if *source == Source::Copy && !tile.bulk {
            case =
                case.scalar("x_part", (self.rows[0] * self.k) as u32).scalar("part_columns", self.wgmma.part_columns);
        }
        if !tile.bulk {
            case = case.buffer("groups", Vec::<U32x4>::new()).buffer("order", Vec::<u32>::new());
        }
        self.weights
            .bind(case)
            .grid(self.wgmma.grid(tile, self.rows[0] as u32, self.outputs as u32, 132))
            .buffer("x", self.x.clone())
            .buffer("state", vec![0, self.rows[1] as u32, 0])
            .scalar("outputs", self.outputs as u32)
            .scalar("k", self.k as u32)
            .expect("out", self.expected.clone(), self.bound)
            .except(self.rows[1] * self.outputs..self.rows[0] * self.outputs)
    }
}

fn plain(out: ElementType) -> WgmmaProduct {
    WgmmaProduct::plain(out, Source::Copy)
}

const fn tile(rows: u32, columns: u32) -> WgmmaTile {
    WgmmaTile { rows, columns, team: 0, bulk: false }
}

const fn by_team(rows: u32, team: u32) -> WgmmaTile {
    WgmmaTile { rows, columns: 64, team, bulk: false }
}

const fn in_bulk(columns: u32) -> WgmmaTile {
    WgmmaTile { rows: 128, columns, team: 0, bulk: true }
}

/// Every tile, full and not; fewer steps than the ring holds, and more; rows past the end of a chunk.
pub fn tiles() -> Vec<Case> {
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let with_add = WgmmaProduct { epilogue: vec![then_add::DEF], ..plain(f32) };
    let split = |part_columns| WgmmaProduct { part_columns, ..plain(f32) };
    let ragged = |out| WgmmaProduct { ragged: true, ..plain(out) };
    vec![
        Problem::new(plain(f32), 4, 64, [1, 1]).case(tile(64, 32)),
        Problem::new(plain(bf16), 68, 320, [9, 8]).case(tile(64, 32)),
        Problem::new(plain(f32), 68, 64, [66, 66]).case(tile(64, 64)),
        Problem::new(plain(f32), 132, 704, [3, 2]).case(tile(64, 128)),
        Problem::new(plain(bf16), 300, 128, [64, 64]).case(tile(64, 256)),
        Problem::new(plain(f32), 100, 192, [70, 67]).case(tile(128, 96)),
        Problem::new(plain(f32), 72, 64, [130, 129]).case(tile(128, 128)),
        Problem::new(plain(bf16), 164, 128, [5, 5]).case(tile(128, 160)),
        Problem::new(plain(f32), 260, 192, [130, 130]).case(tile(128, 256)),
        Problem::new(plain(f32), 32, 640, [128, 128]).case(tile(128, 256)),
        Problem::new(with_add, 20, 64, [7, 5]).case(tile(64, 128)),
        // x in two and three parts; rows that end within a step, after one piece and after seven.
        Problem::new(split(128), 256, 128, [70, 67]).case(tile(64, 128)),
        Problem::new(split(64), 192, 192, [130, 130]).case(tile(64, 64)).grid([4, 1, 1]),
        Problem::new(ragged(f32), 68, 72, [66, 66]).case(tile(64, 64)),
        Problem::new(ragged(bf16), 132, 440, [130, 129]).case(tile(128, 128)).grid([2, 1, 1]),
        // Several tiles a block: of fewer steps than the copies are ahead, of more, and more rows of tiles than go together.
        Problem::new(plain(f32), 264, 64, [70, 70]).case(tile(64, 128)).grid([2, 1, 1]),
        Problem::new(plain(f32), 260, 576, [70, 70]).case(tile(64, 128)).grid([4, 1, 1]),
        Problem::new(plain(bf16), 260, 128, [130, 130]).case(tile(128, 256)).grid([1, 1, 1]),
        Problem::new(plain(bf16), 132, 64, [1090, 1089]).case(tile(64, 128)).grid([5, 1, 1]),
    ]
}

/// `gelu(gate) * value`, where gates and values do not fill their halves of a tile.
pub fn gated() -> Vec<Case> {
    let gated = |out| WgmmaProduct { geglu: true, ..plain(out) };
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    vec![
        Problem::new(gated(f32), 72, 64, [2, 2]).case(tile(64, 128)),
        Problem::new(gated(bf16), 40, 64, [3, 3]).case(tile(64, 32)),
        Problem::new(gated(bf16), 132, 128, [70, 66]).case(tile(128, 256)),
        Problem::new(gated(bf16), 48, 192, [65, 65]).case(tile(128, 96)),
    ]
}

/// By bulk copies: every width, full and not, plain and gated; rows that end within a step, and a tile without rows of its lower warpgroup; fewer steps than the ring holds, and more; several tiles a block.
pub fn by_bulk_copies() -> Vec<Case> {
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let with_add = WgmmaProduct { epilogue: vec![then_add::DEF], ..plain(f32) };
    let ragged = |out| WgmmaProduct { ragged: true, ..plain(out) };
    let gated = |out| WgmmaProduct { geglu: true, ..plain(out) };
    vec![
        Problem::new(plain(f32), 4, 64, [1, 1]).case(in_bulk(192)),
        Problem::new(plain(bf16), 68, 320, [130, 129]).case(in_bulk(192)),
        Problem::new(plain(f32), 196, 448, [70, 67]).case(in_bulk(192)),
        Problem::new(plain(bf16), 260, 192, [256, 256]).case(in_bulk(256)),
        Problem::new(plain(f32), 132, 576, [3, 2]).case(in_bulk(256)),
        Problem::new(with_add, 20, 64, [7, 5]).case(in_bulk(192)),
        Problem::new(ragged(f32), 68, 72, [66, 66]).case(in_bulk(192)),
        Problem::new(ragged(bf16), 132, 440, [140, 139]).case(in_bulk(256)),
        Problem::new(gated(f32), 72, 64, [2, 2]).case(in_bulk(256)),
        Problem::new(gated(bf16), 132, 128, [140, 136]).case(in_bulk(256)),
        Problem::new(gated(bf16), 100, 320, [5, 5]).case(in_bulk(192)),
        Problem::new(plain(f32), 264, 576, [300, 300]).case(in_bulk(192)).grid([2, 1, 1]),
        Problem::new(plain(bf16), 260, 64, [260, 260]).case(in_bulk(256)).grid([1, 1, 1]),
    ]
}

/// Over planes: every type that is decoded on the way; every tile that takes them, full and not, plain and gated; several tiles a block.
pub fn decoding() -> Vec<Case> {
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let of = |dtype, out| WgmmaProduct { source: Source::Planes(dtype), ..plain(out) };
    let decoded = |dtype: &DType| Source::without_copy(*dtype) == Some(Source::Planes(*dtype));
    let types = types_with_kernels().filter(decoded);
    let mut cases: Vec<Case> =
        types.map(|dtype| Problem::new(of(dtype, f32), 68, 256, [5, 4]).case(tile(32, 64))).collect();
    let gated = |dtype| WgmmaProduct { geglu: true, ..of(dtype, bf16) };
    let with_add = WgmmaProduct { epilogue: vec![then_add::DEF], ..of(DType::Q8_0, f32) };
    cases.extend([
        // An odd number of steps, and a single one.
        Problem::new(of(DType::Q8_0, f32), 132, 320, [3, 2]).case(tile(32, 128)),
        Problem::new(of(DType::Q4_0, bf16), 68, 64, [64, 64]).case(tile(64, 64)),
        Problem::new(of(DType::Q4_0, f32), 72, 128, [130, 129]).case(tile(128, 64)),
        Problem::new(of(DType::Q4_0, f32), 132, 64, [70, 70]).case(tile(64, 128)),
        Problem::new(of(DType::Q8_0, f32), 68, 192, [130, 130]).case(tile(160, 128)),
        Problem::new(of(DType::Q5K, f32), 12, 256, [7, 7]).case(tile(192, 128)),
        Problem::new(of(DType::Q8_0, bf16), 132, 128, [270, 268]).case(tile(256, 128)),
        Problem::new(with_add, 20, 64, [7, 5]).case(tile(32, 128)),
        // Several tiles a block.
        Problem::new(of(DType::Q4_0, f32), 132, 576, [70, 70]).case(tile(32, 64)).grid([2, 1, 1]),
        Problem::new(of(DType::Q8_0, bf16), 260, 192, [130, 130]).case(tile(128, 128)).grid([1, 1, 1]),
        Problem::new(gated(DType::Q4_0), 72, 64, [3, 3]).case(tile(32, 64)),
        Problem::new(gated(DType::I4), 132, 128, [70, 66]).case(tile(64, 128)),
        Problem::new(gated(DType::Q8_0), 132, 128, [70, 66]).case(tile(64, 128)),
    ]);
    cases
}

/// Over planes by a team: every type; every tile, full and not, plain and gated; fewer steps than decoders, and several tiles a block.
pub fn by_teams() -> Vec<Case> {
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let of = |dtype, out| WgmmaProduct { source: Source::Planes(dtype), ..plain(out) };
    let decoded = |dtype: &DType| Source::without_copy(*dtype) == Some(Source::Planes(*dtype));
    let types = types_with_kernels().filter(decoded);
    let mut cases: Vec<Case> =
        types.map(|dtype| Problem::new(of(dtype, f32), 68, 256, [5, 4]).case(by_team(64, 5))).collect();
    let gated = |dtype| WgmmaProduct { geglu: true, ..of(dtype, bf16) };
    let with_add = WgmmaProduct { epilogue: vec![then_add::DEF], ..of(DType::Q8_0, f32) };
    cases.extend([
        Problem::new(of(DType::Q4_0, bf16), 68, 64, [64, 64]).case(by_team(64, 5)),
        Problem::new(of(DType::Q4_0, f32), 72, 960, [130, 129]).case(by_team(128, 4)),
        Problem::new(of(DType::Q8_0, bf16), 68, 192, [270, 268]).case(by_team(256, 2)),
        Problem::new(with_add, 20, 64, [7, 5]).case(by_team(64, 5)),
        Problem::new(of(DType::Q4_0, f32), 132, 576, [70, 70]).case(by_team(64, 5)).grid([2, 1, 1]),
        Problem::new(of(DType::Q8_0, bf16), 260, 64, [130, 130]).case(by_team(128, 4)).grid([1, 1, 1]),
        Problem::new(gated(DType::Q4_0), 72, 64, [3, 3]).case(by_team(64, 5)),
        Problem::new(gated(DType::Q8_0), 132, 128, [70, 66]).case(by_team(128, 4)),
    ]);
    cases
}

/// A product over planes, by warpgroups that decode for themselves, by a team and from a ring that is fed, and the same over a copy of them, copied by threads and in bulk: all must have the
/// same bits.
pub fn with_and_without_copy(dtype: DType) -> [Case; 5] {
    let over_planes = WgmmaProduct { source: Source::Planes(dtype), ..plain(ElementType::F32) };
    let planes = Problem::new(over_planes.clone(), 20, 512, [3, 3]);
    let wgmma = WgmmaProduct { source: Source::Copy, ..over_planes };
    let weights = Weights::Rounded(planes.weights.values());
    let fed = WgmmaTile { rows: 64, columns: 128, team: 4, bulk: false };
    let [own, team, fed] = [tile(128, 128), by_team(64, 5), fed].map(|tile| planes.case(tile));
    let copy = Problem { wgmma, weights, ..planes };
    [own, team, fed, copy.case(tile(64, 32)), copy.case(in_bulk(192))]
}

/// Every type to bf16, on a grid that goes round.
pub fn widening() -> Vec<Case> {
    let of = |dtype: DType| {
        let (rows, k) = (11, 768);
        let planes = random_planes(dtype, rows, k, dtype as u64);
        let matrix = Repacked { dtype, rows, k, planes };
        let expected: Vec<BF16> = matrix.dequantise().into_iter().map(BF16::from_f32).collect();
        let instance = widen::instance(dtype).expect("every type has one");
        let case = bind_planes(Case::new(format!("{rows} rows of {k} {dtype} to bf16"), instance), &matrix);
        let units = widen::units(dtype, rows as u64, k as u64).expect("few");
        case.scalar("units", units).expect("out", expected, Bound::Exact)
    };
    types_with_kernels().map(of).collect()
}

/// The first row of each is the same product: alone, and with neighbours in every tile.
pub fn first_rows() -> Vec<Case> {
    let of = |(rows, tile)| Problem::new(plain(ElementType::F32), 20, 448, [rows, rows]).case(tile);
    [1, 2, 3, 70, 9, 5, 66, 4, 2, 130, 1, 3, 5, 9]
        .into_iter()
        .zip(Source::Copy.tiles().iter().copied())
        .map(of)
        .collect()
}
