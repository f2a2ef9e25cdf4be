//! Typed arguments: in launch order, checked against what fills an instance's slots.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Memory, Options, View, launch};
use gemma4c_dsl::{ArgumentError, ArgumentValue, Filled, Instance, LaunchArguments};

/// A word through `decode`, then through `finish`.
#[kernel(block = 32, slots(decode(word: u32) -> f32, finish(value: f32, index: u32) -> f32))]
fn words(x: Input<u32>, out: Output<f32>, n: u32) {
    let i = thread_idx();
    if i < n {
        out[i] = finish(decode(x[i]), i);
    }
}

#[kernel(block = 32)]
fn copy(x: Input<f32>, out: Output<f32>) {
    out[thread_idx()] = x[thread_idx()];
}

#[device]
fn from_table(word: u32, table: Weights<f32>, len: u32) -> f32 {
    table[word % len]
}

#[device]
fn as_float(word: u32) -> f32 {
    word as f32
}

#[device(fills(value, index))]
fn times(value: f32, index: u32, by: f32) -> f32 {
    value * by
}

#[device]
fn plus_index(value: f32, index: u32) -> f32 {
    value + index as f32
}

#[device]
fn plus(value: f32, index: u32, addend: Input<f32>) -> f32 {
    value + addend[index]
}

fn chained() -> Instance {
    let finish = vec![times::DEF, plus_index::DEF, times::DEF, plus::DEF];
    words::Chosen { decode: from_table::DEF, finish }.build().expect("all slots are filled")
}

fn own() -> words::Arguments<char> {
    words::Arguments { x: 'x', out: 'o', n: 7 }
}

#[test]
fn arguments_come_in_launch_order() {
    let (decode, finish) = (words::slot::decode, words::slot::finish);
    let given = own()
        .with_slot(finish, times::Arguments { by: 2.0 })
        .with_slot(finish, times::Arguments { by: 3.0 })
        .with_slot(finish, plus::Arguments { addend: 'a' })
        .with_slot(decode, from_table::Arguments { table: 't', len: 4 });
    use ArgumentValue::{F32, Memory, U32};
    let expected = vec![Memory('x'), Memory('o'), U32(7), Memory('t'), U32(4), F32(2.0), F32(3.0), Memory('a')];
    assert_eq!(given.bind(&chained()), Ok(expected));
}

#[test]
fn what_a_slot_lacks_is_named() {
    let (decode, finish) = (words::slot::decode, words::slot::finish);
    let decoded = || own().with_slot(decode, from_table::Arguments { table: 't', len: 4 });
    let refused = |given: LaunchArguments<char>, instance: &Instance, what: &str| {
        let error = given.bind(instance).expect_err("refused").to_string();
        assert_eq!(error, format!("kernel {instance}: {what}"));
    };
    let chained = chained();
    refused(own().into(), &chained, "parameter `decode_table`, of `from_table` in slot `decode`, has no argument");
    refused(
        decoded().with_slot(finish, plus::Arguments { addend: 'a' }),
        &chained,
        "slot `finish` got arguments of `plus`, which does not fill it there",
    );
    let plain = words::Chosen { decode: as_float::DEF, finish: vec![] }.build().expect("all slots are filled");
    refused(decoded(), &plain, "slot `decode` got arguments of `from_table`, which does not fill it there");
    assert_eq!(own().with_slot(decode, Filled::alone(as_float::DEF)).bind(&plain).expect("bound").len(), 3);
    let copies = copy::Arguments { x: 'x', out: 'o' };
    refused(copies.into(), &plain, "the arguments are those of kernel copy");
}

/// Without `fills`, a scalar before the first handle counts as the slot's.
#[device]
fn says_nothing(value: f32, index: u32, by: f32, addend: Input<f32>) -> f32 {
    value * by + addend[index]
}

#[test]
fn a_function_must_say_which_scalars_are_the_slots() {
    let instance =
        words::Chosen { decode: as_float::DEF, finish: vec![says_nothing::DEF] }.build().expect("all slots are filled");
    let given = own().with_slot(words::slot::finish, says_nothing::Arguments { addend: 'a' });
    let error = given.bind(&instance).expect_err("a scalar is missing");
    assert!(matches!(&error, ArgumentError::Parameters { function: "says_nothing", .. }), "{error}");
}

#[test]
fn views_of_memory_are_arguments_too() {
    let instance =
        words::Chosen { decode: as_float::DEF, finish: vec![times::DEF] }.build().expect("all slots are filled");
    let mut memory = Memory::new();
    let (x, out) = (memory.allocate(16), memory.allocate(16));
    memory.bytes_mut(x).copy_from_slice(&[1u32, 2, 3, 4].map(u32::to_le_bytes).concat());
    let given: LaunchArguments<View> = words::Arguments { x: memory.view(x), out: memory.view(out), n: 4 }
        .with_slot(words::slot::finish, times::Arguments { by: 0.5 });
    let bound = given.bind(&instance).expect("bound");
    launch(&instance, [1, 1, 1], &mut memory, &bound, &Options::default()).expect("it runs");
    assert_eq!(memory.bytes_mut(out), [0.5f32, 1.0, 1.5, 2.0].map(f32::to_le_bytes).concat());
}
