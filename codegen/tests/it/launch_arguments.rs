//! The arguments of a launch as a plan holds them: what memory they name, and what a plan cannot say.

use gemma4c_dsl::prelude::*;

use gemma4c_codegen::cuda::LowerError;
use gemma4c_codegen::cuda::launch::{BufferId, NOTHING, Span, bind, bind_fixed};
use gemma4c_plan::cuda::{Argument, Range, Region};

#[kernel(block = 32)]
fn shifted(x: Input<f32>, out: Output<f32>, by: i32) {
    let i = thread_idx();
    out[i] = x[i] * by as f32;
}

#[kernel(block = 32)]
fn copied(x: Input<f32>, out: Output<f32>, n: u32) {
    let i = thread_idx();
    if i < n {
        out[i] = x[i];
    }
}

const FIXED: Span = Span::Fixed(Range { region: Region::Kv, offset: 512, bytes: 64 });

#[test]
fn unused_memory_is_a_range_of_nothing() {
    let instance = copied::Chosen {}.build().unwrap();
    let arguments = copied::Arguments { x: FIXED.skip(16).take(32), out: Span::Unused, n: 3 };
    let range = Range { region: Region::Kv, offset: 528, bytes: 32 };
    let expected = [Argument::Memory(range), Argument::Memory(NOTHING), Argument::U32(3)];
    assert_eq!(bind_fixed(arguments.into(), &instance).unwrap(), expected);
}

#[test]
fn what_a_plan_cannot_say_is_refused() {
    let buffer = Span::Buffer { buffer: BufferId(0), offset: 0, bytes: 64 };
    let instance = copied::Chosen {}.build().unwrap();
    let arguments = copied::Arguments { x: buffer, out: FIXED, n: 3 };
    let error = bind_fixed(arguments.into(), &instance).unwrap_err();
    assert!(matches!(&error, LowerError::Buffer { kernel } if kernel == "copied"), "{error}");

    let instance = shifted::Chosen {}.build().unwrap();
    let arguments = shifted::Arguments { x: FIXED, out: FIXED, by: -1 };
    let error = bind(arguments.into(), &instance).unwrap_err();
    assert!(matches!(&error, LowerError::Scalar { kernel } if kernel == "shifted"), "{error}");
}
