//! Cases of the products of several rows. The oracle is the product of one row, run for every row by itself: every result must have its
//! bits.

pub mod mixture;

use std::sync::LazyLock;

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Executor, Random, Reference, Simulator};
use gemma4c_dsl::sim::Order;

use super::adapter::Adapter;
use super::matvec::{Layer, Problem, in_order, random_planes};
use super::quantise::Int8;
use super::simulated;
use crate::kernels::matvec::LaunchShape;
use crate::kernels::matvec::formats::{format, types_with_kernels};
use crate::kernels::matvec::{Pairs, Product as OneRow, Prologue, slots};
use crate::kernels::planes::Repacked;
use crate::kernels::rows::formats::TensorFormat;
use crate::kernels::rows::shape::{Cores, Tensor};
use crate::kernels::rows::tiling::Tiles;
use crate::kernels::rows::{Product, Shape, SumOrder};

/// Several rows of one layer before a product with random weights: each row a problem of its own, with the same weights.
struct Batch {
    product: Product,
    /// How one row is computed: its lanes and warps decide the bits.
    one: LaunchShape,
    rows: Vec<Problem>,
    /// What each row's product by itself leaves.
    alone: Reference,
}

/// Activations as the product reads them.
#[derive(Default)]
struct Activations {
    x: Vec<u8>,
    xscale: Vec<u8>,
    xsum: Vec<u8>,
    fine: Vec<u8>,
    fine_sums: Vec<u8>,
    factor: Vec<u8>,
    /// What lies between the halves of adapters.
    narrow: Vec<u8>,
}

/// What a run left in a parameter.
fn left(case: &Case, param: &str) -> Data {
    let results = Simulator(Order::Forward).run(case).unwrap_or_else(|error| panic!("{error}"));
    found(case, &results, param)
}

