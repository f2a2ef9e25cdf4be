//! Kernels from parts: device functions with slots, and structs of registers.

use gemma4c_dsl::harness::{Bound, Case};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

/// A pair and how often it was used.
#[registers]
struct Pair {
    low: U32x2,
    // Not the pair's own.
    weight: f32,
    used: u32,
}

/// A struct in a struct.
#[registers]
struct Both {
    first: Pair,
    second: Pair,
}

/// Fetches what is at `at`.
#[device(slots(fetch(at: u32) -> U32x2))]
fn fetched(at: u32, weight: f32) -> Pair {
    Pair { low: fetch(at), weight, used: 0 }
}

#[device]
fn mark(pair: &mut Pair) {
    pair.used += 1;
}

/// Folds N pairs, DEPTH of which are on their way: the shape of a pipeline.
#[device(slots(fetch(at: u32) -> U32x2, fold(pair: Pair, at: u32, total: f32) -> f32))]
fn pipeline<const N: u32, const DEPTH: u32>(ahead: &mut Regs<Pair>, first: u32, weight: f32) -> f32 {
    #[unroll]
    for d in 0..DEPTH {
        ahead[d] = fetched(fetch, first + d, weight);
    }
    let mut total = 0.0f32;
    for start in (0..N).by(DEPTH) {
        #[unroll]
        for d in 0..DEPTH {
            let mut pair = ahead[d];
            mark(&mut pair);
            total = fold(pair, first + start + d, total);
            if start + DEPTH < N {
                ahead[d] = fetched(fetch, first + start + DEPTH + d, weight);
                ahead[d].used = pair.used;
            }
        }
    }
    total
}

/// What the first half fetches is the slot's choice, the second half is fixed.
#[kernel(block = 32, slots(
    fetch(at: u32) -> U32x2,
    fold(pair: Pair, at: u32, total: f32) -> f32
))]
fn halves<const N: u32, const DEPTH: u32>(x: Input<u32>, out: Output<f32>) {
    require!(N % DEPTH == 0);
    let mut ahead = regs(Pair::ZERO, DEPTH);
    let mut both = Both::ZERO;
    both.first.weight = pipeline(fetch, fold, &mut ahead, thread_idx() * N, 2.0);
    both.second.weight = pipeline(counted, fold, &mut ahead, thread_idx() * N, 3.0);
    out[thread_idx() * 2] = both.first.weight;
    out[thread_idx() * 2 + 1] = both.second.weight;
}

#[device]
fn from_memory(at: u32, words: Input<U32x2>) -> U32x2 {
    words[at]
}

#[device]
fn counted(at: u32) -> U32x2 {
    u32x2(at, 1)
}

#[device]
fn weighted_sum(pair: Pair, at: u32, total: f32) -> f32 {
    ((pair.low.x + pair.low.y + at) as f32).mul_add(pair.weight * pair.used as f32, total)
}

#[device]
fn with_factors(pair: Pair, at: u32, total: f32, factors: Input<f32>) -> f32 {
    (pair.low.x as f32).mul_add(factors[at % 4] * pair.used as f32, total)
}

fn instance(fold: &'static gemma4c_dsl::DeviceDef) -> Instance {
    halves::Chosen { N: 6, DEPTH: 2, fetch: from_memory::DEF, fold }.build().expect("all slots are filled")
}

#[test]
fn a_pipeline_is_written_once_and_filled_twice() {
    let words: Vec<u32> = (0..32 * 6 * 2).map(|i| i * 7 % 64).collect();
    let pairs: Vec<U32x2> = words.chunks(2).map(|w| u32x2(w[0], w[1])).collect();
    let factors = [0.5f32, 1.0, 1.5, 2.0];
    let used = |i: usize| (i / 2 + 1) as f32;
    let fold = |t: usize, each: &dyn Fn(usize, usize) -> f32| (0..6).map(|i| each(t * 6 + i, i)).sum::<f32>();
    let expected = |each: [&dyn Fn(usize, usize) -> f32; 2]| -> Vec<f32> {
        (0..32).flat_map(|t| [fold(t, each[0]), fold(t, each[1])]).collect()
    };
    let case = |name: &str, fold: &'static gemma4c_dsl::DeviceDef, out: Vec<f32>| {
        Case::new(name, instance(fold)).buffer("x", vec![0u32]).buffer("fetch_words", pairs.clone()).expect(
            "out",
            out,
            Bound::Exact,
        )
    };
    let sums = expected([&|at, i| (words[at * 2] + words[at * 2 + 1] + at as u32) as f32 * 2.0 * used(i), &|at, i| {
        (2 * at + 1) as f32 * 3.0 * used(i)
    }]);
    case("weights of its own", weighted_sum::DEF, sums).assert();
    let with_factors_of = expected([&|at, i| words[at * 2] as f32 * factors[at % 4] * used(i), &|at, i| {
        at as f32 * factors[at % 4] * used(i)
    }]);
    case("factors from memory", with_factors::DEF, with_factors_of).buffer("fold_factors", factors.to_vec()).assert();
}

#[test]
fn the_text_reads_like_templates_and_structs() {
    let text = instance(with_factors::DEF).cuda();
    for part in [
        "// A pair and how often it was used.\nstruct Pair {\n    U32x2 low;\n    f32 weight;\n    u32 used;\n};\n",
        "struct Both {\n    Pair first;\n    Pair second;\n};\n",
        "template <class FetchSlot>\n__device__ __forceinline__ Pair fetched(FetchSlot fetch, u32 at, f32 weight) {\n    \
         return Pair{fetch(at), weight, 0};\n}\n",
        "__device__ __forceinline__ void mark(Pair& pair) {\n    pair.used += 1;\n}\n",
        "template <class FetchSlot, class FoldSlot, u32 AHEAD_LENGTH>\n__device__ __forceinline__ f32 pipeline(\n    \
         FetchSlot fetch,\n    FoldSlot fold,\n    Pair (&ahead)[AHEAD_LENGTH],\n    u32 first,\n    f32 weight) {\n",
        "    auto fetch_slot = [=](u32 at) { return fetch(at FETCH_ARGS); };\n    \
         auto fold_slot = [=](Pair pair, u32 at, f32 total) { return fold(pair, at, total FOLD_ARGS); };\n",
        "    Pair ahead[DEPTH] = {};\n",
        "both.first.weight = pipeline(fetch_slot, fold_slot, ahead, thread_idx() * N, 2.0f);\n",
        "both.second.weight = pipeline([](auto... values) { return counted(values...); }, fold_slot,",
    ] {
        assert!(text.contains(part), "{part}\nis not in\n{text}");
    }
    // A struct stands before what uses it, and once.
    assert!(text.find("struct Pair {") < text.find("struct Both {"));
    assert_eq!(text.matches("struct Pair {").count(), 1);
    assert!(text.find("struct Both {") < text.find("fetched("));
}

#[test]
fn a_function_with_slots_fills_none() {
    let kernel = "halves";
    let refused = halves::Chosen { N: 6, DEPTH: 2, fetch: from_memory::DEF, fold: pipeline::DEF }.build();
    let Err(InstanceError::Fill { kernel: found, slot: "fold", function: "pipeline", .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(found, kernel);
}
