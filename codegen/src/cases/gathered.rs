//! Cases of the experts of several rows, gathered by who chose them. The oracle is the kernel of one row, run for every row by itself: every
//! result must have its bits.

use std::sync::LazyLock;

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Case, Data};

use super::moe;
use super::quantise::Int8;
use super::simulated;
use crate::kernels::matvec::formats::format;
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::moe::gathered::down::GatheredDown;
use crate::kernels::moe::gathered::gate_up::GatheredGateUp;

/// Experts that the cases of one row choose from, besides as many as a row chooses.
const MORE_EXPERTS: u32 = 3;

/// The weights, choices and activations of a case of one row, without what is only that kernel's.
fn shared(alone: &Case, name: &str, instance: gemma4c_dsl::Instance, x: &[f32], integer: bool) -> Case {
    let mut case = Case::new(format!("gathered {name}, {}", alone.name), instance);
    for (name, data) in &alone.buffers {
        if case.instance.params().iter().any(|param| param.name == *name) && name != "x" {
            case = case.buffer(name, data.clone());
        }
    }
    let int8 = Int8::of(x);
    let words = if integer { int8.codes } else { x.iter().map(|x| x.to_bits()).collect() };
    case.buffer("x", words)
        .buffer("xscale", if integer { int8.scales } else { vec![] })
        .buffer("xsum", if integer { int8.sums } else { vec![] })
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

fn gate_up(of: GatheredGateUp) -> Case {
    let GatheredGateUp { dtype, hidden, k, top, dense, rows, quantised, multiprocessors, .. } = of;
    let one = GateUp { dtype, hidden, k, top, from: Activations::F32, dense, known: false, multiprocessors };
    let [alone, _] = moe::gate_up(one, [rows as usize; 2]);
    let expected = simulated(vec![alone.clone()], "out");
    let x = buffer(&alone, "arrive_x");
    let instance = of.instance().expect("a shape that fits");
    let integer = format(dtype).integer;
    let case = shared(&alone, "gate and up", instance, &x, integer).grid(of.grid()).scalar("rows", rows);
    let (dense_x, dense_expected) = match dense {
        0 => (Vec::new(), simulated(vec![], "dense_out")),
        _ => (buffer(&alone, "dense_arrive_x"), simulated(vec![alone.clone()], "dense_out")),
    };
    let case = dense_activations(case, &dense_x, integer);
    [("", expected), ("dense_", dense_expected)].into_iter().fold(case, |case, (of, expected)| {
        let name = |what: &str| format!("{of}out{what}");
        let left = |case: Case, read: [fn(&[f32]) -> Data; 4]| {
            ["", "_xq", "_xscale", "_xsum"]
                .iter()
                .zip(read)
                .fold(case, |case, (what, read)| case.expect_like(&name(what), &expected, read))
        };
        match quantised {
            true => left(
                case,
                [no_floats, |x| Int8::of(x).codes.into(), |x| Int8::of(x).scales.into(), |x| Int8::of(x).sums.into()],
            ),
            false => left(case, [as_they_are, |_| Vec::<u32>::new().into(), no_floats, |_| Vec::<i32>::new().into()]),
        }
    })
}

/// The dense half's activations, by the names that they have beside the experts'.
fn dense_activations(case: Case, x: &[f32], integer: bool) -> Case {
    let int8 = Int8::of(x);
    let words = if integer { int8.codes } else { x.iter().map(|x| x.to_bits()).collect() };
    let case =
        Case { buffers: case.buffers.into_iter().filter(|(name, _)| !name.starts_with("dense_x")).collect(), ..case };
    case.buffer("dense_x", words)
        .buffer("dense_xscale", if integer { int8.scales } else { vec![] })
        .buffer("dense_xsum", if integer { int8.sums } else { vec![] })
}

fn down(of: GatheredDown) -> Case {
    let GatheredDown { dtype, outputs, k, top, dense, rows, multiprocessors, .. } = of;
    let one = Down { dtype, outputs, k, top, dense, early: false, multiprocessors };
    let [alone, _] = moe::down(one, [rows as usize; 2]);
    let x = buffer(&alone, "x");
    let instance = of.instance().expect("a shape that fits");
    let integer = format(dtype).integer;
    let case = shared(&alone, "down", instance, &x, integer).grid(of.grid());
    let (dense_x, dense_expected) = match dense {
        0 => (Vec::new(), simulated(vec![], "dense_out")),
        _ => (buffer(&alone, "dense_x"), simulated(vec![alone.clone()], "dense_out")),
    };
    let case = dense_activations(case, &dense_x, integer).expect_like("dense_out", &dense_expected, as_they_are);
    case.buffer("products", vec![0.0f32; (rows * top * outputs) as usize])
        .scalar("outputs", outputs)
        .scalar("rows", rows)
        .expect_like("out", &simulated(vec![alone], "out"), as_they_are)
}

/// Every type; experts that one row chose and that more did than a task takes; more rows than a block has; with a dense half and without. Made once: it takes a while.
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
    DType::ALL.into_iter().map(of_type).chain(shapes).flat_map(cases).collect()
}