fn found(case: &Case, results: &[Option<Data>], param: &str) -> Data {
    let at = case.instance.params().iter().position(|p| p.name == param).expect("a parameter of the kernel");
    results[at].clone().expect("memory")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

impl Batch {
    fn new(of: OneRow, rows: u32, one: LaunchShape) -> Self {
        let one = in_order(one, &of);
        let (all, k) = (of.rows() as usize, of.k as usize);
        let seed = (all * k) as u64 + of.dtype as u64;
        let matrix = Repacked { dtype: of.dtype, rows: all, k, planes: random_planes(of.dtype, all, k, seed) };
        let layer = match of.unbounded {
            true => Layer::massive(k, 5_000.0, false),
            false => Layer::random(k),
        };
        let row = |row: u32| {
            let mut random = Random::new(seed + 1 + u64::from(row));
            let mut layer = layer.clone();
            // Rows of different sizes; of unbounded ones some without massive channels.
            let size = 0.5 + row as f32;
            if row % 3 == 1 {
                layer.x = random.floats(k, -size, size);
            } else {
                let noise = random.floats(k, -0.5, 0.5);
                layer.x.iter_mut().zip(noise).for_each(|(x, noise)| *x += noise);
            }
            layer.update = random.floats(k, -size, size);
            layer.branch = random.floats(k, -0.3, 0.3);
            let by = random.floats(of.outputs as usize, -2.0, 2.0);
            let expected = vec![0.0; of.outputs as usize];
            let (product, matrix) = (of.clone(), matrix.clone());
            // Some have no adapter.
            let pairs = of.adapted.clone().map(|pairs| Adapter::random(pairs, k).in_seat(row as usize % 4));
            Problem { product, matrix, layer, expected, bound: Bound::Exact, by, pairs }
        };
        let problems: Vec<Problem> = (0..rows).map(row).collect();
        let alone = simulated(problems.iter().map(|row| row.fast(one)).collect(), "out");
        Self { product: Product::new(of, rows, SumOrder::Matvec), one, rows: problems, alone }
    }

    fn name(&self) -> String {
        format!("{} rows of {}", self.rows.len(), self.rows[0].name())
    }

    fn all<T: Copy>(&self, of: impl Fn(&Problem) -> &[T]) -> Vec<T> {
        self.rows.iter().flat_map(|row| of(row).to_vec()).collect()
    }

    /// The entries of all rows' seats.
    fn entries(&self) -> Vec<u32> {
        self.rows.iter().filter_map(|row| row.pairs.as_ref()).flat_map(|pairs| pairs.entry()).collect()
    }

    /// The residual that each row's product by itself leaves.
    fn residuals(&self) -> Vec<f32> {
        self.rows.iter().flat_map(|row| floats(left(&row.fast(self.one), "residual_out").bytes())).collect()
    }

    /// The kernel that prepares the rows. What it leaves is compared between all executors; the products say whether it is right.
    fn prepare(&self, shape: Shape) -> Option<(Case, Activations)> {
        let of = &self.product.one;
        let instance = self.product.prepare(self.one, shape).expect("a shape that fits the kernel")?;
        let rows = self.rows.len();
        let (k, groups) = (of.k as usize, of.k as usize / 32);
        let panels = shape.takes_panels();
        let name = format!("prepared{}, {}", if panels { " in panels" } else { "" }, self.name());
        // The weights of the norms are those of every row.
        let case = self.rows[0].layer.give(of, Case::new(name, instance).grid(self.product.prepare_grid()));
        let replaced = ["input_x", "update_x", "branch_x", "codes"];
        let norm = |(name, data): (String, Data)| match name.strip_suffix("_norm") {
            Some(which) => (format!("norms_{which}"), data),
            None => (name, data),
        };
        let mut case = Case {
            buffers: case
                .buffers
                .into_iter()
                .filter(|(name, _)| !replaced.contains(&name.as_str()))
                .map(norm)
                .collect(),
            expectations: Vec::new(),
            ..case
        };
        case = case.buffer("input_x", self.all(|row| &row.layer.x));
        if of.prologue.adds_residual() {
            case = case.buffer("update_x", self.all(|row| &row.layer.update));
            if of.branches {
                case = case.buffer("branch_x", self.all(|row| &row.layer.branch));
            }
            if of.leaves_residual {
                case = case.expect("residual_out", self.residuals(), Bound::Exact);
            }
        }
        for stride in ["strides_input", "strides_update", "strides_branch"] {
            case = case.scalar(stride, of.k);
        }
        let integer = format(of.dtype).integer;
        let fine = integer && of.unbounded;
        let normed = matches!(of.prologue, Prologue::Norm | Prologue::ResidualNorm);
        let held = if panels { rows.next_multiple_of(8) } else { rows };
        let (given, narrow) = Adapter::give_prepared(self.rows[0].pairs.as_ref(), self.entries(), case);
        case = given;
        let len = |there: bool, len: usize| if there { held * len } else { 0 };
        let sized = case
            .clone()
            .expect("out_codes", vec![0u32; len(integer, k / 4)], Bound::Exact)
            .expect("out_scales", vec![0.0f32; len(integer, groups)], Bound::Exact)
            .expect("out_sums", vec![0i32; len(integer, groups)], Bound::Exact)
            .expect("out_fine", vec![0u32; len(fine, k / 2)], Bound::Exact)
            .expect("out_fine_sums", vec![0i32; len(fine, groups)], Bound::Exact)
            .expect("out_values", vec![0.0f32; len(!integer, k)], Bound::Exact)
            .expect("out_factor", vec![0.0f32; if normed { rows } else { 0 }], Bound::Exact)
            .expect("narrowed_out", vec![0.0f32; narrow], Bound::Exact);
        let results = Simulator(Order::Forward).run(&sized).unwrap_or_else(|error| panic!("{error}"));
        let bytes = |param: &str| found(&sized, &results, param).bytes().to_vec();
        let activations = Activations {
            x: if integer { bytes("out_codes") } else { bytes("out_values") },
            xscale: bytes("out_scales"),
            xsum: bytes("out_sums"),
            fine: bytes("out_fine"),
            fine_sums: bytes("out_fine_sums"),
            factor: bytes("out_factor"),
            narrow: bytes("narrowed_out"),
        };
        let of_codes = ["out_codes", "out_scales", "out_sums", "out_fine", "out_fine_sums"];
        for param in of_codes.into_iter().chain(["out_values", "out_factor", "narrowed_out"]) {
            case = case.expect(param, found(&sized, &results, param), Bound::Exact);
        }
        Some((case, activations))
    }

    /// The activations where nothing need prepare them.
    fn as_they_arrive(&self) -> Activations {
        let bytes = |values: Vec<f32>| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let x = self.all(|row| &row.layer.x);
        if self.product.one.prologue != Prologue::Int8 {
            return Activations { x: bytes(x), ..Default::default() };
        }
        let int8 = Int8::of(&x);
        Activations {
            x: int8.codes.iter().flat_map(|word| word.to_le_bytes()).collect(),
            xscale: bytes(int8.scales),
            xsum: int8.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect(),
            ..Default::default()
        }
    }

    fn product(&self, shape: Shape, activations: &Activations) -> Case {
        let of = &self.product.one;
        let instance = self.product.instance(shape).expect("a shape that fits the kernel");
        let case = Case::new(format!("{}, {shape:?}", self.name()), instance).grid(self.product.grid(shape));
        let case = self.rows[0].weights(case);
        let by = self.all(|row| &row.by);
        let of_all_rows = |(name, data): (String, Data)| match name.as_str() {
            "epilogue_by" | "epilogue_addend" => (name, by.clone().into()),
            _ => (name, data),
        };
        let case = Case {
            buffers: case.buffers.into_iter().map(of_all_rows).collect(),
            scalars: case.scalars.into_iter().filter(|(name, _)| name != "rows").collect(),
            ..case
        };
        let case = case
            .buffer("x", words(&activations.x))
            .buffer("xscale", floats(&activations.xscale))
            .buffer("xsum", integers(&activations.xsum))
            .buffer("factor", floats(&activations.factor))
            .scalar("outputs", of.outputs)
            .scalar("rows", self.rows.len() as u32)
            .scalar("by_stride", of.outputs);
        let case = Adapter::give_rows(self.rows[0].pairs.as_ref(), self.entries(), floats(&activations.narrow), case);
        let case = match (shape, self.product.leaves_panels) {
            (_, true) => case
                .expect("out", Vec::<f32>::new(), Bound::Exact)
                .expect_like("to_codes", &self.alone, |x| in_panels(&Int8::of(x).codes, ROUNDED_OUTPUTS / 4, 4).into())
                .expect_like("to_scales", &self.alone, |x| {
                    in_panels(&Int8::of(x).scales, ROUNDED_OUTPUTS / 32, 1).into()
                })
                .expect_like("to_sums", &self.alone, |x| in_panels(&Int8::of(x).sums, ROUNDED_OUTPUTS / 32, 1).into()),
            (Shape::Tiles(Tiles { copiers: 1.., .. }), _) => case
                .expect_like("out", &self.alone, |x| x.to_vec().into())
                .expect("to_codes", Vec::<u32>::new(), Bound::Exact)
                .expect("to_scales", Vec::<f32>::new(), Bound::Exact)
                .expect("to_sums", Vec::<i32>::new(), Bound::Exact),
            _ => case.expect_like("out", &self.alone, |x| x.to_vec().into()),
        };
        match shape {
            Shape::Tensor(_) | Shape::Tiles(_) => as_plain_planes(case),
            Shape::Cores(_) => case
                .buffer("fine", words(&activations.fine))
                .buffer("fine_sums", integers(&activations.fine_sums))
                .scalar("x_stride", if format(of.dtype).integer { of.k / 4 } else { of.k }),
        }
    }

    /// The rows prepared, where they must be, and multiplied.
    fn cases(&self, shapes: &[Shape]) -> Vec<Case> {
        let mut cases = Vec::new();
        let of_order = |shape: &Shape| match *shape {
            Shape::Cores(of) => Shape::Cores(Cores { lanes: self.one.lanes, ..of }),
            shape => shape,
        };
        let shapes: Vec<Shape> = shapes.iter().map(of_order).collect();
        for tensor in [false, true] {
            let alike = || shapes.iter().copied().filter(|shape| shape.takes_panels() == tensor);
            let Some(first) = alike().next() else { continue };
            let activations = match self.prepare(first) {
                Some((case, activations)) => {
                    cases.push(case);
                    activations
                }
                None => self.as_they_arrive(),
            };
            cases.extend(alike().map(|shape| self.product(shape, &activations)));
        }
        cases
    }
}

/// Tensor cores take the planes beside the codes as words, under their own names; those that a type does not have are empty.
fn as_plain_planes(case: Case) -> Case {
    let of_plane = |(name, data): (String, Data)| match name.strip_prefix("side_") {
        Some(plane) => (plane.to_owned(), words(data.bytes()).into()),
        None => (name, data),
    };
    let mut case = Case { buffers: case.buffers.into_iter().map(of_plane).collect(), ..case };
    for plane in ["high", "scales", "supers"] {
        if !case.buffers.iter().any(|(name, _)| name == plane) {
            case = case.buffer(plane, Vec::<u32>::new());
        }
    }
    case
}

/// The product of one row: two blocks, so that there are more outputs than they take at once.
const fn one(lanes: u32, warps: u32) -> LaunchShape {
    LaunchShape { lanes, rows: 2, depth: 2, warps, blocks: 2, share: 0 }
}

const fn on_cores(lanes: u32, depth: u32, warps: u32, tile: u32, blocks: u32) -> Shape {
    Shape::Cores(Cores { lanes, weight_rows: 2, depth, warps, tile, blocks })
}

/// With a warp for two pieces of a step.
const fn on_tensor_cores(lanes: u32, tile: u32, columns: u32, stages: u32, resident: bool, blocks: u32) -> Shape {
    Shape::Tensor(Tensor { lanes, warps: lanes / 2, copiers: 0, tile, columns, stages, resident, blocks })
}

/// The same with warps that do nothing but copy.
const fn streamed(shape: Shape, copiers: u32) -> Shape {
    match shape {
        Shape::Tensor(shape) => Shape::Tensor(Tensor { copiers, ..shape }),
        Shape::Tiles(shape) => Shape::Tiles(Tiles { copiers, ..shape }),
        Shape::Cores(_) => shape,
    }
}

/// By tiles of so many panels of eight rows, of which a block has `groups` by `splits`; all warps copy.
const fn by_tiles(groups: u32, splits: u32, eights: u32, step: u32, stages: u32, blocks: u32) -> Tiles {
    Tiles { own: 4, step, groups, splits, eights, copiers: 0, stages, resident: true, panels: true, blocks }
}

pub fn cases() -> Vec<Case> {
    static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
        types().into_iter().chain(shapes()).chain(tiles()).chain(rounded()).chain(adapters()).chain(fusions()).collect()
    });
    CASES.clone()
}

