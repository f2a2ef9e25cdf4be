//! Cases of the product with one arithmetic, by warps and by warpgroups: every type, tiles that are full and not,
//! slices in a block and in clusters, gates, sorted pairs of experts, rows past the end of a batch.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, ElementType, F16, Float, U32x4};

use super::adapter::words_of;
use super::geglu::gelu;
use super::matvec::random_planes;
use crate::kernels::gemm::{Gemm, Shape};
use crate::kernels::matvec::Pairs;
use crate::kernels::matvec::formats::{format, types_with_kernels};
use crate::kernels::matvec::slots::then_add;
use crate::kernels::planes::Repacked;

pub fn cases() -> Vec<Case> {
    types().into_iter().chain(shapes()).chain(experts()).chain(warpgroups()).collect()
}

/// A product of random operands. Of several experts, each row chose one.
struct Problem {
    of: Gemm,
    experts: u32,
    /// In the buffers, and in use.
    rows: [usize; 2],
}

/// A launch of few rows.
const FEW: Shape = Shape { rows: 8, across: 2, held: 1, stages: 2, x_stages: 2, x_parts: 2, resident: 0 };
/// A launch of many, by warpgroups.
const MANY: Shape = Shape { rows: 32, across: 4, held: 1, stages: 3, x_stages: 2, x_parts: 1, resident: 1 };

fn of(dtype: DType, outputs: u32, k: u32) -> Gemm {
    Gemm {
        dtype,
        operands: ElementType::BF16,
        outputs,
        k,
        geglu: false,
        pairs: 0,
        out: ElementType::F32,
        epilogue: Vec::new(),
        adapted: None,
    }
}

fn adapted(of: Gemm, rank: u32) -> Gemm {
    let pairs = Pairs { rank, matrices: vec![(of.outputs, true)], seated: true };
    Gemm { adapted: Some(pairs), ..of }
}

fn in_f16(of: Gemm) -> Gemm {
    Gemm { operands: ElementType::F16, ..of }
}

impl Problem {
    /// Rows of one matrix.
    fn new(of: Gemm, rows: [usize; 2]) -> Problem {
        Problem { of, experts: 1, rows }
    }

