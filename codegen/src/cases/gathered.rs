//! Cases of the experts of several rows, gathered by who chose them. The oracle is the kernel of one row, run for every
//! row by itself: every result must have its bits.

use std::sync::LazyLock;

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Case, Data};
use gemma4c_dsl::{BF16, F16};

use super::moe;
use super::quantise::Int8;
use super::simulated;
use crate::kernels::matvec::formats::{format, types_with_kernels};
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::moe::gathered::down::GatheredDown;
use crate::kernels::moe::gathered::gate_up::GatheredGateUp;

/// What a form of the outputs holds of the values.
type ToForm = fn(&[f32]) -> Data;

/// Experts that the cases of one row choose from, besides as many as a row chooses.
const MORE_EXPERTS: u32 = 3;

/// The weights, choices and activations of a case of one row, without what is only that kernel's.
fn shared(alone: &Case, name: &str, instance: gemma4c_dsl::Instance, x: &[f32], integer: bool) -> Case {
    let mut case = Case::new(format!("gathered {name}, {}", alone.name), instance);
    for (name, data) in &alone.buffers {
        if case.instance.params().iter().any(|param| param.name == *name) {
            case = case.buffer(name, data.clone());
        }
    }
    activation_rows(case, "x", x, integer)
}

/// Activations as a gathered kernel takes them: codes, scales and sums, or floats.
fn activation_rows(case: Case, view: &str, x: &[f32], integer: bool) -> Case {
    let int8 = Int8::of(x);
    let words = if integer { int8.codes } else { x.iter().map(|x| x.to_bits()).collect() };
    case.buffer(&format!("{view}_words"), words)
        .buffer(&format!("{view}_scales"), if integer { int8.scales } else { vec![] })
        .buffer(&format!("{view}_sums"), if integer { int8.sums } else { vec![] })
}

fn buffer(case: &Case, name: &str) -> Vec<f32> {
    let data = case.buffers.iter().find(|(of, _)| of == name).map(|(_, data)| data);
    data.and_then(Data::floats).expect("floats of the case")
}

fn as_they_are(x: &[f32]) -> Data {
    x.to_vec().into()
}

fn no_floats(_: &[f32]) -> Data {
    Vec::<f32>::new().into()
}

fn codes(x: &[f32]) -> Data {
    let int8 = Int8::of(x);
    (0..x.len()).map(|i| int8.code(i)).collect::<Vec<_>>().into()
}

fn no_bf16(_: &[f32]) -> Data {
    Vec::<BF16>::new().into()
}

fn gate_up(of: GatheredGateUp) -> Case {
    let GatheredGateUp { dtype, hidden, k, top, dense, rows, quantised, multiprocessors, .. } = of;
    let one = GateUp { dtype, hidden, k, top, from: Activations::F32, dense, prefetch_record: false, multiprocessors };
    let alone = moe::gate_up(one, [rows as usize; 2]);
    let expected = simulated(vec![alone.clone()], "out");
    let x = buffer(&alone, "arrive_x");
    let instance = of.instance().expect("a shape that fits");
    let integer = format(dtype).integer;
    let case = shared(&alone, "gate and up", instance, &x, integer).grid(of.grid()).scalar("rows", rows);
    let (dense_x, dense_expected) = match dense {
        0 => (Vec::new(), simulated(vec![], "dense_out")),
        _ => (buffer(&alone, "dense_arrive_x"), simulated(vec![alone.clone()], "dense_out")),
    };
    let case = activation_rows(case, "dense_x", &dense_x, integer);
    [("out", expected), ("dense_out", dense_expected)].into_iter().fold(case, |case, (view, expected)| {
        let forms: [(&str, ToForm); 6] = match quantised {
            true => [
                ("floats", no_floats),
                ("rounded", no_bf16),
                ("halves", |_| Vec::<F16>::new().into()),
                ("codes", codes),
                ("scales", |x| Int8::of(x).scales.into()),
                ("sums", |x| Int8::of(x).sums.into()),
            ],
            false => [
                ("floats", as_they_are),
                ("rounded", no_bf16),
                ("halves", |_| Vec::<F16>::new().into()),
                ("codes", |_| Vec::<i8>::new().into()),
                ("scales", no_floats),
                ("sums", |_| Vec::<i32>::new().into()),
            ],
        };
        forms.into_iter().fold(case, |case, (form, read)| case.expect_like(&format!("{view}_{form}"), &expected, read))
    })
}

fn down(of: GatheredDown) -> Case {
    let GatheredDown { dtype, outputs, k, top, dense, rows, multiprocessors, .. } = of;
    let one = Down { dtype, outputs, k, top, dense, prefetch_choice: false, multiprocessors };
    let alone = moe::down(one, [rows as usize; 2]);
    let x = buffer(&alone, "x");
    let instance = of.instance().expect("a shape that fits");
    let integer = format(dtype).integer;
    let case = shared(&alone, "down", instance, &x, integer).grid(of.grid());
    let (dense_x, dense_expected) = match dense {
        0 => (Vec::new(), simulated(vec![], "dense_out")),
        _ => (buffer(&alone, "dense_x"), simulated(vec![alone.clone()], "dense_out")),
    };
    activation_rows(case, "dense_x", &dense_x, integer)
        .buffer("results_products", vec![0.0f32; (rows * top * outputs) as usize])
        .scalar("outputs", outputs)
        .scalar("rows", rows)
        .expect_like("results_dense_out", &dense_expected, as_they_are)
        .expect_like("results_out", &simulated(vec![alone], "out"), as_they_are)
}

/// Every type; experts that one row chose and that more did than a task takes; more rows than a block has; with a dense
/// half and without. Made once: it takes a while.
pub fn cases() -> Vec<Case> {
    static CASES: LazyLock<Vec<Case>> = LazyLock::new(all_cases);
    CASES.clone()
}

fn all_cases() -> Vec<Case> {
    // (type, hidden values, width, dense ones, choices, rows, SMs, bytes of shared memory)
    type Sizes = (DType, u32, u32, u32, u32, u32, u32, u32);
    let of_type = |dtype: DType| (dtype, 32, 256, 256, 2, 3, 2, 99 << 10);
    let shapes = [
        (DType::Q4_0, 96, 704, 2112, 8, 7, 5, 227 << 10),
        (DType::Q8_0, 160, 96, 0, 2, 33, 3, 99 << 10),
        (DType::Q4_0, 32, 3168, 64, 1, 6, 1, 28 << 10),
        (DType::BF16, 64, 544, 96, 3, 5, 2, 30 << 10),
    ];
    let cases = |(dtype, hidden, width, dense, top, rows, multiprocessors, shared_bytes): Sizes| {
        let (experts, quantised) = (top + MORE_EXPERTS, format(dtype).integer);
        let sizes = GatheredGateUp {
            dtype,
            hidden,
            k: width,
            experts,
            top,
            dense,
            rows,
            quantised,
            multiprocessors,
            shared_bytes,
        };
        let of_down = GatheredDown {
            dtype,
            outputs: hidden / 2 + 5,
            k: width.min(704),
            experts,
            top,
            dense,
            rows,
            multiprocessors,
            shared_bytes,
        };
        [gate_up(sizes), gate_up(GatheredGateUp { quantised: false, dense: 0, ..sizes }), down(of_down)]
    };
    types_with_kernels().map(of_type).chain(shapes).flat_map(cases).collect()
}
