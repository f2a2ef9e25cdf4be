//! Typed builders: what is forgotten or misspelt does not compile.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32, slots(epilogue(value: f32) -> f32, decode(word: u32) -> f32))]
fn scaled<const K: u32>(x: Input<u32>, out: Output<f32>, factor: f32) {
    out[thread_idx()] = epilogue(decode(x[thread_idx()]) * factor * K as f32);
}

#[device(fills(word))]
fn times(word: u32, by: f32) -> f32 {
    word as f32 * by
}

#[device(fills(by, word))]
fn wrong_order(word: u32, by: f32) -> f32 {
    word as f32 * by
}

#[device(fills(word, x))]
fn fills_memory(word: u32, x: Input<f32>) -> f32 {
    x[word]
}

fn main() {
    let _ = scaled::Chosen { epilogue: vec![], decode: times::DEF }.build();
    let _ = scaled::Chosen { K: 1, epilogue: vec![], decode: vec![times::DEF] }.build();
    let _ = scaled::Chosen { K: 1, epilogue: vec![], decoded: times::DEF }.build();
    let _ = scaled::Arguments { x: 1u64, factor: 2.0 };
    let _ = times::Arguments { word: 1, by: 2.0 };
}