    fn case(&self, shape: Shape) -> Case {
        let Gemm { dtype, operands, outputs, k, geglu, pairs, out, ref epilogue, .. } = self.of;
        let (of_expert, width, columns) = (self.of.matrix_rows() as usize, k as usize, outputs as usize);
        let weight_rows = of_expert * self.experts as usize;
        let planes = random_planes(dtype, weight_rows, width, (weight_rows * width) as u64 + dtype as u64);
        let matrix = Repacked { dtype, rows: weight_rows, k: width, planes };
        let rounded = |value: f32| match operands {
            ElementType::F16 => F16::from_f32(value).to_f32(),
            _ => BF16::from_f32(value).to_f32(),
        };
        let weights: Vec<f64> = matrix.dequantise().iter().map(|w| rounded(*w).into()).collect();
        // The first rows are the same, however many follow.
        let mut random = Random::new(k as u64);
        let share = pairs.max(1) as usize;
        let x: Vec<f32> =
            random.floats(self.rows[0].div_ceil(share) * width, -4.0, 4.0).into_iter().map(rounded).collect();
        let addend = random.floats(self.rows[0] * columns, -9.0, 9.0);
        let mut chosen = Random::new(7);
        let ids: Vec<u32> = (0..self.rows[0]).map(|_| chosen.below(self.experts.into()) as u32).collect();
        let dot = |row: usize, output: usize| {
            let x = &x[row / share * width..][..width];
            let w = &weights[(ids[row] as usize * of_expert + output) * width..][..width];
            let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w);
            terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()))
        };
        // Every third row has no adapter, the others have that of one of two seats.
        let rank = self.of.adapted.as_ref().map_or(0, |pairs| pairs.rank as usize);
        let (wide_words, wide) = words_of(2 * columns * rank, k as u64);
        let narrow = random.floats(self.rows[0] * rank, -9.0, 9.0);
        let seat_of = |row: usize| row % 3;
        let change = |row: usize, output: usize| match (self.of.adapted.is_some(), seat_of(row)) {
            (false, _) | (_, 0) => 0.0,
            (true, seat) => {
                let of_b = &wide[((seat - 1) * columns + output) * rank..][..rank];
                of_b.iter().zip(&narrow[row * rank..]).map(|(b, t)| f64::from(*b) * f64::from(*t)).sum()
            }
        };
        let (mut expected, mut largest) = (vec![0.0f32; self.rows[0] * columns], 0.0f64);
        for (at, value) in expected[..self.rows[1] * columns].iter_mut().enumerate() {
            let (sum, size) = dot(at / columns, at % columns);
            let (by, by_size) = if geglu { dot(at / columns, columns + at % columns) } else { (1.0, 1.0) };
            largest = largest.max(size * by_size.max(1.0));
            let gated = if geglu { gelu(sum as f32) * by } else { sum + change(at / columns, at % columns) };
            *value = (gated + if epilogue.is_empty() { 0.0 } else { f64::from(addend[at]) }) as f32;
        }
        // An f32 sum of that many terms of that size; half a step of bf16.
        let absolute = (largest * if geglu { 2e-5 } else { 2e-6 }) as f32;
        let (expected, relative) = match out {
            ElementType::BF16 => {
                (Data::from(expected.into_iter().map(BF16::from_f32).collect::<Vec<_>>()), 1.0 / 128.0)
            }
            _ => (Data::from(expected), 1e-5),
        };
        let (order, groups) = self.sorted(&ids, shape.rows as usize);
        let name = format!(
            "{} of {} rows in {}, {dtype} of {} x {outputs} x {k} to {}, {}, gates: {geglu}, stages: {}",
            self.rows[1],
            self.rows[0],
            operands.name(),
            self.experts,
            out.name(),
            shape.describe(self.of.slices()),
            shape.stages
        );
        let mut case = Case::new(name, self.of.instance(shape).expect("a shape that fits the kernel"));
        for (plane, bytes) in &matrix.planes {
            let is_copied = plane.name == "codes" || self.of.is_scaled();
            let param = format!("{}_{}", if is_copied { "weights" } else { "side" }, plane.name);
            // Codes are copied by words, and read by them.
            let element = if is_copied { ElementType::U32 } else { plane.element() };
            case = case.buffer(&param, Data::new(element, bytes.clone()));
        }
        if !self.of.is_scaled() {
            case = case.buffer("weights_scales", Vec::<u32>::new());
        }
        if !epilogue.is_empty() {
            case = case.buffer("epilogue_addend", addend);
        }
        if self.of.adapted.is_some() {
            let seats_of: Vec<u32> = (0..self.rows[0]).flat_map(|row| [seat_of(row) as u32, 0]).collect();
            case = case
                .buffer("change_of_b", wide_words)
                .buffer("change_of_narrow", narrow)
                .buffer("change_of_row_seats", seats_of);
            for (name, value) in [("values", rank as u32), ("rank", rank as u32), ("seats", 2), ("has", 1)] {
                case = case.scalar(&format!("change_of_{name}"), value);
            }
            for name in ["second", "third", "rows"] {
                case = case.scalar(&format!("change_of_{name}"), outputs);
            }
        }
        let grid = match pairs {
            0 => self.of.grid(shape, self.rows[0] as u32),
            _ => self.of.grid_of_tiles(shape, groups.len() as u32 - 1),
        };
        let rows = self.rows[1] as u32;
        let x = match operands {
            ElementType::F16 => Data::from(x.into_iter().map(F16::from_f32).collect::<Vec<_>>()),
            _ => Data::from(x.into_iter().map(BF16::from_f32).collect::<Vec<_>>()),
        };
        case = match shape.resident {
            0 => {
                let case = case.buffer("rows_x", x).buffer("rows_groups", groups).buffer("rows_order", order);
                case.scalar("rows_count", rows)
            }
            _ => case.buffer("x", x).buffer("order", order).scalar("rows", rows),
        };
        case.grid(grid)
            .scalar("outputs", outputs)
            .scalar("by_stride", outputs)
            .scalar("k", k)
            .expect("out", expected, Bound::Within { absolute, relative })
            .except(self.rows[1] * columns..self.rows[0] * columns)
    }

    /// The rows in use by expert, and the groups of at most so many; a group more than there are.
    fn sorted(&self, ids: &[u32], height: usize) -> (Vec<u32>, Vec<U32x4>) {
        if self.of.pairs == 0 {
            return (Vec::new(), Vec::new());
        }
        let (mut order, mut groups) = (Vec::new(), vec![U32x4 { x: 0, y: 0, z: 0, w: 0 }]);
        for expert in 0..self.experts {
            let first = order.len();
            order.extend((0..self.rows[1] as u32).filter(|row| ids[*row as usize] == expert));
            for start in (first..order.len()).step_by(height) {
                let end = (start + height).min(order.len());
                groups.push(U32x4 { x: start as u32, y: end as u32, z: expert, w: 0 });
            }
        }
        groups[0].x = groups.len() as u32 - 1;
        groups.push(U32x4 { x: 0, y: 0, z: 0, w: 0 });
        (order, groups)
    }
}

