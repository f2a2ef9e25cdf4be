//! Cases of the matrix-vector product: every type, fast and plain; every prologue and epilogue; rows and widths that leave
//! lanes, warps and blocks over. And the products of real models, to be timed.

use gemma4c_blocks::{Codes, DType, Scale};
use gemma4c_dsl::harness::{Bound, Case, Data, Random};

use super::adapter::Adapter;
use super::quantise::{Int8, activations, with_fine_codes};
use super::simulated;
use crate::kernels::NORM_EPSILON;
use crate::kernels::formats::packing::Packing;
use crate::kernels::matvec::LaunchShape;
use crate::kernels::matvec::formats::{format, types_with_kernels};
use crate::kernels::matvec::shape::lanes;
use crate::kernels::matvec::{Pairs, Product, Prologue, slots};
use crate::kernels::planes::{Content, Repacked, WeightPlane, planes};

/// Random planes of a matrix: any codes, scales of a sane size (2^-8 to 2^-7, either sign). Fast enough for a real one.
pub fn random_planes(dtype: DType, rows: usize, k: usize, seed: u64) -> Vec<(WeightPlane, Vec<u8>)> {
    let mut random = Random::new(seed);
    let fill = |plane: WeightPlane| {
        let (keep, set) = masks(dtype, plane);
        let len = plane.total_bytes(rows as u64, k as u64) as usize;
        let mut bytes = vec![0; len];
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&(random.bits() & keep | set).to_le_bytes());
        }
        if matches!((plane.content, dtype.layout().codes), (Content::Bits { .. }, Codes::E4M3 { .. })) {
            bytes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code ^= 1);
        }
        (plane, bytes)
    };
    planes(dtype).into_iter().map(fill).collect()
}

/// Which bits of eight random bytes are kept, and which are set.
fn masks(dtype: DType, plane: WeightPlane) -> (u64, u64) {
    const ANY: (u64, u64) = (u64::MAX, 0);
    const HALVES: (u64, u64) = (0x83ff_83ff_83ff_83ff, 0x1c00_1c00_1c00_1c00);
    match (plane.content, dtype) {
        (Content::Verbatim, DType::F32) => (0x807f_ffff_807f_ffff, 0x3c00_0000_3c00_0000),
        (Content::Verbatim, DType::BF16) => (0x807f_807f_807f_807f, 0x3c00_3c00_3c00_3c00),
        (Content::Verbatim, _) => HALVES,
        (Content::Bits { .. } | Content::Quads { .. }, _) => ANY,
        (Content::Packed(Packing::ScalesQ3K), _) => (0x1f1f_1f1f_1f1f_1f1f, 0),
        (Content::Packed(Packing::ScalesIQ3S), _) => (0x1eff_1eff_1eff_1eff, 0x0100_0100_0100_0100),
        (Content::Packed(_), _) => ANY,
        (Content::Halves { .. }, _)
            if matches!(dtype.layout().scale, Scale::Bytes16 { .. } | Scale::LowNibbles16 { .. })
                && plane.name == "scales" =>
        {
            ANY
        }
        (Content::Halves { count, .. }, _) => match dtype.layout().scale {
            Scale::Brain { .. } if count == 1 => (0x807f_807f_807f_807f, 0x3c00_3c00_3c00_3c00),
            // A scale and an integer that stands for zero.
            Scale::Brain { .. } => (0x000f_807f_000f_807f, 0x0000_3c00_0000_3c00),
            Scale::Single { .. } | Scale::Floats16 { .. } => (0x807f_ffff_807f_ffff, 0x3c00_0000_3c00_0000),
            _ => HALVES,
        },
        (Content::Bytes { .. }, _) if !matches!(dtype.layout().scale, Scale::Exponent { .. }) => ANY,
        (Content::Bytes { .. }, _) => (0x0303_0303_0303_0303, 0x7474_7474_7474_7474),
        (Content::UnsignedFloats { .. }, _) => (0x3f3f_3f3f_3f3f_3f3f, 0),
        (Content::Packed6 { .. }, _) => (0x3f3f_3f3f_3f3f_3f3f, 0),
        (Content::Split6 { .. }, _) => (0x1f1f_1f1f_1f1f_1f1f, 0),
    }
}