/// Every type; more outputs than the grid takes at once.
pub fn types() -> Vec<Case> {
    let of = |dtype: DType| {
        let product = OneRow::new(dtype, 19, 512, Prologue::Plain);
        let mut shapes = vec![on_cores(8, 2, 1, 2, 2)];
        if TensorFormat::of(dtype).is_some() {
            // Both kernels of tensor cores multiply by the same functions: `tiles` has the other.
            shapes.push(streamed(Shape::Tiles(by_tiles(1, 1, 1, 8, 3, 2)), 2));
        }
        Batch::new(product, 8, one(8, 1)).cases(&shapes)
    };
    types_with_kernels().flat_map(of).collect()
}

/// Widths that leave lanes and stretches without work, and from 3 rows to 16.
pub fn shapes() -> Vec<Case> {
    let of = |dtype, outputs, k, rows, one: LaunchShape, cores: Shape, tiles: &[Tiles]| {
        let product = OneRow::new(dtype, outputs, k, Prologue::Plain);
        let tiles = tiles.iter().copied().map(Shape::Tiles);
        Batch::new(product, rows, one).cases(&std::iter::once(cores).chain(tiles).collect::<Vec<_>>())
    };
    let streaming = |tiles| Tiles { resident: false, ..tiles };
    [
        of(DType::Q4_0, 7, 704, 8, one(8, 2), on_cores(8, 3, 2, 2, 3), &[streaming(by_tiles(1, 1, 1, 8, 2, 1))]),
        of(DType::Q4_0, 9, 5120, 8, one(32, 1), on_cores(32, 2, 2, 8, 1), &[by_tiles(1, 1, 1, 8, 3, 1)]),
        of(
            DType::Q8_0,
            5,
            2560,
            8,
            one(32, 2),
            on_cores(32, 5, 1, 8, 2),
            &[by_tiles(1, 1, 1, 4, 6, 1), streaming(by_tiles(2, 1, 1, 4, 4, 1))],
        ),
        of(DType::Q8_0, 13, 352, 16, one(16, 1), on_cores(16, 2, 2, 4, 1), &[by_tiles(1, 1, 2, 4, 4, 1)]),
        of(DType::Q8_0, 6, 256, 3, one(16, 1), on_cores(16, 2, 1, 4, 1), &[by_tiles(1, 1, 1, 4, 2, 1)]),
        of(DType::BF16, 11, 96, 3, one(8, 1), on_cores(8, 1, 1, 4, 1), &[]),
        of(DType::F32, 4, 160, 5, one(16, 1), on_cores(16, 2, 1, 2, 1), &[]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Tiles of all sizes on tensor cores, over rows whose stretches are whole, end within a stage, within four blocks, or are empty.
pub fn tiles() -> Vec<Case> {
    let of = |dtype, outputs, k, geglu, rows, one: LaunchShape, resident, tiles| {
        let product = OneRow { geglu, ..OneRow::new(dtype, outputs, k, Prologue::Int8) };
        // As an earlier kernel leaves them.
        let shape = Shape::Tiles(Tiles { resident, panels: false, ..tiles });
        Batch::new(product, rows, one).cases(&[shape, streamed(shape, 2)])
    };
    // A warp has all stretches of a tile.
    let alone = |tiles| Tiles { own: 1, ..tiles };
    [
        of(DType::Q8_0, 20, 544, false, 64, one(32, 1), false, by_tiles(1, 2, 4, 4, 2, 1)),
        of(DType::Q4_0, 18, 1056, true, 20, one(32, 1), true, by_tiles(2, 1, 4, 8, 3, 1)),
        of(DType::Q8_0, 50, 1024, false, 24, one(32, 1), true, by_tiles(2, 1, 4, 4, 2, 1)),
        of(DType::Q6K, 35, 1280, false, 16, one(32, 1), false, by_tiles(1, 1, 2, 8, 3, 2)),
        of(DType::Q5_0, 9, 96, false, 5, one(8, 1), true, by_tiles(1, 1, 1, 8, 6, 1)),
        of(DType::Q4_1, 8, 32, false, 2, one(8, 1), true, by_tiles(1, 1, 1, 8, 4, 1)),
        of(DType::IQ4XS, 24, 768, true, 33, one(16, 1), true, by_tiles(3, 1, 2, 8, 5, 1)),
        of(DType::Q8_0, 50, 544, false, 40, one(32, 1), false, alone(by_tiles(2, 2, 4, 4, 2, 1))),
        of(DType::Q4_0, 70, 1056, true, 20, one(32, 1), true, alone(by_tiles(4, 1, 4, 8, 3, 1))),
        of(DType::Q4K, 20, 1024, false, 8, one(32, 1), true, alone(by_tiles(4, 1, 1, 16, 3, 1))),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// With adapters in seats, and rows without: a matrix that has none, gates, ranks of one vector and more, floats, results that are
/// left as int8.
pub fn adapters() -> Vec<Case> {
    let of = |dtype, k, prologue, matrices: &[(u32, bool)], rank, rows, shapes: &[Shape]| {
        let outputs = matrices.iter().map(|(rows, _)| rows).sum();
        let adapted = Some(Pairs { rank, matrices: matrices.to_vec(), seated: true });
        Batch::new(OneRow { adapted, ..OneRow::new(dtype, outputs, k, prologue) }, rows, one(8, 1)).cases(shapes)
    };
    let gates = |dtype, rank, rows, tiles| {
        let outputs = ROUNDED_OUTPUTS as u32;
        let adapted = Some(Pairs { rank, matrices: vec![(outputs, true); 2], seated: true });
        let product = OneRow { geglu: true, adapted, ..OneRow::new(dtype, outputs, 256, Prologue::Norm) };
        let batch = Batch::new(product, rows, one(8, 1));
        let product = Product { leaves_panels: true, ..batch.product.clone() };
        Batch { product, ..batch }.cases(&[streamed(Shape::Tiles(tiles), 2)])
    };
    let stacked = [(9, true), (4, false), (6, true)];
    let (cores, tiles) = (on_cores(8, 2, 1, 2, 2), Shape::Tiles(by_tiles(1, 1, 2, 8, 3, 2)));
    let both = [cores, streamed(tiles, 2), tiles];
    [
        of(DType::Q8_0, 256, Prologue::ResidualNorm, &stacked, 16, 9, &both),
        of(DType::Q4_0, 256, Prologue::Norm, &stacked, 48, 5, &both),
        of(DType::BF16, 128, Prologue::Norm, &[(7, true)], 16, 3, &[cores]),
        gates(DType::Q8_0, 16, 20, by_tiles(4, 1, 4, 4, 3, 2)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Outputs of the products whose results are left as int8.
const ROUNDED_OUTPUTS: usize = 96;

/// Rows of `width` values in panels of eight rows: `piece` values of each, then the next of each; zeros for rows that are not there.
fn in_panels<T: Copy + Default>(rows: &[T], width: usize, piece: usize) -> Vec<T> {
    let held = (rows.len() / width).next_multiple_of(8);
    let mut panels = vec![T::default(); held * width];
    for (at, value) in rows.iter().enumerate() {
        let (row, column) = (at / width, at % width);
        panels[((row / 8 * (width / piece) + column / piece) * 8 + row % 8) * piece + column % piece] = *value;
    }
    panels
}

/// Gate and up whose joined results are left as int8: by a warp and by four a tile, over several tiles, with rows that fill their panels and rows that do not.
pub fn rounded() -> Vec<Case> {
    let of = |dtype, k, rows, tiles| {
        let product = OneRow { geglu: true, ..OneRow::new(dtype, ROUNDED_OUTPUTS as u32, k, Prologue::Norm) };
        let batch = Batch::new(product, rows, one(8, 1));
        let product = Product { leaves_panels: true, ..batch.product.clone() };
        Batch { product, ..batch }.cases(&[streamed(Shape::Tiles(tiles), 2)])
    };
    let alone = |tiles| Tiles { own: 1, ..tiles };
    [
        of(DType::Q8_0, 256, 4, by_tiles(4, 1, 1, 4, 2, 1)),
        of(DType::Q4_0, 256, 20, by_tiles(4, 1, 4, 8, 3, 2)),
        of(DType::Q8_0, 256, 24, alone(by_tiles(4, 2, 2, 4, 2, 1))),
        of(DType::Q4_0, 256, 8, alone(by_tiles(8, 1, 1, 8, 3, 1))),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Prologues and epilogues.
pub fn fusions() -> Vec<Case> {
    let of = |dtype, k, prologue| OneRow::new(dtype, 10, k, prologue);
    let geglu = |product| OneRow { geglu: true, ..product };
    let scaled = |product| OneRow { scaled: true, ..product };
    let with = |product, epilogue: &[_]| OneRow { epilogue: epilogue.to_vec(), ..product };
    let products = vec![
        geglu(of(DType::Q4_0, 704, Prologue::Norm)),
        scaled(of(DType::Q8_0, 256, Prologue::ResidualNorm)),
        geglu(of(DType::BF16, 320, Prologue::ResidualNorm)),
        OneRow { branches: true, ..scaled(of(DType::Q4_0, 352, Prologue::ResidualNorm)) },
        OneRow { leaves_residual: false, ..scaled(of(DType::Q6K, 256, Prologue::ResidualNorm)) },
        OneRow { branches: true, epsilon: 0.25, ..of(DType::F32, 160, Prologue::Residual) },
        with(of(DType::Q8_0, 96, Prologue::Residual), &[slots::then_gelu::DEF, slots::then_times::DEF]),
        OneRow { unbounded: true, ..of(DType::Q4K, 512, Prologue::Plain) },
        with(of(DType::Q6K, 256, Prologue::Int8), &[slots::then_scale::DEF, slots::then_softcap::DEF]),
        with(of(DType::BF16, 96, Prologue::Plain), &[slots::then_add::DEF, slots::then_scale_by::DEF]),
    ];
    products
        .into_iter()
        .flat_map(|product| {
            let batch = Batch::new(product, 8, one(8, 2));
            let mut shapes = vec![on_cores(8, 2, 2, 4, 2)];
            let tensor_cores = format(batch.product.one.dtype).integer && !batch.product.is_fine();
            if tensor_cores {
                let panels = batch.product.is_prepared();
                shapes.push(Shape::Tiles(Tiles { resident: false, panels, ..by_tiles(1, 1, 1, 8, 3, 2) }));
            }
            batch.cases(&shapes)
        })
        .collect()
}