/// Every type.
pub fn types() -> Vec<Case> {
    let case = |dtype| Problem::new(of(dtype, 11, 256), [3, 3]).case(Shape { stages: 3, ..FEW });
    types_with_kernels().map(case).collect()
}

/// Tiles full and not, K that ends in a step, slices in a block and in clusters, gates, what follows a product.
pub fn shapes() -> Vec<Case> {
    let q4 = |outputs, k| of(DType::Q4_0, outputs, k);
    let q8 = |outputs, k| of(DType::Q8_0, outputs, k);
    let with_add = Gemm { epilogue: vec![then_add::DEF], ..q4(19, 96) };
    let gated = |gemm: Gemm| Gemm { geglu: true, out: ElementType::BF16, ..gemm };
    let wide = Shape { stages: 3, ..FEW };
    vec![
        Problem::new(in_f16(q4(19, 192)), [7, 5]).case(FEW),
        Problem::new(adapted(q4(19, 192), 16), [7, 5]).case(FEW),
        Problem::new(adapted(q4(19, 192), 48), [7, 5]).case(FEW),
        // Shorter than the 64 values of a word of scales.
        Problem::new(q4(19, 32), [3, 3]).case(FEW),
        Problem::new(of(DType::BF16, 19, 32), [3, 3]).case(FEW),
        Problem::new(in_f16(q8(70, 192)), [9, 9]).case(Shape { rows: 16, across: 4, ..FEW }),
        Problem::new(in_f16(of(DType::I4, 19, 192)), [7, 5]).case(FEW),
        Problem::new(in_f16(of(DType::I8, 19, 192)), [7, 5]).case(FEW),
        Problem::new(in_f16(of(DType::F8, 70, 192)), [9, 9]).case(Shape { rows: 16, across: 4, ..FEW }),
        // Scales that are no whole words: the whole unit is decoded.
        Problem::new(of(DType::F8, 19, 96), [7, 5]).case(FEW),
        Problem::new(with_add, [7, 5]).case(FEW),
        Problem::new(q8(70, 160), [9, 9]).case(Shape { rows: 16, across: 4, ..FEW }),
        // All activations of the slices at once, and in two parts that take turns.
        Problem::new(q4(40, 1024), [8, 8]).case(Shape {
            held: 2,
            across: 1,
            stages: 4,
            x_stages: 4,
            x_parts: 1,
            ..FEW
        }),
        Problem::new(q8(40, 1152), [5, 5]).case(Shape { held: 1, across: 2, stages: 3, x_stages: 2, ..FEW }),
        Problem::new(gated(q8(24, 2048)), [20, 17]).case(Shape { rows: 16, held: 2, ..wide }),
        Problem::new(gated(q4(40, 128)), [33, 33]).case(Shape { rows: 32, ..wide }),
        Problem::new(q4(70, 256), [70, 67]).case(Shape { rows: 64, ..wide }),
        Problem::new(of(DType::Q6K, 33, 256), [128, 128]).case(Shape { rows: 128, ..wide }),
    ]
}

