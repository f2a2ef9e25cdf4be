//! Cases of the matrix product: every type, every tile, rows and columns that do not fill one, rows past the end of a chunk.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, ElementType, F16, Float, U32x4};

use super::matvec::random_planes;
use super::{grouped, wgmma};
use crate::kernels::matvec::formats::types_with_kernels;
use crate::kernels::matvec::slots::then_add;
use crate::kernels::planes::Repacked;
use crate::kernels::product::{Product, Tile, round_rows_instance};

pub fn cases() -> Vec<Case> {
    types().into_iter().chain(shapes()).chain(rounding()).chain(wgmma::cases()).chain(grouped::products()).collect()
}

/// A product of random operands and what must come out.
struct Problem {
    product: Product,
    matrix: Repacked,
    x: Vec<BF16>,
    addend: Vec<f32>,
    /// In the buffers, and in the chunk.
    rows: [usize; 2],
    expected: Data,
    bound: Bound,
}

impl Problem {
    fn new(product: Product, outputs: usize, rows: [usize; 2]) -> Self {
        let k = product.k as usize;
        let planes = random_planes(product.dtype, outputs, k, (outputs * k) as u64 + product.dtype as u64);
        let matrix = Repacked { dtype: product.dtype, rows: outputs, k, planes };
        // The first rows are the same, however many follow.
        let mut random = Random::new(k as u64);
        let x: Vec<BF16> = random.floats(rows[0] * k, -4.0, 4.0).into_iter().map(BF16::from_f32).collect();
        let addend = random.floats(rows[0] * outputs, -9.0, 9.0);
        let weights: Vec<f64> = matrix.dequantise().iter().map(|w| BF16::from_f32(*w).to_f32().into()).collect();
        let (mut expected, mut size) = (vec![0.0f32; rows[0] * outputs], 0.0f64);
        for row in 0..rows[1] {
            for column in 0..outputs {
                let terms = (0..k).map(|i| f64::from(x[row * k + i].to_f32()) * weights[column * k + i]);
                let (sum, absolute) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let at = row * outputs + column;
                expected[at] = (sum + if product.epilogue.is_empty() { 0.0 } else { f64::from(addend[at]) }) as f32;
                size = size.max(absolute);
            }
        }
        // An f32 sum of that many terms of that size; half a step of bf16.
        let absolute = (size * 2e-6) as f32;
        let (expected, relative) = match product.out {
            ElementType::BF16 => {
                (Data::from(expected.into_iter().map(BF16::from_f32).collect::<Vec<_>>()), 1.0 / 128.0)
            }
            _ => (Data::from(expected), 1e-5),
        };
        Self { product, matrix, x, addend, rows, expected, bound: Bound::Within { absolute, relative } }
    }

    fn case(&self, tile: Tile) -> Case {
        let (outputs, rows) = (self.matrix.rows as u32, self.rows[0] as u32);
        let Product { dtype, k, out, .. } = self.product;
        let name = format!(
            "{} x {}, {} of {rows} rows, {dtype} of {outputs} x {k} to {}, {} epilogues",
            tile.rows,
            tile.columns,
            self.rows[1],
            out.name(),
            self.product.epilogue.len()
        );
        let mut case = Case::new(name, self.product.instance(tile).expect("a shape that fits the kernel"));
        for (plane, bytes) in &self.matrix.planes {
            let param = if plane.name == "codes" { "codes".to_owned() } else { format!("side_{}", plane.name) };
            case = case.buffer(&param, Data::new(plane.element(), bytes.clone()));
        }
        if !self.product.epilogue.is_empty() {
            case = case.buffer("epilogue_addend", self.addend.clone());
        }
        case.grid(tile.grid(rows, outputs))
            .buffer("groups", Vec::<U32x4>::new())
            .buffer("order", Vec::<u32>::new())
            .buffer("x", self.x.clone())
            .buffer("state", vec![0, self.rows[1] as u32, 0])
            .scalar("outputs", outputs)
            .scalar("k", k)
            .expect("out", self.expected.clone(), self.bound)
            .except(self.rows[1] * outputs as usize..self.rows[0] * outputs as usize)
    }
}