/// What the layer before left, for a prologue to make activations of.
#[derive(Clone)]
pub(super) struct Layer {
    pub x: Vec<f32>,
    pub update: Vec<f32>,
    pub branch: Vec<f32>,
    /// Of the update and the branch, where there are both.
    pub branch_norms: [Vec<f32>; 2],
    pub post_norm: Vec<f32>,
    pub norm: Vec<f32>,
    pub scale: f32,
    /// How closely the residual after the layer's part is known.
    pub close: Bound,
}

impl Layer {
    pub fn random(k: usize) -> Self {
        let mut random = Random::new(k as u64 + 77);
        Self {
            x: activations(k, k as u64),
            update: random.floats(k, -3.0, 3.0),
            post_norm: random.floats(k, 0.5, 1.5),
            norm: random.floats(k, 0.5, 1.5),
            branch: random.floats(k, -0.3, 0.3),
            branch_norms: [random.floats(k, 0.5, 1.5), random.floats(k, -1.5, 1.5)],
            scale: 0.75,
            close: Bound::Within { absolute: 1e-5, relative: 1e-5 },
        }
    }

    /// Values of about 1, but for channels that are `size` times as large, in [`Self::MASSIVE`]: they come with x and stay, or come
    /// and are cancelled by the update.
    pub fn massive(k: usize, size: f32, cancelled: bool) -> Self {
        let mut random = Random::new(k as u64 + 78);
        let mut layer = Self { x: random.floats(k, -1.5, 1.5), branch: vec![0.0; k], scale: 1.0, ..Self::random(k) };
        // What an f32 of that size is off by.
        layer.close = Bound::Within { absolute: size * 1e-6, relative: 1e-5 };
        for (i, channel) in Self::MASSIVE.into_iter().enumerate() {
            let sign = if i % 2 == 0 { size } else { -size };
            match cancelled {
                // The post-norm's weights make an update of a few times the others' massive.
                true => {
                    layer.update[channel] = 9.0;
                    layer.post_norm[channel] = sign / 4.0;
                }
                false => layer.x[channel] = sign,
            }
        }
        if cancelled {
            let update = rms_norm(&layer.update, &layer.post_norm, NORM_EPSILON);
            for channel in Self::MASSIVE {
                layer.x[channel] -= update[channel];
            }
        }
        layer
    }

    /// Two of one group of 32, and one of another.
    pub const MASSIVE: [usize; 3] = [37, 50, 71];

    /// The residual after the layer's part.
    pub fn residual(&self, product: &Product) -> Vec<f32> {
        let normed = |x: &[f32], weights: &[f32]| rms_norm(x, weights, product.epsilon);
        let update = match product.branches {
            true => {
                let halves = normed(&self.update, &self.branch_norms[0]).into_iter();
                halves.zip(normed(&self.branch, &self.branch_norms[1])).map(|(a, b)| a + b).collect()
            }
            false => self.update.clone(),
        };
        let normed = normed(&update, &self.post_norm);
        let scale = if product.scaled { self.scale } else { 1.0 };
        self.x.iter().zip(normed).map(|(x, new)| (x + new) * scale).collect()
    }

    fn activations(&self, product: &Product) -> Vec<f32> {
        match product.prologue {
            Prologue::Int8 | Prologue::Plain => self.x.clone(),
            Prologue::Norm => rms_norm(&self.x, &self.norm, product.epsilon),
            Prologue::Residual => self.residual(product),
            Prologue::ResidualNorm => rms_norm(&self.residual(product), &self.norm, product.epsilon),
        }
    }

