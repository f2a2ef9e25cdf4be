//! The language end to end: control flow, device functions, packed blocks, instances and what they refuse.

use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Arg, LaunchError, Memory, Options, launch};
use gemma4c_dsl::{ElementType, Instance, InstanceError};

/// Steps of the Collatz walk, at most LIMIT; every form of control flow.
#[kernel(block = 32)]
#[allow(clippy::mut_range_bound, unused_assignments)]
fn walk<const LIMIT: u32, const COUNT: bool>(x: Input<u32>, out: Output<u32>, rest: Output<i32>, n: u32) {
    const NONE: i32 = -1;
    let i = block_idx() * 32 + thread_idx();
    if i >= n {
        return;
    }
    let mut value = x[i];
    let mut steps = 0u32;
    loop {
        if value <= 1 || steps == LIMIT {
            break;
        }
        steps += 1;
        if value % 2 == 0 {
            value /= 2;
            continue;
        }
        value = value * 3 + 1;
    }
    let kind: i32;
    if value == 1 {
        kind = 0;
    } else if value == 0 {
        kind = NONE;
    } else {
        kind = value as i32;
    }
    // The bound is read once, whatever the body does to it.
    let mut bound = steps;
    let mut doubled = 0u32;
    for j in 0..bound {
        bound += j;
        doubled += 2;
    }
    {
        let steps = doubled / 2;
        while doubled > 0 {
            doubled -= 1;
        }
        out[i] = if COUNT { steps + doubled } else { value };
    }
    rest[i] = kind;
}

#[test]
fn control_flow_means_what_rust_means() {
    let x: Vec<u32> = (0..70).map(|i| i * i % 97).collect();
    for (limit, count) in [(1000u32, true), (5, true), (7, false)] {
        let (mut out, mut rest) = (Vec::new(), Vec::new());
        for &start in &x {
            let (mut value, mut steps) = (start, 0);
            while value > 1 && steps < limit {
                value = if value % 2 == 0 { value / 2 } else { value * 3 + 1 };
                steps += 1;
            }
            out.push(if count { steps } else { value });
            rest.push(match value {
                1 => 0,
                0 => -1,
                v => v as i32,
            });
        }
        let instance = Instance::of(walk::DEF).constant("LIMIT", limit).constant("COUNT", count).build().unwrap();
        Case::new(format!("at most {limit}"), instance)
            .grid([3, 1, 1])
            .buffer("x", x.clone())
            .scalar("n", 70u32)
            .expect("out", out, Bound::Exact)
            .expect("rest", rest, Bound::Exact)
            .assert();
    }
}

/// Rotates registers and counts how often.
#[device]
fn rotate<const N: u32>(values: &mut Regs<f32>, count: &mut u32) {
    let first = values[0];
    for i in 0..N - 1 {
        values[i] = values[i + 1];
    }
    values[N - 1] = first;
    *count += 1;
}

/// The sum of registers, with a weight for each.
#[device]
fn weighted<const N: u32, W: Float>(values: &Regs<f32>, weights: Input<W>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..N {
        sum = values[i].mul_add(weights[i].to_f32(), sum);
    }
    sum
}

/// Writes through a shared array.
#[device]
fn put(tile: Shared<f32>, at: u32, value: f32) {
    tile[at] = value;
}

#[kernel(block = 32)]
fn registers<const N: u32, W: Float>(x: Input<f32>, w: Input<W>, out: Output<f32>) {
    let tile = shared::<f32>(64);
    let mut values = regs(1.5f32, N);
    let mut count = 0u32;
    for i in 0..N {
        values[i] *= x[thread_idx() * N + i];
    }
    rotate(&mut values, &mut count);
    rotate(&mut values, &mut count);
    put(tile.offset(32u32), thread_idx(), weighted(&values, w) + count as f32);
    put(tile, thread_idx(), 0.25);
    barrier();
    let i = 31 - thread_idx();
    out[i] = tile[i] + tile[32 + i];
}

