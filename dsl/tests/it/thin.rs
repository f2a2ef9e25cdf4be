//! Units of 8 bytes in kernels of 16, and tables.

use gemma4c_dsl::harness::{Bound, Case};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, table};

const fn squares() -> [u32; 40] {
    let mut all = [0; 40];
    let mut i = 0;
    while i < 40 {
        all[i] = (i * i) as u32;
        i += 1;
    }
    all
}

table! {
    /// Squares of small numbers.
    fn square_of: [u32; 40] = squares();
}

/// What lies beside a unit of 16 bytes.
#[device]
fn beside(unit: u32) -> u32 {
    square_of(unit)
}

/// What lies beside a unit of 8.
#[device(thin)]
fn beside_thin(unit: u32) -> u32 {
    square_of(unit) + 1
}

#[device(thin(words_of_thin))]
fn words_of(codes: U32x4) -> u32 {
    codes.x + codes.y + codes.z + codes.w
}

#[device]
fn words_of_thin(codes: U32x4) -> u32 {
    (codes.x + codes.y) * 100 + codes.z + codes.w
}

/// The sums of units that come by every way there is.
#[kernel(block = 32, slots(side(unit: u32) -> u32))]
fn unit_sums(codes: Weights<U32x4>, out: Output<u32>, units: u32) {
    let ring = shared::<U32x4>(32);
    let unit = thread_idx().min(units - 1);
    cp_async16(ring, thread_idx(), codes, unit);
    cp_async_commit();
    cp_async_wait(0);
    barrier();
    let copied = load::<U32x2>(ring, thread_idx());
    let held = u32x4(7, 7, 0, 0);
    let loaded = words_of(load::<U32x4>(codes, unit));
    let streamed = words_of(load_streamed::<U32x4>(codes.offset(unit), 0));
    let wanted = words_of(load_streamed_if::<U32x4>(codes, unit, unit % 2 == 0, held));
    let at = thread_idx() * 5;
    out[at] = copied.x + copied.y;
    out[at + 1] = loaded;
    out[at + 2] = streamed;
    out[at + 3] = wanted;
    out[at + 4] = side(unit);
}

fn case(side: &'static DeviceDef, codes: Vec<U32x4>, units: u32, expected: Vec<u32>) -> Case {
    let instance = Instance::of(unit_sums::DEF).slot("side", &[side]).build().expect("an instance");
    let case = Case::new(side.name, instance).buffer("codes", codes).scalar("units", units);
    case.expect("out", expected, Bound::Exact)
}

fn units() -> Vec<U32x4> {
    (0..20).map(|i| u32x4(i, 40 + i, 80 + i, 120 + i)).collect()
}

#[test]
fn an_instance_is_thin_by_what_fills_its_slots() {
    let all = |threads: &dyn Fn(u32) -> [u32; 5]| (0..32).flat_map(threads).collect::<Vec<_>>();
    let of = |i: u32| 4 * i + 240;
    let wide = all(&|thread| {
        let unit = thread.min(19);
        [2 * unit + 40, of(unit), of(unit), if unit % 2 == 0 { of(unit) } else { 14 }, unit * unit]
    });
    case(beside::DEF, units(), 20, wide).assert();
    let words: Vec<u32> = units().iter().flat_map(|unit| [unit.x, unit.y, unit.z, unit.w]).collect();
    let thin = all(&|thread| {
        let unit = thread.min(29);
        let sum = words[unit as usize * 2] + words[unit as usize * 2 + 1];
        [sum, sum * 100, sum * 100, if unit % 2 == 0 { sum * 100 } else { 1400 }, unit * unit + 1]
    });
    case(beside_thin::DEF, units(), 30, thin).assert();
}

#[test]
fn tables_are_copied_to_shared_memory_before_all_else() {
    let instance = Instance::of(unit_sums::DEF).slot("side", &[beside::DEF]).build().unwrap();
    assert_eq!((instance.table_bytes(), beside::DEF.table_bytes()), (160, 160));
    let text = instance.cuda();
    let body = &text[text.find("__global__").unwrap()..];
    let [copy, barrier, first] = ["square_of_shared[at] = square_of_values[at];", "__syncthreads();", "ring"]
        .map(|part| body.find(part).unwrap());
    assert!(copy < barrier && barrier < first, "{body}");
    assert!(!text.contains("weights<U32x4> {"), "it is not thin");
}