    pub fn give(&self, product: &Product, case: Case) -> Case {
        let residual = |case: Case| {
            let case = case.buffer("input_x", self.x.clone()).buffer("update_x", self.update.clone());
            let case = match product.leaves_residual {
                true => case.expect("residual_out", self.residual(product), self.close),
                false => case,
            };
            let case = if product.scaled { case.buffer("scale_weight", vec![self.scale]) } else { case };
            match product.branches {
                true => case.buffer("branch_x", self.branch.clone()),
                false => case,
            }
        };
        let given = |used: bool, weights: &[f32]| if used { weights.to_vec() } else { Vec::new() };
        let (residual_first, normed) = match product.prologue {
            Prologue::Int8 | Prologue::Plain => (false, false),
            Prologue::Norm => (false, true),
            Prologue::Residual => (true, false),
            Prologue::ResidualNorm => (true, true),
        };
        let case = case
            .buffer("update_norm", given(product.branches, &self.branch_norms[0]))
            .buffer("branch_norm", given(product.branches, &self.branch_norms[1]))
            .buffer("post_norm", given(residual_first, &self.post_norm))
            .buffer("next_norm", given(normed, &self.norm));
        match product.prologue {
            Prologue::Int8 => {
                let (whole, loose) = self.x.split_at((product.k - product.loose) as usize);
                let int8 = Int8::of(whole);
                let case = case
                    .buffer("ready_xq", int8.codes)
                    .buffer("ready_group_xscale", int8.scales)
                    .buffer("ready_group_xsum", int8.sums);
                if loose.is_empty() { case } else { case.buffer("input_x", loose.to_vec()) }
            }
            Prologue::Plain => case.buffer("input_x", self.x.clone()),
            Prologue::Norm => case.buffer("input_x", self.x.clone()).buffer("next_norm", self.norm.clone()),
            Prologue::Residual => residual(case),
            Prologue::ResidualNorm => residual(case).buffer("next_norm", self.norm.clone()),
        }
    }
}

pub(super) fn rms_norm(x: &[f32], weights: &[f32], epsilon: f32) -> Vec<f32> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = (1.0 / (mean + f64::from(epsilon)).sqrt()) as f32;
    x.iter().zip(weights).map(|(x, weight)| x * factor * weight).collect()
}

/// Activations as a format multiplies them. `unbounded`: no norm has damped them.
pub(super) fn rounded(dtype: DType, x: &[f32], unbounded: bool) -> Vec<f64> {
    match (format(dtype).integer, unbounded) {
        (false, _) => x.iter().map(|x| f64::from(*x)).collect(),
        (true, false) => Int8::of(x).values(),
        (true, true) => with_fine_codes(x),
    }
}

/// How far a sum of rounded activations' products may be off, by the sum of its terms' sizes: as far as one of that many
/// terms in f32, or as one of sums of four products in f16.
pub(super) fn error_of_sums(dtype: DType) -> f64 {
    if matches!(dtype.layout().codes, Codes::E4M3 { .. }) { 5e-4 } else { 2e-6 }
}

/// Each row's product, and the sum of its terms' sizes.
pub(super) fn oracle(matrix: &Repacked, x: &[f64]) -> Vec<(f64, f64)> {
    let terms = |row| x.iter().enumerate().map(move |(i, x)| f64::from(matrix.value(row, i)) * x);
    (0..matrix.rows).map(|row| (terms(row).sum(), terms(row).map(f64::abs).sum())).collect()
}

pub(super) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// A product with random weights: its matrix, the layer before it, what must come out and how closely.
pub(super) struct Problem {
    pub product: Product,
    pub matrix: Repacked,
    pub layer: Layer,
    pub expected: Vec<f32>,
    pub bound: Bound,
    pub by: Vec<f32>,
    pub pairs: Option<Adapter>,
}