#[test]
fn device_functions_take_registers_references_and_shared_memory() {
    let n = 5;
    let x = Random::new(7).floats(32 * n, -1.0, 1.0);
    let w: Vec<BF16> = Random::new(8).floats(n, -1.0, 1.0).into_iter().map(BF16::from_f32).collect();
    let expected: Vec<f32> = (0..32)
        .map(|t| {
            let value = |i: usize| 1.5 * x[t * n + (i + 2) % n];
            (0..n).fold(0.0, |sum, i| value(i).mul_add(w[i].to_f32(), sum)) + 2.0 + 0.25
        })
        .collect();
    let instance =
        Instance::of(registers::DEF).constant("N", n as u32).element("W", ElementType::BF16).build().unwrap();
    Case::new("five registers", instance)
        .buffer("x", x)
        .buffer("w", w)
        .expect("out", expected, Bound::Within { absolute: 1e-6, relative: 1e-6 })
        .assert();
}

/// Splits GGUF blocks of 34 bytes (an F16 scale, then 32 signed bytes) into two planes.
#[kernel(block = 64)]
fn unpack_q8_0(blocks: Weights<u8>, quants: Output<i8>, scales: Output<f32>, count: u32) {
    let block = block_idx() * 64 + thread_idx();
    if block < count {
        let at = block as u64 * 34;
        scales[block] = F16::from_bits(load::<u16>(blocks, at)).to_f32();
        #[unroll]
        for pair in 0u32..16 {
            let two = load::<u16>(blocks, at + 2 + 2 * pair as u64) as u32;
            store(quants, block * 32 + 2 * pair, two as u16);
        }
    }
}

#[test]
fn packed_blocks_come_apart() {
    let mut random = Random::new(12);
    let count = 70;
    let (mut blocks, mut quants, mut scales) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        let scale = F16::from_f32(random.float(-2.0, 2.0));
        let bytes = random.bytes(32);
        scales.push(scale.to_f32());
        blocks.extend(scale.to_bits().to_le_bytes());
        blocks.extend(&bytes);
        quants.extend(bytes.into_iter().map(|b| b as i8));
    }
    Case::new("70 blocks", Instance::of(unpack_q8_0::DEF).build().unwrap())
        .grid([2, 1, 1])
        .buffer("blocks", blocks)
        .scalar("count", count as u32)
        .expect("quants", quants, Bound::Exact)
        .expect("scales", scales, Bound::Exact)
        .assert();
}

/// A required slot: it gives another type than it takes, so it cannot stay empty.
#[kernel(block = 32, slots(decode(word: u32, index: u32) -> f32))]
fn decoded(x: Input<u32>, out: Output<f32>) {
    let i = thread_idx();
    out[i] = decode(x[i], i);
}

#[device]
fn low_byte(word: u32, index: u32) -> f32 {
    byte_of(word, 0) as f32
}

#[device]
fn scaled<const SCALE: f32>(word: u32, index: u32) -> f32 {
    word as f32 * SCALE
}

mod elsewhere {
    use gemma4c_dsl::prelude::*;

    #[device]
    pub fn weighted(value: f32, index: u32) -> f32 {
        value * 2.0
    }
}

/// A kernel whose slot may bring a second function of a name it already calls.
#[kernel(block = 32, slots(finish(value: f32, index: u32) -> f32))]
fn clashing<const N: u32>(w: Input<f32>, out: Output<f32>) {
    let values = regs(1.0f32, N);
    out[thread_idx()] = finish(weighted(&values, w), 0);
}

