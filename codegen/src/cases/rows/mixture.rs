//! The dense half of a mixture, which comes along with the experts for one row and is a product of its own for several: its bits are what one
//! launch of both leaves.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Case, Data, Reference};

use super::{as_plain_planes, on_cores, on_tensor_cores, streamed};
use crate::cases::quantise::Int8;
use crate::cases::{moe, simulated};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::{Product as OneRow, Prologue};
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::rows::{Product, Shape, SumOrder};

const MULTIPROCESSORS: u32 = 132;
const ROWS: u32 = 3;

fn buffer(case: &Case, name: &str) -> Data {
    case.buffers.iter().find(|(of, _)| of == name).map(|(_, data)| data.clone()).expect("a buffer of the case")
}

/// The dense half by itself, with the weights that it has in `both`.
fn alone(both: &Case, order: SumOrder, one: OneRow, x: &Data, expected: &Reference, shape: Shape) -> Case {
    let (integer, k, outputs) = (format(one.dtype).integer, one.k, one.outputs);
    let product = Product::new(one, ROWS, order);
    let instance = product.instance(shape).expect("a shape that fits the kernel");
    let mut case = Case::new(format!("dense half, {}", both.name), instance).grid(product.grid(shape));
    for (name, data) in &both.buffers {
        if name == "codes_dense" {
            case = case.buffer("codes", data.clone());
        } else if let Some(plane) = name.strip_prefix("dense_").filter(|of| of.starts_with("side_")) {
            case = case.buffer(plane, data.clone());
        }
    }
    let x = x.floats().expect("activations are floats");
    let int8 = Int8::of(&x);
    let words = if integer { int8.codes } else { x.iter().map(|x| x.to_bits()).collect() };
    let case = case
        .buffer("x", words)
        .buffer("xscale", if integer { int8.scales } else { vec![] })
        .buffer("xsum", if integer { int8.sums } else { vec![] })
        .buffer("factor", Vec::<f32>::new())
        .scalar("outputs", outputs)
        .scalar("rows", ROWS)
        .scalar("by_stride", 0u32)
        .expect_like("out", expected, |x| x.to_vec().into());
    match shape {
        Shape::Tensor(_) | Shape::Tiles(_) => as_plain_planes(case),
        Shape::Cores(_) => case
            .buffer("fine", Vec::<u32>::new())
            .buffer("fine_sums", Vec::<i32>::new())
            .scalar("x_stride", if integer { k / 4 } else { k }),
    }
}

fn shapes(dtype: DType) -> Vec<Shape> {
    let tensor = on_tensor_cores(32, 8, 16, 3, true, 1);
    // A mixture adds halves of a block of q8_0 by themselves.
    let whole_blocks = format(dtype).integer && !format(dtype).joined;
    let tensors = [tensor, streamed(tensor, 2)].map(|shape| whole_blocks.then_some(shape));
    let all = [Some(on_cores(32, 2, 2, 4, 2)), tensors[0], tensors[1]];
    all.into_iter().flatten().collect()
}

fn gate_up(dtype: DType, dense: u32, k: u32) -> Vec<Case> {
    let kind = GateUp {
        dtype,
        hidden: 2,
        k,
        top: 2,
        from: Activations::F32,
        dense,
        prefetch_record: false,
        multiprocessors: MULTIPROCESSORS,
    };
    let both = moe::gate_up(kind, [ROWS as usize; 2]);
    let expected = simulated(vec![both.clone()], "dense_out");
    let x = buffer(&both, "dense_arrive_x");
    let one = OneRow { geglu: true, ..OneRow::new(dtype, dense, k, Prologue::Int8) };
    let one = if format(dtype).integer { one } else { OneRow { prologue: Prologue::Plain, ..one } };
    let case = |shape| alone(&both, SumOrder::GateUp, one.clone(), &x, &expected, shape);
    shapes(dtype).into_iter().map(case).collect()
}

fn down(dtype: DType, outputs: u32, k: u32, dense: u32) -> Vec<Case> {
    let kind = Down { dtype, outputs, k, top: 3, dense, prefetch_choice: false, multiprocessors: MULTIPROCESSORS };
    let both = moe::down(kind, [ROWS as usize; 2]);
    let expected = simulated(vec![both.clone()], "dense_out");
    let x = buffer(&both, "dense_x");
    let one = OneRow::new(dtype, outputs, dense, Prologue::Int8);
    let one = if format(dtype).integer { one } else { OneRow { prologue: Prologue::Plain, ..one } };
    let case = |shape| alone(&both, SumOrder::Down, one.clone(), &x, &expected, shape);
    shapes(dtype).into_iter().map(case).collect()
}

/// Rows that are short of 32 units, that have more, and that start within a step.
pub fn cases() -> Vec<Case> {
    [
        gate_up(DType::Q4_0, 7, 96),
        gate_up(DType::Q8_0, 9, 704),
        gate_up(DType::BF16, 5, 320),
        down(DType::Q4_0, 10, 352, 1056),
        down(DType::Q5_1, 9, 96, 64),
        down(DType::Q8_0, 12, 96, 512),
        down(DType::F16, 6, 96, 320),
    ]
    .into_iter()
    .flatten()
    .collect()
}