impl Problem {
    fn new(product: Product) -> Self {
        let (rows, k) = (product.rows() as usize, product.k as usize);
        let planes = random_planes(product.dtype, rows, k, (rows * k) as u64 + product.dtype as u64);
        let matrix = Repacked { dtype: product.dtype, rows, k, planes };
        let layer = Layer::random(k);
        let outputs = product.outputs as usize;
        let by = Random::new(3).floats(outputs, -2.0, 2.0);
        let x = rounded(product.dtype, &layer.activations(&product), product.unbounded);
        let mut rows = oracle(&matrix, &x);
        let pairs = product.adapted.clone().map(|pairs| Adapter::random(pairs, k));
        if let Some(pairs) = &pairs {
            rows.iter_mut().zip(pairs.changes(&x)).for_each(|((value, size), (change, of_change))| {
                (*value, *size) = (*value + change, *size + of_change);
            });
        }
        let size = rows.iter().map(|(_, size)| *size).fold(0.0, f64::max);
        let mut expected: Vec<f64> = rows[..outputs].iter().map(|(value, _)| *value).collect();
        // The gate's error is multiplied by up, and up's by the gate.
        let mut absolute = size * error_of_sums(product.dtype);
        if product.geglu {
            let largest = rows.iter().map(|(value, _)| value.abs()).fold(1.0, f64::max);
            absolute *= 2.0 * largest;
            for (gate, (up, _)) in expected.iter_mut().zip(&rows[outputs..]) {
                *gate = gelu(*gate) * up;
            }
        }
        for function in &product.epilogue {
            for (row, value) in expected.iter_mut().enumerate() {
                *value = match function.name {
                    "then_gelu" => gelu(*value),
                    "then_scale" | "then_scale_by" => *value * f64::from(SCALE),
                    "then_times" => *value * f64::from(by[row]),
                    "then_add" => *value + f64::from(by[row]),
                    _ => f64::from(CAP) * (*value / f64::from(CAP)).tanh(),
                };
            }
        }
        let expected = expected.into_iter().map(|value| value as f32).collect();
        let bound = Bound::Within { absolute: absolute as f32, relative: 1e-5 };
        Self { product, matrix, layer, expected, bound, by, pairs }
    }

    /// With massive channels of that size. What must come out is the product of unrounded activations, to 3 % of what the other
    /// channels make of it: massive ones hide nothing. Floats are not rounded, so for them it is 0.1 %.
    fn massive(product: Product, size: f32, cancelled: bool) -> Self {
        let of_random = Self::new(product);
        let layer = Layer::massive(of_random.product.k as usize, size, cancelled);
        let x: Vec<f64> = layer.activations(&of_random.product).iter().map(|x| f64::from(*x)).collect();
        let share = if format(of_random.product.dtype).integer { 0.03 } else { 0.001 };
        let rows = oracle(&of_random.matrix, &x);
        let largest = rows.iter().map(|(value, _)| value.abs()).fold(0.0, f64::max);
        let others = |row: usize| {
            let terms = x.iter().enumerate().filter(|(i, _)| cancelled || !Layer::MASSIVE.contains(i));
            terms.map(|(i, x)| (f64::from(of_random.matrix.value(row, i)) * x).powi(2)).sum::<f64>().sqrt()
        };
        let size = (0..rows.len()).map(others).fold(f64::INFINITY, f64::min);
        let bound = Bound::Within { absolute: (size * share + largest * 1e-6) as f32, relative: 0.0 };
        let expected = rows.iter().map(|(value, _)| *value as f32).collect();
        Self { layer, expected, bound, ..of_random }
    }

