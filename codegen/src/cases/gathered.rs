//! Cases of the experts of several rows, gathered by who chose them. The oracle is the kernel of one row, run in the simulator for every row by
//! itself: every result must have its bits.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Executor, Simulator};
use gemma4c_dsl::sim::Order;

use super::moe;
use super::quantise::Int8;
use crate::kernels::matvec::formats::format;
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::moe::gathered::down::GatheredDown;
use crate::kernels::moe::gathered::gate_up::GatheredGateUp;

/// Experts that the cases of one row choose from, besides as many as a row chooses.
const MORE_EXPERTS: u32 = 3;

fn left(case: &Case, param: &str) -> Vec<f32> {
    let results = Simulator(Order::Forward).run(case).unwrap_or_else(|error| panic!("{error}"));
    let at = case.instance.params().iter().position(|p| p.name == param).expect("a parameter of the kernel");
    results[at].as_ref().and_then(Data::floats).expect("floats")
}

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

fn gate_up(of: GatheredGateUp) -> Case {
    let GatheredGateUp { dtype, hidden, k, top, rows, quantised, multiprocessors, .. } = of;
    let one = GateUp { dtype, hidden, k, top, from: Activations::F32, dense: 0, multiprocessors };
    let [alone, _] = moe::gate_up(one, [rows as usize; 2]);
    let expected = left(&alone, "out");
    let x = buffer(&alone, "arrive_x");
    let instance = of.instance().expect("a shape that fits");
    let case = shared(&alone, "gate and up", instance, &x, format(dtype).integer).grid(of.grid()).scalar("rows", rows);
    if !quantised {
        let case = case.buffer("out_xq", Vec::<u32>::new()).buffer("out_xscale", Vec::<f32>::new());
        return case.buffer("out_xsum", Vec::<i32>::new()).expect("out", expected, Bound::Exact);
    }
    let int8 = Int8::of(&expected);
    case.buffer("out", Vec::<f32>::new())
        .expect("out_xq", int8.codes, Bound::Exact)
        .expect("out_xscale", int8.scales, Bound::Exact)
        .expect("out_xsum", int8.sums, Bound::Exact)
}

fn down(of: GatheredDown) -> Case {
    let GatheredDown { dtype, outputs, k, top, rows, multiprocessors, .. } = of;
    let one = Down { dtype, outputs, k, top, dense: if k % 256 == 0 { 256 } else { 32 }, multiprocessors };
    let [alone, _] = moe::down(one, [rows as usize; 2]);
    let expected = left(&alone, "out");
    let x = buffer(&alone, "x");
    let instance = of.instance().expect("a shape that fits");
    let case = shared(&alone, "down", instance, &x, format(dtype).integer).grid(of.grid());
    case.buffer("products", vec![0.0f32; (rows * top * outputs) as usize])
        .scalar("outputs", outputs)
        .scalar("rows", rows)
        .expect("out", expected, Bound::Exact)
}

/// Every type; experts that one row chose and that more did than a task takes; more rows than a block has.
pub fn cases() -> Vec<Case> {
    // (type, hidden values, width, choices, rows, SMs, bytes of shared memory)
    let of_type = |dtype: DType| (dtype, 32, 256, 2, 3, 2, 99 << 10);
    let shapes = [
        (DType::Q4_0, 96, 704, 8, 7, 5, 99 << 10),
        (DType::Q8_0, 160, 96, 2, 33, 3, 99 << 10),
        (DType::Q4_0, 32, 3168, 1, 6, 1, 14 << 10),
        (DType::BF16, 64, 544, 3, 5, 2, 8 << 10),
    ];
    let cases = |(dtype, hidden, width, top, rows, multiprocessors, shared_bytes): (DType, u32, u32, u32, u32, u32, u32)| {
        let (experts, quantised) = (top + MORE_EXPERTS, format(dtype).integer);
        let up = GatheredGateUp {
            dtype,
            hidden,
            k: width,
            experts,
            top,
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
            rows,
            multiprocessors,
            shared_bytes: shared_bytes.max(40 << 10),
        };
        [gate_up(up), gate_up(GatheredGateUp { quantised: false, ..up }), down(of_down)]
    };
    DType::ALL.into_iter().map(of_type).chain(shapes).flat_map(cases).collect()
}