/// Rows sorted by expert, of which several share a row of activations; experts that nobody chose.
pub fn experts() -> Vec<Case> {
    let sorted = |of: Gemm, pairs| Gemm { pairs, ..of };
    let gated = Gemm { geglu: true, out: ElementType::BF16, ..of(DType::Q4_0, 24, 160) };
    vec![
        Problem { of: sorted(of(DType::Q8_0, 21, 96), 1), experts: 5, rows: [30, 24] }.case(FEW),
        Problem { of: sorted(gated, 3), experts: 4, rows: [30, 30] }.case(Shape { rows: 16, ..FEW }),
    ]
}

/// By warpgroups: every type that they decode, and what warps do.
pub fn warpgroups() -> Vec<Case> {
    let typed = |dtype| Problem::new(of(dtype, 11, 256), [3, 3]).case(MANY);
    let types = types_with_kernels().filter(|dtype| format(*dtype).unit >= 8).map(typed);
    let gated = |gemm: Gemm| Gemm { geglu: true, out: ElementType::BF16, ..gemm };
    let with_add = Gemm { epilogue: vec![then_add::DEF], ..of(DType::Q4_0, 70, 96) };
    let shapes = vec![
        Problem::new(in_f16(of(DType::Q4_0, 70, 1088)), [7, 5]).case(MANY),
        Problem::new(in_f16(of(DType::Q8_0, 70, 256)), [40, 40]).case(Shape { rows: 64, x_stages: 4, ..MANY }),
        Problem::new(in_f16(of(DType::I4, 70, 1088)), [7, 5]).case(MANY),
        Problem::new(in_f16(of(DType::F8, 70, 256)), [40, 40]).case(Shape { rows: 64, x_stages: 4, ..MANY }),
        Problem::new(with_add, [7, 5]).case(MANY),
        Problem::new(of(DType::Q8_0, 140, 1152), [40, 37]).case(Shape { rows: 64, across: 8, ..MANY }),
        Problem::new(gated(of(DType::Q4_0, 40, 2048)), [96, 90]).case(Shape { rows: 96, stages: 4, ..MANY }),
        Problem::new(of(DType::Q6K, 33, 512), [128, 128]).case(Shape { rows: 128, across: 8, ..MANY }),
        Problem::new(of(DType::BF16, 70, 160), [40, 40]).case(MANY),
    ];
    types.chain(shapes).collect()
}

/// The first row of each is the same product: alone and in any batch, whatever the tile, however slices are shared out,
/// by warps and by warpgroups.
pub fn first_rows(dtype: DType, operands: ElementType, k: u32) -> Vec<Case> {
    let case = |rows, shape| Problem::new(Gemm { operands, ..of(dtype, 19, k) }, [rows, rows]).case(shape);
    vec![
        case(1, Shape { held: 2, ..FEW }),
        case(3, Shape { held: 1, stages: 3, ..FEW }),
        case(20, Shape { rows: 32, held: 2, across: 1, ..FEW }),
        case(70, Shape { rows: 64, held: 1, ..FEW }),
        case(20, MANY),
        case(70, Shape { rows: 96, across: 8, ..MANY }),
    ]
}