#[test]
fn an_instance_says_what_it_lacks() {
    let clash = Instance::of(clashing::DEF).constant("N", 1u32).slot("finish", &[elsewhere::weighted::DEF]).build();
    assert_eq!(clash.unwrap_err(), InstanceError::NameClash { kernel: "clashing", function: "weighted" });
    let kernel = "decoded";
    let of = || Instance::of(decoded::DEF);
    assert_eq!(of().build().unwrap_err(), InstanceError::Unfilled { kernel, slot: "decode" });
    assert!(matches!(of().constant("K", 1u32).build().unwrap_err(), InstanceError::Unknown { .. }));
    let lacking = of().slot("decode", &[scaled::DEF]).build().unwrap_err();
    assert_eq!(lacking, InstanceError::DeviceConstant { kernel, function: "scaled", name: "SCALE", ty: "f32" });
    let wrong = of().slot("decode", &[rotate::DEF]).build().unwrap_err();
    assert!(matches!(wrong, InstanceError::Fill { function: "rotate", .. }), "{wrong}");
    let walk = Instance::of(walk::DEF).constant("LIMIT", 1u32);
    assert_eq!(walk.clone().build().unwrap_err(), InstanceError::Missing { kernel: "walk", name: "COUNT" });
    assert!(matches!(walk.constant("COUNT", 3u32).build().unwrap_err(), InstanceError::ConstantType { .. }));

    let filled = of().slot("decode", &[low_byte::DEF]).build().unwrap();
    assert_eq!(filled.to_string(), "decoded[decode = low_byte]");
    let x: Vec<u32> = (0..32).map(|i| i * 1000).collect();
    let expected: Vec<f32> = x.iter().map(|x| (x % 256) as f32).collect();
    Case::new("low bytes", filled).buffer("x", x).expect("out", expected, Bound::Exact).assert();
}

#[test]
fn a_launch_refuses_arguments_that_do_not_fit() {
    let instance = Instance::of(unpack_q8_0::DEF).build().unwrap();
    let mut memory = Memory::new();
    let arena = memory.allocate(4096);
    let part = |offset, bytes| {
        let mut view = memory.view(arena);
        (view.offset, view.bytes) = (offset, bytes);
        Arg::Memory(view)
    };
    let (blocks, quants, scales) = (part(0, 68), part(256, 64), part(512, 8));
    let overlapping = part(64, 64);
    let beyond = part(4090, 64);
    let odd = part(512, 7);
    let mut run = |args: &[Arg]| launch(&instance, [1, 1, 1], &mut memory, args, &Options::default());
    // One allocation holds all: the views do not overlap.
    run(&[blocks, quants, scales, Arg::U32(2)]).unwrap();
    let refused = |result: Result<(), LaunchError>, what: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(run(&[blocks, quants, scales]), "takes 4 arguments, 3 were given");
    refused(run(&[blocks, quants, scales, Arg::F32(2.0)]), "argument `count`");
    refused(run(&[blocks, overlapping, scales, Arg::U32(2)]), "`quants` writes the same memory");
    refused(run(&[blocks, beyond, scales, Arg::U32(2)]), "leave the allocation");
    refused(run(&[blocks, quants, odd, Arg::U32(2)]), "whole elements");
}

#[test]
fn the_header_is_all_that_differs_between_instances() {
    let of = |limit: u32| Instance::of(walk::DEF).constant("LIMIT", limit).constant("COUNT", true).build().unwrap();
    let (five, seven) = (of(5), of(7));
    assert_eq!(five.header(), "constexpr u32 LIMIT = 5;\nconstexpr bool COUNT = true;\n");
    assert_eq!(five.to_string(), "walk[LIMIT = 5, COUNT = true]");
    assert_eq!(five.cuda().replace(&five.header(), ""), seven.cuda().replace(&seven.header(), ""));
}

#[test]
fn every_intrinsic_has_one_row() {
    let mut names: Vec<_> = gemma4c_dsl::intrinsics::TABLE.iter().map(|row| row.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    for row in gemma4c_dsl::intrinsics::TABLE {
        assert!(row.cuda.contains(row.name) && !row.doc.is_empty(), "{}", row.name);
    }
}