    pub fn name(&self) -> String {
        let Product { dtype, outputs, k, geglu, prologue, scaled, branches, unbounded, epsilon, .. } = self.product;
        let mut name = format!("{dtype}, {outputs} x {k}, {prologue:?}");
        if scaled {
            name += ", scaled";
        }
        if branches {
            name += ", of two branches";
        }
        if prologue.adds_residual() && !self.product.leaves_residual {
            name += ", for itself";
        }
        if self.product.leaves_int8 {
            name += ", left as int8";
        }
        if self.product.loose > 0 {
            name += &format!(", the last {} as floats", self.product.loose);
        }
        if unbounded && prologue != Prologue::Residual {
            name += ", unbounded";
        }
        if epsilon != NORM_EPSILON {
            name = format!("{name}, epsilon {epsilon}");
        }
        if geglu {
            name += ", GeGLU";
        }
        for function in &self.product.epilogue {
            name = name + ", " + function.name;
        }
        if let Some(Pairs { rank, matrices, seated }) = &self.product.adapted {
            let of: Vec<String> = matrices.iter().map(|(rows, has)| format!("{rows}: {has}")).collect();
            name += &format!(", adapters of rank {rank} ({}){}", of.join(", "), if *seated { " in seats" } else { "" });
        }
        name
    }

    /// Everything but the activations.
    pub fn weights(&self, mut case: Case) -> Case {
        for (plane, bytes) in &self.matrix.planes {
            let param = if plane.name == "codes" { "codes".to_owned() } else { format!("side_{}", plane.name) };
            case = case.buffer(&param, Data::new(plane.element(), bytes.clone()));
        }
        for function in &self.product.epilogue {
            case = match function.name {
                "then_scale" => case.scalar("epilogue_scale", SCALE),
                "then_scale_by" => case.buffer("epilogue_scale", vec![SCALE]),
                "then_times" => case.buffer("epilogue_by", self.by.clone()),
                "then_add" => case.buffer("epilogue_addend", self.by.clone()),
                "then_softcap" => case.scalar("epilogue_cap", CAP),
                _ => case,
            };
        }
        case.scalar("rows", self.product.outputs)
    }

    /// What comes out: floats, or int8 within a step of them.
    fn results(&self, case: Case, loose: u32) -> Case {
        if !self.product.leaves_int8 {
            return case.expect("out", self.expected.clone(), self.bound);
        }
        let (whole, loose) = self.expected.split_at(self.expected.len() - loose as usize);
        // A code is off by one where a sum is off by its rounding.
        let int8 = Int8::of(whole);
        let codes: Vec<i8> = int8.codes.iter().flat_map(|word| word.to_le_bytes()).map(|byte| byte as i8).collect();
        let step = |absolute| Bound::Within { absolute, relative: 0.0 };
        let scales = Bound::Within { absolute: 1e-9, relative: 5e-3 };
        let case = match loose.is_empty() {
            true => case.buffer("out", Vec::<f32>::new()),
            false => case.expect("out", loose.to_vec(), self.bound),
        };
        case.expect("keep_xq", codes, step(1.0)).expect("keep_xscale", int8.scales, scales).expect(
            "keep_xsum",
            int8.sums,
            step(32.0),
        )
    }

    pub fn fast(&self, shape: LaunchShape) -> Case {
        self.launched(in_order(shape, &self.product))
    }

    fn launched(&self, shape: LaunchShape) -> Case {
        let LaunchShape { lanes, rows, depth, warps, blocks, .. } = shape;
        let name = format!("{}, {lanes} lanes, {rows} rows, {depth} deep, {blocks} x {warps} warps", self.name());
        let instance = self.product.instance(shape).expect("a shape that fits the kernel");
        let case = Case::new(name, instance).grid([blocks, 1, 1]);
        let case = self.results(self.weights(case), shape.loose(self.product.outputs));
        Adapter::give(self.pairs.as_ref(), self.layer.give(&self.product, case))
    }

