//! Calls of what fills a slot, and the memory that it takes from the launch.

use super::memory::{InOut, Input, Output, Weights};
use super::thread::Thread;
use crate::elements::Element;
use crate::passing::{FromSlot, InOrder, SlotArguments, SlotValue, Word4, Words};
use std::cell::Cell;

macro_rules! from_slot_handles {
    ($($name:ident)*) => { $(impl<T: Element> FromSlot for $name<T> {
        fn from_slot(arguments: &SlotArguments<'_>) -> Self {
            let at = arguments.advance(1);
            let next = Cell::new(arguments.first + at - arguments.values.len());
            InOrder { launch: arguments.launch, next }.next()
        }
    })* };
}
from_slot_handles!(Weights Input Output InOut);

/// Calls what fills a slot.
#[doc(hidden)]
pub fn slot<T: SlotValue>(number: usize, values: Words) -> T {
    T::from_words(call(number, values).0)
}

fn call(number: usize, Words(mut values): Words) -> Word4 {
    let launch = Thread::current().launch();
    let fill = &launch.instance.fills()[number];
    for (function, &first) in fill.functions.iter().zip(&fill.extra) {
        let call = function.call.expect("checked when the instance was built");
        let result = call(&SlotArguments { values: &values, launch, first, taken: Cell::new(0) });
        values[0] = result;
    }
    values[0]
}

/// Where a view that no launch gives would come from a slot: the definition of such a function says that it fills none.
#[doc(hidden)]
pub fn not_in_a_slot() -> ! {
    unreachable!("a function with a view that no launch gives fills no slot")
}