/// Every type.
pub fn types() -> Vec<Case> {
    let of = |dtype| {
        let product = Product { dtype, k: 256, out: ElementType::F32, pairs: 0, epilogue: Vec::new() };
        Problem::new(product, 11, [3, 3]).case(Tile::SMALL)
    };
    types_with_kernels().map(of).collect()
}

/// Every tile, full and not; steps of 32 and of 64 values; one step and several.
pub fn shapes() -> Vec<Case> {
    let product = |dtype, k, out| Product { dtype, k, out, pairs: 0, epilogue: Vec::new() };
    let (f32, bf16) = (ElementType::F32, ElementType::BF16);
    let with_add = Product { epilogue: vec![then_add::DEF], ..product(DType::Q4_0, 96, f32) };
    vec![
        Problem::new(product(DType::Q4_0, 96, f32), 24, [1, 1]).case(Tile::SMALL),
        Problem::new(product(DType::Q4_0, 96, f32), 70, [7, 7]).case(Tile::SMALL),
        Problem::new(product(DType::Q4_0, 96, f32), 64, [33, 16]).case(Tile::SMALL),
        Problem::new(product(DType::Q8_0, 128, f32), 65, [33, 33]).case(Tile::MEDIUM),
        Problem::new(product(DType::Q8_0, 128, f32), 8, [70, 67]).case(Tile::MEDIUM),
        Problem::new(product(DType::BF16, 64, bf16), 130, [7, 7]).case(Tile::LARGE),
        Problem::new(product(DType::Q8_0, 32, f32), 131, [129, 129]).case(Tile::LARGE),
        Problem::new(with_add, 19, [7, 5]).case(Tile::SMALL),
    ]
}

/// The first row of each is the same product: alone, and with neighbours in other tiles.
pub fn first_rows() -> Vec<Case> {
    let product = Product { dtype: DType::Q6K, k: 256, out: ElementType::F32, pairs: 0, epilogue: Vec::new() };
    let case = |rows, tile| Problem::new(product.clone(), 19, [rows, rows]).case(tile);
    vec![case(1, Tile::SMALL), case(20, Tile::SMALL), case(2, Tile::MEDIUM), case(3, Tile::LARGE)]
}

/// f32 to a 16-bit float: ties, signs, and a grid that goes round.
pub fn rounding() -> Vec<Case> {
    let case = |to: ElementType, width: u32, rows: [usize; 2], blocks| {
        let all = rows[0] * width as usize;
        let mut x = Random::new(all as u64).floats(all, -300.0, 300.0);
        // Halfway between two bf16, to the even one, which is below and above; and between two f16.
        x[0] = f32::from_bits(0x3f80_8000);
        x[1] = f32::from_bits(0xbf81_8000);
        x[2] = f32::from_bits(0x3f80_1000);
        x[3] = f32::from_bits(0xbf80_3000);
        let expected = match to {
            ElementType::F16 => Data::from(x.iter().map(|x| F16::from_f32(*x)).collect::<Vec<_>>()),
            _ => Data::from(x.iter().map(|x| BF16::from_f32(*x)).collect::<Vec<_>>()),
        };
        let instance = round_rows_instance(to).expect("256 threads are a block");
        Case::new(format!("{} of {} rows of {width} to {}, {blocks} blocks", rows[1], rows[0], to.name()), instance)
            .grid([blocks, 1, 1])
            .buffer("x", x)
            .buffer("state", vec![0, rows[1] as u32, 0])
            .scalar("width", width)
            .expect("out", expected, Bound::Exact)
            .except(rows[1] * width as usize..all)
    };
    let bf16 = ElementType::BF16;
    vec![case(bf16, 32, [3, 2], 1), case(bf16, 704, [7, 7], 2), case(ElementType::F16, 704, [7, 6], 2)]
}