    /// Eight lanes for a row have the bits of as many as it needs for its stretches.
    fn of_eight_lanes(&self, shape: LaunchShape) -> Case {
        let shape = LaunchShape { lanes: 8, ..shape };
        let LaunchShape { rows, depth, warps, blocks, .. } = shape;
        let name =
            format!("{}, all stretches by 8 lanes, {rows} rows, {depth} deep, {blocks} x {warps} warps", self.name());
        let instance = self.product.instance(shape).expect("a shape that fits the kernel");
        let case = self.layer.give(&self.product, self.weights(Case::new(name, instance).grid([blocks, 1, 1])));
        let case = Adapter::give(self.pairs.as_ref(), case);
        let alone = self.fast(LaunchShape { depth: 1, blocks: 1, warps: 1, ..shape });
        case.expect_like("out", &simulated(vec![alone], "out"), |values| values.to_vec().into())
    }
}

/// The shape with the lanes that a stretched row must have.
pub(super) fn in_order(shape: LaunchShape, product: &Product) -> LaunchShape {
    LaunchShape { lanes: if product.is_stretched() { lanes(product) } else { shape.lanes }, ..shape }
}

const SCALE: f32 = 0.125;
const CAP: f32 = 30.0;

const fn shape(lanes: u32, rows: u32, depth: u32, warps: u32, blocks: u32) -> LaunchShape {
    LaunchShape { lanes, rows, depth, warps, blocks, share: 0 }
}

pub fn cases() -> Vec<Case> {
    let all = types().into_iter().chain(shapes()).chain(stretches()).chain(fusions());
    all.chain(massive_channels()).chain(adapters()).collect()
}

/// With adapters: stacked matrices of which one has none, gates, floats, activations of many chunks, results left as int8,
/// a seat, several rows a warp. Blocks wait for each other, and the text for a host runs one at a time: there is one.
pub fn adapters() -> Vec<Case> {
    let of = |dtype, k, prologue, matrices: &[(u32, bool)], rank| {
        let outputs = matrices.iter().map(|(rows, _)| rows).sum();
        let adapted = Some(Pairs { rank, matrices: matrices.to_vec(), seated: false });
        Product { adapted, ..Product::new(dtype, outputs, k, prologue) }
    };
    let gated = |product: Product| Product { geglu: true, outputs: product.outputs / 2, ..product };
    let seated = |product: Product| Product {
        adapted: product.adapted.clone().map(|pairs| Pairs { seated: true, ..pairs }),
        ..product
    };
    let both = [(32, true), (32, true)];
    let left = Product { leaves_int8: true, ..gated(of(DType::Q8_0, 256, Prologue::ResidualNorm, &both, 32)) };
    vec![
        Problem::new(of(DType::Q8_0, 544, Prologue::ResidualNorm, &[(9, true), (4, false), (6, true)], 16))
            .fast(shape(8, 2, 2, 3, 1)),
        Problem::new(seated(gated(of(DType::Q4_0, 704, Prologue::Norm, &[(14, true), (14, true)], 64))))
            .fast(shape(32, 4, 2, 2, 1)),
        Problem::new(gated(of(DType::Q4_0, 256, Prologue::Plain, &[(8, false), (8, true)], 16)))
            .fast(shape(8, 4, 1, 1, 1)),
        Problem::new(of(DType::BF16, 320, Prologue::Plain, &[(11, true)], 32)).fast(shape(8, 2, 1, 2, 1)),
        Problem::new(seated(of(DType::Q4_0, 4352, Prologue::Int8, &[(5, true)], 16))).fast(shape(32, 1, 5, 2, 1)),
        Problem::new(left).fast(LaunchShape { share: 32, ..shape(32, 4, 2, 3, 1) }),
    ]
}

