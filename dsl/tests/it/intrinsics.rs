//! Every intrinsic and method, once in the simulator and once as host-compiled text, against plain Rust.

use gemma4c_dsl::harness::{Bound, Case, Data, Random, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::Order;
use gemma4c_dsl::{ElementType, Instance, KernelDef};

fn plain(def: &'static KernelDef) -> Instance {
    Instance::of(def).build().expect("an instance without parameters")
}

/// Shuffles and votes: six words a lane.
#[kernel(block = 32)]
fn shuffles(x: Input<i32>, out: Output<i32>) {
    let lane = lane_id();
    let v = x[lane];
    out[lane * 6] = shfl_xor(v, 5);
    out[lane * 6 + 1] = shfl_idx(v, 31 - lane);
    out[lane * 6 + 2] = ballot(v > 0) as i32;
    out[lane * 6 + 3] = warp_any(v == 7) as i32;
    out[lane * 6 + 4] = warp_all(v > -1000) as i32;
    out[lane * 6 + 5] = warp_max(v) + warp_sum(v) + warp_largest(v as u32) as i32;
}

#[test]
fn lanes_see_each_other() {
    let x: Vec<i32> = (0..32).map(|i| (i * 37 + 11) % 64 - 32).collect();
    let vote = x.iter().enumerate().fold(0u32, |mask, (i, &v)| mask | u32::from(v > 0) << i);
    let spread = x.iter().max().unwrap() + x.iter().sum::<i32>();
    // As words, negative numbers are above all others.
    let spread = spread + x.iter().map(|v| *v as u32).max().unwrap() as i32;
    let any = i32::from(x.contains(&7));
    let expected: Vec<i32> = (0..32).flat_map(|i| [x[i ^ 5], x[31 - i], vote as i32, any, 1, spread]).collect();
    Case::new("one warp", plain(shuffles::DEF)).buffer("x", x).expect("out", expected, Bound::Exact).assert();
}

/// Every other lane reads weights that lie far behind the end, if it read them.
#[kernel(block = 32)]
fn wanted(x: Weights<U32x4>, out: Output<u32>) {
    let lane = lane_id();
    let is_wanted = lane % 2 == 0;
    let held = u32x4(lane, 1, 2, 3);
    let found = load_streamed_if::<U32x4>(x, if is_wanted { lane / 2 } else { 1000000 }, is_wanted, held);
    out[lane] = found.x + found.y * 100 + found.z + found.w;
}

#[test]
fn what_is_not_wanted_is_not_read() {
    let x: Vec<u32> = (0..64).map(|i| i * 7).collect();
    let of_four = |four: &[u32]| four[0] + four[1] * 100 + four[2] + four[3];
    let expected: Vec<u32> = (0..32u32)
        .map(|lane| match lane % 2 {
            0 => of_four(&x[lane as usize * 2..]),
            _ => of_four(&[lane, 1, 2, 3]),
        })
        .collect();
    let x = Data::new(ElementType::U32x4, x.iter().flat_map(|word| word.to_le_bytes()).collect());
    Case::new("one warp", plain(wanted::DEF)).buffer("x", x).expect("out", expected, Bound::Exact).assert();
}

/// Reductions of a block, used twice, so that the second must not disturb the first.
#[kernel(block = 96)]
fn block_reductions(x: Input<f32>, out: Output<f32>) {
    let v = x[thread_idx()];
    let sum = block_sum(v);
    let largest = block_max(v);
    let count = block_sum(1u32);
    if thread_idx() == 0 {
        out[0u32] = sum;
        out[1u32] = largest;
        out[2u32] = count as f32;
    }
}

#[test]
fn blocks_reduce() {
    let x = Random::new(3).floats(96, -2.0, 2.0);
    let expected = vec![x.iter().sum::<f32>(), x.iter().copied().fold(f32::NEG_INFINITY, f32::max), 96.0];
    let bound = Bound::Within { absolute: 1e-5, relative: 0.0 };
    Case::new("three warps", plain(block_reductions::DEF)).buffer("x", x).expect("out", expected, bound).assert();
}

/// Atomics on global and shared memory; the last block sums up.
#[kernel(block = 64)]
fn histogram(x: Input<u32>, bins: InOut<u32>, counter: InOut<u32>, total: InOut<f32>, out: InOut<u32>) {
    let local = shared::<u32>(4);
    if thread_idx() < 4 {
        local[thread_idx()] = 0;
    }
    barrier();
    let v = x[block_idx() * 64 + thread_idx()];
    atomic_add(local, v % 4, 1u32);
    atomic_add(total, 0u32, 0.5f32);
    barrier();
    if thread_idx() < 4 {
        atomic_add(bins, thread_idx(), local[thread_idx()]);
    }
    if last_block_of(counter, 0, grid_dim()) && thread_idx() == 0 {
        // The other blocks' sums are visible here.
        out[0u32] = bins[0u32] + bins[1u32] + bins[2u32] + bins[3u32];
    }
}

#[test]
fn atomics_and_the_last_block() {
    let mut random = Random::new(9);
    let x: Vec<u32> = (0..256).map(|_| random.below(1000) as u32).collect();
    let mut bins = vec![0u32; 4];
    x.iter().for_each(|v| bins[*v as usize % 4] += 1);
    Case::new("four blocks", plain(histogram::DEF))
        .grid([4, 1, 1])
        .buffer("x", x)
        .buffer("bins", vec![0u32; 4])
        .buffer("counter", vec![0u32])
        .buffer("total", vec![0.0f32])
        .buffer("out", vec![0u32])
        .expect("bins", bins, Bound::Exact)
        .expect("counter", vec![0u32], Bound::Exact)
        .expect("total", vec![128.0f32], Bound::Exact)
        .expect("out", vec![256u32], Bound::Exact)
        .assert();
}

/// Every block sends its square, and takes those of all four.
#[kernel(block = 32)]
fn squares_of_all(words: InOut<u32>, out: Output<u32>) {
    if thread_idx() == 0 {
        let number = block_idx() + 1;
        send(words, block_idx(), number * number);
        let mut all = regs(U32x4::ZERO, 1);
        receive(words, 0u32, &mut all);
        out[block_idx()] = all[0].x + all[0].y + all[0].z + all[0].w;
    }
}

fn squares(blocks: u32) -> Case {
    Case::new("four blocks", plain(squares_of_all::DEF)).grid([blocks, 1, 1])
}

#[test]
fn blocks_send_words_and_take_each_others() {
    let case = squares(4).buffer("words", vec![0u32; 4]).expect("out", vec![30u32; 4], Bound::Exact);
    case.assert();
}

#[test]
fn words_that_never_come_and_words_that_are_none_are_faults() {
    let fault = |words: Vec<u32>, blocks: u32| {
        let case = squares(blocks).buffer("words", words).expect("out", vec![30u32; blocks as usize], Bound::Exact);
        case.check_on(&Simulator(Order::Forward)).unwrap_err().to_string()
    };
    assert!(fault(vec![0; 4], 3).contains("words 0 to 3, which somebody sends"), "{}", fault(vec![0; 4], 3));
    assert!(fault(vec![0, 7, 0, 0], 4).contains("which is there"), "{}", fault(vec![0, 7, 0, 0], 4));
}

/// `last_block_of` over the blocks of a column; blocks without work do not arrive.
#[kernel(block = 32)]
fn column_sums(x: Input<u32>, parts: InOut<u32>, counters: InOut<u32>, out: InOut<u32>, used: u32) {
    if block_idx_y() >= used {
        return;
    }
    let columns = grid_dim();
    if thread_idx() == 0 {
        parts[block_idx_y() * columns + block_idx()] = x[block_idx_y() * columns + block_idx()] * 2;
    }
    if last_block_of(counters, block_idx(), used) && thread_idx() == 0 {
        let found = read_only(parts);
        let mut sum = 0u32;
        for row in 0..used {
            sum = sum + found[row * columns + block_idx()];
        }
        out[block_idx()] = sum;
    }
}

#[test]
fn the_last_of_some_blocks() {
    Case::new("three of four rows, two columns", plain(column_sums::DEF))
        .grid([2, 4, 1])
        .buffer("x", vec![1u32, 10, 2, 20, 3, 30, 4, 40])
        .buffer("parts", vec![0u32; 8])
        .buffer("counters", vec![0u32; 2])
        .buffer("out", vec![0u32; 2])
        .scalar("used", 3u32)
        .expect("counters", vec![0u32; 2], Bound::Exact)
        .expect("out", vec![12u32, 120], Bound::Exact)
        .assert();
}

/// Packed data: one word a thread in, many out.
#[kernel(block = 32)]
fn packed(x: Input<u32>, out: Output<i32>, floats: Output<f32>) {
    let i = thread_idx();
    let a = x[i];
    let b = x[31 - i];
    let at = i * 11;
    out[at] = byte_of(a, i % 4) as i32;
    out[at + 1] = signed_byte_of(a, i % 4);
    out[at + 2] = nibble_of(a, i % 8) as i32;
    out[at + 3] = pack_bytes(a as i32, -1, b as i32, i as i32) as i32;
    out[at + 4] = byte_perm(a, b, 0x7250) as i32;
    out[at + 5] = dp4a(a, b, -5);
    out[at + 6] = sub_bytes(a, b) as i32;
    out[at + 7] = pack_bf16(f16_lo(a & 0x7bff7bff), f16_hi(a & 0x7bff7bff)) as i32;
    out[at + 8] = dp4a_unsigned(a, b, -5);
    out[at + 9] = byte_signs(a) as i32;
    out[at + 10] = byte_perm_or_sign(a, b, 0xd25) as i32;
    floats[i * 3] = bf16_lo(b & 0x7f7f7f7f);
    floats[i * 3 + 1] = bf16_hi(b & 0x7f7f7f7f);
    floats[i * 3 + 2] = f16_hi(pack_f16(0.25, i as f32 * 0.3));
}

#[test]
fn packed_words_come_apart() {
    let mut random = Random::new(11);
    let x: Vec<u32> = (0..32).map(|_| random.bits() as u32).collect();
    let f16 = |bits: u32| half_to_f32(bits as u16);
    let bf16_bits = |v: f32| u32::from(BF16::from_f32(v).to_bits());
    let (mut out, mut floats) = (Vec::new(), Vec::new());
    for i in 0..32u32 {
        let (a, b) = (x[i as usize], x[31 - i as usize]);
        let (ab, bb) = (a.to_le_bytes(), b.to_le_bytes());
        out.push(i32::from(ab[i as usize % 4]));
        out.push(i32::from(ab[i as usize % 4] as i8));
        out.push((a >> (4 * (i % 8)) & 15) as i32);
        out.push(i32::from_le_bytes([ab[0], 255, bb[0], i as u8]));
        out.push(i32::from_le_bytes([ab[0], bb[1], ab[2], bb[3]]));
        out.push((0..4).map(|j| i32::from(ab[j] as i8) * i32::from(bb[j] as i8)).sum::<i32>() - 5);
        out.push(i32::from_le_bytes(std::array::from_fn(|j| ab[j].wrapping_sub(bb[j]))));
        let finite = a & 0x7bff_7bff;
        out.push((bf16_bits(f16(finite & 0xffff)) | bf16_bits(f16(finite >> 16)) << 16) as i32);
        out.push((0..4).map(|j| i32::from(ab[j]) * i32::from(bb[j] as i8)).sum::<i32>() - 5);
        out.push(i32::from_le_bytes(ab.map(|byte| if byte >= 128 { 255 } else { 0 })));
        out.push(i32::from_le_bytes([bb[1], ab[2], if bb[1] >= 128 { 255 } else { 0 }, ab[0]]));
        let finite = b & 0x7f7f_7f7f;
        floats.push(f32::from_bits(finite << 16));
        floats.push(f32::from_bits(finite & 0xffff_0000));
        floats.push(F16::from_f32(i as f32 * 0.3).to_f32());
    }
    Case::new("one warp", plain(packed::DEF))
        .buffer("x", x)
        .expect("out", out, Bound::Exact)
        .expect("floats", floats, Bound::Exact)
        .assert();
}

/// Half precision by its definition, not by the library the simulator uses.
fn half_to_f32(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let magnitude =
        if exponent == 0 { fraction * 2f32.powi(-24) } else { (1024.0 + fraction) * 2f32.powi(exponent - 25) };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

/// Rounds and widens through an element type.
#[kernel(block = 256)]
fn through<E: Float>(x: Input<f32>, stored: Output<E>, back: Output<f32>, n: u32) {
    for i in (block_idx() * 256 + thread_idx()..n).by(grid_dim() * 256) {
        let rounded = E::from_f32(x[i]);
        stored[i] = rounded;
        back[i] = rounded.to_f32();
    }
}

#[test]
fn every_half_survives_and_ties_go_to_even() {
    // Every finite half, and the points between neighbours, where rounding ties.
    let halves: Vec<f32> = (0..0x7c00u16).map(half_to_f32).collect();
    let between = halves.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let x: Vec<f32> =
        halves.iter().copied().chain(between).flat_map(|v| [v, -v]).chain([65519.9, 65520.0, 1e9]).collect();
    for ty in [ElementType::F16, ElementType::BF16, ElementType::F32] {
        let instance = Instance::of(through::DEF).element("E", ty).build().unwrap();
        let case = Case::new(ty.name(), instance).grid([3, 1, 1]).buffer("x", x.clone()).scalar("n", x.len() as u32);
        match ty {
            ElementType::F16 => {
                let stored: Vec<F16> = x.iter().map(|&v| F16::from_f32(v)).collect();
                let back: Vec<f32> = stored.iter().map(|v| v.to_f32()).collect();
                case.expect("stored", stored, Bound::Exact).expect("back", back, Bound::Exact).assert();
            }
            ElementType::BF16 => {
                let stored: Vec<BF16> = x.iter().map(|&v| BF16::from_f32(v)).collect();
                let back: Vec<f32> = stored.iter().map(|v| v.to_f32()).collect();
                case.expect("stored", stored, Bound::Exact).expect("back", back, Bound::Exact).assert();
            }
            _ => case.expect("stored", x.clone(), Bound::Exact).expect("back", x.clone(), Bound::Exact).assert(),
        }
    }
}

/// Float functions: the exact ones first.
#[kernel(block = 32)]
fn float_functions(x: Input<f32>, exact: Output<f32>, close: Output<f32>) {
    let i = thread_idx();
    let v = x[i];
    let w = x[31 - i];
    let at = i * 16;
    exact[at] = v.abs().sqrt();
    exact[at + 1] = v.mul_add(w, 0.1);
    exact[at + 2] = v.floor() + v.ceil() * 8.0;
    exact[at + 3] = v.trunc() + v.round() * 8.0 + v.round_ties_even() * 64.0;
    exact[at + 4] = v.min(w) + v.max(w) * 3.0;
    exact[at + 5] = v.clamp(-0.5, 0.5);
    exact[at + 6] = rsqrt(v.abs() + 1.0);
    exact[at + 7] = recip(v);
    exact[at + 8] = f32_to_i32(v * 1.0e9) as f32;
    exact[at + 9] = f32_to_u32(v * 4.0e9) as f32;
    exact[at + 10] = round_to_i32(v * 2.5) as f32;
    exact[at + 11] = f32::from_bits(v.to_bits() ^ 0x8000_0000);
    exact[at + 12] = if v.is_nan() { f32::NAN } else { f32::NEG_INFINITY.max(v) };
    exact[at + 13] = v / w - -v;
    exact[at + 14] = (v - w) - (v - (w - v));
    exact[at + 15] = v * 1.0e-3 + w * 2.5e10;
    let at = i * 10;
    close[at] = v.exp();
    close[at + 1] = v.exp2();
    close[at + 2] = (v.abs() + 0.1).ln();
    close[at + 3] = (v.abs() + 0.1).log2();
    close[at + 4] = (v.abs() + 0.1).powf(1.7);
    close[at + 5] = v.tanh();
    close[at + 6] = v.sin();
    close[at + 7] = v.cos();
    close[at + 8] = exp_fast(v);
    close[at + 9] = exp2_fast(v);
}

#[test]
fn float_functions_mean_what_rust_means() {
    let mut x = Random::new(2).floats(32, -3.0, 3.0);
    x[..6].copy_from_slice(&[0.5, 1.5, -0.5, -2.5, 2.5, -1.5]);
    let (mut exact, mut close) = (Vec::new(), Vec::new());
    for i in 0..32 {
        let (v, w) = (x[i], x[31 - i]);
        exact.extend([
            v.abs().sqrt(),
            v.mul_add(w, 0.1),
            v.floor() + v.ceil() * 8.0,
            v.trunc() + v.round() * 8.0 + v.round_ties_even() * 64.0,
            v.min(w) + v.max(w) * 3.0,
            v.clamp(-0.5, 0.5),
            1.0 / (v.abs() + 1.0).sqrt(),
            1.0 / v,
            (v * 1.0e9) as i32 as f32,
            (v * 4.0e9) as u32 as f32,
            (v * 2.5).round_ties_even(),
            -v,
            v,
            v / w + v,
            (v - w) - (v - (w - v)),
            v * 1.0e-3 + w * 2.5e10,
        ]);
        let p = v.abs() + 0.1;
        close.extend([v.exp(), v.exp2(), p.ln(), p.log2(), p.powf(1.7), v.tanh(), v.sin(), v.cos(), v.exp(), v.exp2()]);
    }
    Case::new("one warp", plain(float_functions::DEF))
        .buffer("x", x)
        .expect("exact", exact, Bound::Exact)
        .expect("close", close, Bound::Within { absolute: 1e-6, relative: 1e-5 })
        .assert();
}

/// Integers: widths, casts, shifts, wrapping, precedence.
#[kernel(block = 32)]
fn integers(x: Input<u32>, bytes: Input<i8>, out: Output<u32>, wide: Output<u64>) {
    let i = thread_idx();
    let a = x[i];
    let b = x[31 - i];
    let small = bytes[i];
    let at = i * 20;
    out[at] = a.wrapping_mul(b).wrapping_add(a).wrapping_sub(7);
    out[at + 1] = a.rotate_left(b % 32) ^ a.rotate_right(i);
    out[at + 2] = a.count_ones() + a.leading_zeros() * 64 + b.trailing_zeros() * 4096;
    out[at + 3] = ((a as i32 >> 3) as u32).wrapping_add((a >> 3) % 5);
    out[at + 4] = a as u8 as u32 + (a as i8 as i32 + 200) as u32;
    out[at + 5] = a as u16 as u32 + (a as i16 as i32 + 40000) as u32;
    out[at + 6] = (small as i32 * -3 + 1000) as u32;
    out[at + 7] = (a % 1000).div_ceil(7) + (a % 100).abs_diff(b % 100);
    // In C++ `==` binds tighter than `&`: this is where a printer goes wrong.
    out[at + 8] = (a & 1 == b & 1) as u32;
    out[at + 9] = a & 0xff | b & 0xff00 ^ 0x1200;
    out[at + 10] = a % 64 - (a % 64 - b % 64 % 3 % (a % 2 + 1)) / 2 * 2;
    out[at + 11] = (a >> (b % 8)) << 2 & 0xffff;
    out[at + 12] = if a > b {
        a
    } else if a == b {
        1
    } else {
        b
    };
    out[at + 13] = (!(a > b) && b != 3 || a == 3) as u32;
    out[at + 14] = -(small as i32) as u32;
    out[at + 15] = a.min(b).max(77).clamp(80, 0xf000_0000);
    out[at + 16] = ((a as i32).wrapping_add(i32::MAX)) as u32;
    out[at + 17] = (small as i32).abs() as u32 + 4000000000;
    out[at + 18] = u32::MAX - (1u32 << (i % 32));
    out[at + 19] = 0b1010u32 + 0x_f0 + 1_000;
    wide[i] = (a as u64) * (b as u64) + 10_000_000_000 - (small as i64 + 128) as u64;
}

#[test]
fn integers_mean_what_rust_means() {
    let mut random = Random::new(21);
    let mut x: Vec<u32> = (0..32).map(|_| random.bits() as u32).collect();
    x[..4].copy_from_slice(&[0, u32::MAX, 0x8000_0000, 3]);
    let bytes: Vec<i8> = random.bytes(32).into_iter().map(|b| b as i8).collect();
    let (mut out, mut wide) = (Vec::new(), Vec::new());
    for i in 0..32 {
        let (a, b, small) = (x[i], x[31 - i], i32::from(bytes[i]));
        out.extend([
            a.wrapping_mul(b).wrapping_add(a).wrapping_sub(7),
            a.rotate_left(b % 32) ^ a.rotate_right(i as u32),
            a.count_ones() + a.leading_zeros() * 64 + b.trailing_zeros() * 4096,
            ((a as i32 >> 3) as u32).wrapping_add((a >> 3) % 5),
            u32::from(a as u8) + (i32::from(a as i8) + 200) as u32,
            u32::from(a as u16) + (i32::from(a as i16) + 40000) as u32,
            (small * -3 + 1000) as u32,
            (a % 1000).div_ceil(7) + (a % 100).abs_diff(b % 100),
            u32::from((a & 1) == (b & 1)),
            (a & 0xff) | ((b & 0xff00) ^ 0x1200),
            (a % 64) - ((a % 64) - (((b % 64) % 3) % ((a % 2) + 1))) / 2 * 2,
            ((a >> (b % 8)) << 2) & 0xffff,
            if a > b {
                a
            } else if a == b {
                1
            } else {
                b
            },
            u32::from((a <= b && b != 3) || a == 3),
            (-small) as u32,
            a.min(b).clamp(80, 0xf000_0000),
            (a as i32).wrapping_add(i32::MAX) as u32,
            small.unsigned_abs() + 4_000_000_000,
            u32::MAX - (1 << i),
            10 + 0xf0 + 1000,
        ]);
        wide.push(u64::from(a) * u64::from(b) + 10_000_000_000 - (i64::from(small) + 128) as u64);
    }
    Case::new("one warp", plain(integers::DEF))
        .buffer("x", x)
        .buffer("bytes", bytes)
        .expect("out", out, Bound::Exact)
        .expect("wide", wide, Bound::Exact)
        .assert();
}
