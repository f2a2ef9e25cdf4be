//! Cases of the product by warpgroups: every tile, full and not, plain and gated; and of the widening of weights for it.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, ElementType, Float, U32x4};

use super::geglu::gelu;
use super::matvec::random_planes;
use crate::kernels::matvec::slots::then_add;
use crate::kernels::planes::Repacked;
use crate::kernels::product::wgmma::{WgmmaProduct, WgmmaTile};
use crate::kernels::product::widen;

pub fn cases() -> Vec<Case> {
    tiles().into_iter().chain(gated()).chain(widening()).collect()
}

/// A product of random operands and what must come out.
struct Problem {
    wgmma: WgmmaProduct,
    weights: Vec<BF16>,
    x: Vec<BF16>,
    addend: Vec<f32>,
    outputs: usize,
    k: usize,
    /// In the buffers, and in the chunk.
    rows: [usize; 2],
    expected: Data,
    bound: Bound,
}

fn random_bf16(random: &mut Random, count: usize, size: f32) -> Vec<BF16> {
    random.floats(count, -size, size).into_iter().map(BF16::from_f32).collect()
}

impl Problem {
    fn new(wgmma: WgmmaProduct, outputs: usize, k: usize, rows: [usize; 2]) -> Self {
        let matrix_rows = wgmma.matrix_rows(outputs as u32) as usize;
        let weights = random_bf16(&mut Random::new((outputs * k) as u64), matrix_rows * k, 0.5);
        // The first rows are the same, however many follow.
        let mut random = Random::new(k as u64);
        let x = random_bf16(&mut random, rows[0] * k, 2.0);
        let addend = random.floats(rows[0] * outputs, -9.0, 9.0);
        let numbers = |values: &[BF16]| values.iter().map(|value| f64::from(value.to_f32())).collect::<Vec<f64>>();
        let (weight_numbers, x_numbers) = (numbers(&weights), numbers(&x));
        let dot = |row: usize, column: usize| -> f64 {
            let (x, w) = (&x_numbers[row * k..][..k], &weight_numbers[column * k..][..k]);
            x.iter().zip(w).map(|(x, w)| x * w).sum()
        };
        let mut expected = vec![0.0f32; rows[0] * outputs];
        for (at, value) in expected[..rows[1] * outputs].iter_mut().enumerate() {
            let (row, column) = (at / outputs, at % outputs);
            let sum = dot(row, column);
            let sum = if wgmma.geglu { gelu(sum as f32) * dot(row, outputs + column) } else { sum };
            *value = (sum + if wgmma.epilogue.is_empty() { 0.0 } else { f64::from(addend[at]) }) as f32;
        }
        // f32 sums of k terms of at most 1; gated, two of those are multiplied.
        let absolute = k as f32 * 2e-6 * if wgmma.geglu { 20.0 } else { 1.0 };
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
        let WgmmaProduct { out, geglu, epilogue, .. } = &self.wgmma;
        let name = format!(
            "wgmma {} x {}, {} of {} rows, {} x {} to {}{}, {} epilogues",
            tile.rows(),
            tile.columns,
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
        case.grid(self.wgmma.grid(tile, self.rows[0] as u32, self.outputs as u32, 132))
            .buffer("weights", self.weights.clone())
            .buffer("x", self.x.clone())
            .buffer("groups", Vec::<U32x4>::new())
            .buffer("order", Vec::<u32>::new())
            .buffer("state", vec![0, self.rows[1] as u32, 0])
            .scalar("outputs", self.outputs as u32)
            .scalar("k", self.k as u32)
            .expect("out", self.expected.clone(), self.bound)
            .except(self.rows[1] * self.outputs..self.rows[0] * self.outputs)
    }
}

fn plain(out: ElementType) -> WgmmaProduct {
    WgmmaProduct { out, geglu: false, pairs: 0, epilogue: Vec::new() }
}

const fn tile(warpgroups: u32, columns: u32) -> WgmmaTile {
    WgmmaTile { warpgroups, columns }
}

/// Every tile, full and not; fewer steps than the ring holds, and more; rows past the end of a chunk.
pub fn tiles() -> Vec<Case> {
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let with_add = WgmmaProduct { epilogue: vec![then_add::DEF], ..plain(f32) };
    vec![
        Problem::new(plain(f32), 4, 64, [1, 1]).case(tile(1, 32)),
        Problem::new(plain(bf16), 68, 320, [9, 8]).case(tile(1, 32)),
        Problem::new(plain(f32), 68, 64, [66, 66]).case(tile(1, 64)),
        Problem::new(plain(f32), 132, 704, [3, 2]).case(tile(1, 128)),
        Problem::new(plain(bf16), 300, 128, [64, 64]).case(tile(1, 256)),
        Problem::new(plain(f32), 100, 192, [70, 67]).case(tile(2, 96)),
        Problem::new(plain(f32), 72, 64, [130, 129]).case(tile(2, 128)),
        Problem::new(plain(bf16), 164, 128, [5, 5]).case(tile(2, 160)),
        Problem::new(plain(f32), 260, 192, [130, 130]).case(tile(2, 256)),
        Problem::new(plain(f32), 32, 640, [128, 128]).case(tile(2, 256)),
        Problem::new(with_add, 20, 64, [7, 5]).case(tile(1, 128)),
        // Several tiles a block: of fewer steps than the copies are ahead, of more, and more rows of tiles than go together.
        Problem::new(plain(f32), 264, 64, [70, 70]).case(tile(1, 128)).grid([2, 1, 1]),
        Problem::new(plain(f32), 260, 576, [70, 70]).case(tile(1, 128)).grid([4, 1, 1]),
        Problem::new(plain(bf16), 260, 128, [130, 130]).case(tile(2, 256)).grid([1, 1, 1]),
        Problem::new(plain(bf16), 132, 64, [1090, 1089]).case(tile(1, 128)).grid([5, 1, 1]),
    ]
}

/// `gelu(gate) * value`, where gates and values do not fill their halves of a tile.
pub fn gated() -> Vec<Case> {
    let gated = |out| WgmmaProduct { geglu: true, ..plain(out) };
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    vec![
        Problem::new(gated(f32), 72, 64, [2, 2]).case(tile(1, 128)),
        Problem::new(gated(bf16), 40, 64, [3, 3]).case(tile(1, 32)),
        Problem::new(gated(bf16), 132, 128, [70, 66]).case(tile(2, 256)),
        Problem::new(gated(bf16), 48, 192, [65, 65]).case(tile(2, 96)),
    ]
}

/// Every type to bf16, on a grid that goes round.
pub fn widening() -> Vec<Case> {
    let of = |dtype: DType| {
        let (rows, k) = (3, 768);
        let planes = random_planes(dtype, rows, k, dtype as u64);
        let matrix = Repacked { dtype, rows, k, planes };
        let expected: Vec<BF16> = matrix.dequantise().into_iter().map(BF16::from_f32).collect();
        let instance = widen::instance(dtype).expect("every type has one");
        let mut case = Case::new(format!("{rows} rows of {k} {dtype} to bf16"), instance);
        for (plane, bytes) in &matrix.planes {
            let param = if plane.name == "codes" { "codes".to_owned() } else { format!("side_{}", plane.name) };
            case = case.buffer(&param, Data::new(plane.element(), bytes.clone()));
        }
        let units = widen::units(dtype, rows as u64, k as u64).expect("few");
        case.scalar("units", units).expect("out", expected, Bound::Exact)
    };
    DType::ALL.into_iter().map(of).collect()
}

/// The first row of each is the same product: alone, and with neighbours in every tile.
pub fn first_rows() -> Vec<Case> {
    let of = |(rows, tile)| Problem::new(plain(ElementType::F32), 20, 448, [rows, rows]).case(tile);
    [1, 2, 3, 70, 9, 5, 66, 4].into_iter().zip(WgmmaTile::ALL).map(of).collect()
}