/// Channels of the residual that are thousands of times the rest: they stay and a product reads the residual itself, in every type;
/// or the update cancels them, and the norm must be that of what is left.
pub fn massive_channels() -> Vec<Case> {
    let of = |dtype, k, prologue| Product::new(dtype, 10, k, prologue);
    let case = |product: Product, size: f32, cancelled: bool| {
        let mut case = Problem::massive(product, size, cancelled).fast(shape(8, 2, 2, 2, 2));
        case.name += &format!(", massive channels of {size}{}", if cancelled { ", cancelled" } else { "" });
        case
    };
    let mut cases = Vec::new();
    for dtype in types_with_kernels() {
        cases.push(case(of(dtype, 512, Prologue::Residual), 5_000.0, false));
        cases.push(case(Product { unbounded: true, ..of(dtype, 512, Prologue::Plain) }, 50_000.0, false));
    }
    for size in [5_000.0, 20_000.0, 50_000.0] {
        for (dtype, k) in [(DType::F32, 160), (DType::BF16, 320), (DType::Q8_0, 352), (DType::Q4_0, 704)] {
            cases.push(case(of(dtype, k, Prologue::ResidualNorm), size, true));
        }
    }
    cases
}

/// Every type, with more rows than the grid takes at once.
pub fn types() -> Vec<Case> {
    let of = |dtype: DType| Problem::new(Product::new(dtype, 19, 512, Prologue::Plain)).fast(shape(8, 2, 2, 1, 2));
    types_with_kernels().map(of).collect()
}

/// Widths and heights that leave lanes, warps or blocks without work, or a row's last step half empty.
pub fn shapes() -> Vec<Case> {
    let of = |dtype, outputs, k, shape| {
        let prologue = if format(dtype).integer { Prologue::Int8 } else { Prologue::Plain };
        Problem::new(Product::new(dtype, outputs, k, prologue)).fast(shape)
    };
    vec![
        of(DType::Q4_0, 1, 32, shape(32, 1, 1, 1, 1)),
        of(DType::Q4_0, 7, 704, shape(8, 2, 3, 2, 3)),
        of(DType::Q4_0, 21, 2112, shape(32, 4, 2, 1, 2)),
        of(DType::Q4_0, 9, 2560, shape(16, 2, 5, 2, 1)),
        // Whole rows, of which half of the steps or more have lanes without a unit.
        of(DType::Q4_0, 18, 2560, shape(32, 2, 3, 2, 2)),
        of(DType::Q4_0, 12, 1280, shape(32, 4, 2, 1, 2)),
        of(DType::Q8_0, 5, 2560, shape(32, 1, 5, 1, 2)),
        of(DType::Q8_0, 13, 704, shape(16, 4, 2, 1, 1)),
        of(DType::Q6K, 3, 1536, shape(16, 2, 3, 1, 1)),
        of(DType::Q4K, 6, 768, shape(32, 2, 1, 2, 1)),
        of(DType::BF16, 11, 96, shape(8, 2, 1, 1, 1)),
        of(DType::F32, 4, 160, shape(16, 2, 2, 1, 1)),
    ]
}

/// Rows whose stretches eight lanes take one after the other: full ones and a short one, one row and more, addresses that rows share and others.
pub fn stretches() -> Vec<Case> {
    let of = |dtype, outputs, k| Problem::new(Product::new(dtype, outputs, k, Prologue::ResidualNorm));
    let paired = Product { geglu: true, ..Product::new(DType::Q4_0, 20, 768, Prologue::ResidualNorm) };
    vec![
        of(DType::Q4_0, 20, 1536).of_eight_lanes(shape(8, 1, 6, 2, 2)),
        of(DType::Q4_0, 33, 704).of_eight_lanes(shape(8, 2, 3, 1, 2)),
        of(DType::Q4K, 16, 768).of_eight_lanes(shape(8, 4, 3, 1, 1)),
        of(DType::Q6K, 9, 512).of_eight_lanes(shape(8, 1, 2, 1, 2)),
        of(DType::Q8_0, 16, 384).of_eight_lanes(shape(8, 2, 3, 1, 2)),
        Problem::new(paired).of_eight_lanes(shape(8, 2, 3, 2, 2)),
    ]
}

/// Prologues and epilogues.
pub fn fusions() -> Vec<Case> {
    let of = |dtype, k, prologue| Product::new(dtype, 10, k, prologue);
    let geglu = |product| Product { geglu: true, ..product };
    let scaled = |product| Product { scaled: true, ..product };
    let with = |product, epilogue: &[_]| Product { epilogue: epilogue.to_vec(), ..product };
    let products = vec![
        geglu(of(DType::Q4_0, 704, Prologue::Norm)),
        scaled(of(DType::Q8_0, 256, Prologue::ResidualNorm)),
        geglu(of(DType::BF16, 320, Prologue::ResidualNorm)),
        Product { branches: true, ..scaled(of(DType::Q4_0, 352, Prologue::ResidualNorm)) },
        Product { leaves_residual: false, ..scaled(of(DType::Q6K, 256, Prologue::ResidualNorm)) },
        Product { branches: true, epsilon: 0.25, ..of(DType::F32, 160, Prologue::Residual) },
        with(of(DType::Q8_0, 96, Prologue::Residual), &[slots::then_gelu::DEF, slots::then_times::DEF]),
        scaled(of(DType::Q4_0, 352, Prologue::Residual)),
        scaled(Product { epsilon: 0.25, ..of(DType::F32, 160, Prologue::Residual) }),
        Product { epsilon: 0.25, ..of(DType::F16, 320, Prologue::Norm) },
        of(DType::Q5K, 256, Prologue::Norm),
        with(of(DType::Q8_0, 96, Prologue::Plain), &[slots::then_gelu::DEF, slots::then_times::DEF]),
        with(of(DType::Q6K, 256, Prologue::Int8), &[slots::then_scale::DEF, slots::then_softcap::DEF]),
        with(of(DType::BF16, 96, Prologue::Plain), &[slots::then_add::DEF, slots::then_scale_by::DEF]),
        geglu(of(DType::Q4_1, 128, Prologue::Int8)),
    ];
    let mut cases: Vec<Case> =
        products.into_iter().map(|product| Problem::new(product).fast(shape(8, 2, 2, 2, 2))).collect();
    // A group a block; two, of which the last block has one; one for each of three, and one or two that all of them share out.
    for (outputs, share, by) in [
        (64, 32, shape(32, 4, 2, 3, 2)),
        (160, 64, shape(16, 2, 2, 2, 3)),
        (128, 32, shape(32, 4, 2, 3, 3)),
        (160, 32, shape(32, 2, 2, 2, 3)),
    ] {
        let product = Product::new(DType::Q8_0, outputs, 256, Prologue::ResidualNorm);
        cases.push(Problem::new(Product { leaves_int8: true, ..geglu(product) }).fast(LaunchShape { share, ..by }));
    }
    // The same of eight lanes that have all stretches of a row.
    let product = Product { leaves_int8: true, ..Product::new(DType::Q4_0, 160, 768, Prologue::ResidualNorm) };
    cases.push(Problem::new(geglu(product)).launched(LaunchShape { share: 32, ..shape(8, 2, 3, 2, 3) }));
    // Warps with a whole number of chunks to norm, as q, k, v of 26B-A4B and 31B have them: two and three.
    for (product, by) in [
        (Product { branches: true, ..scaled(of(DType::Q4_0, 2816, Prologue::ResidualNorm)) }, shape(32, 2, 3, 11, 1)),
        (scaled(of(DType::Q8_0, 5376, Prologue::ResidualNorm)), shape(32, 2, 6, 14, 1)),
    ] {
        cases.push(Problem::new(product).fast(by));
    }
    // What such products leave: more floats than a block has threads for, and few.
    for (dtype, k, loose) in [(DType::Q8_0, 704, 352), (DType::Q4_0, 704, 32)] {
        let product = Product { loose, ..of(dtype, k, Prologue::Int8) };
        cases.push(Problem::new(product).fast(shape(8, 2, 2, 2, 2)));
    }
    cases
}
