//! The compile-time parameters that the threads of a launch ask for, found by the addresses of their names.
//!
//! Every call of a device function asks for all of its own. Comparing the names' texts each time took a third of a simulated launch.

use crate::values::{ConstantValue, Values};
use std::cell::Cell;

/// A power of two, several times as many as a kernel and its device functions have.
const PLACES: usize = 64;

/// What was asked for last at each place. Two names that share a place cost time, and give no wrong value.
pub(crate) struct Constants([Cell<Option<(&'static str, ConstantValue)>>; PLACES]);

impl Default for Constants {
    fn default() -> Self {
        Self([const { Cell::new(None) }; PLACES])
    }
}

impl Constants {
    /// The constant `name` of the launch's instance. One name has several addresses where several crates spell it.
    #[inline]
    pub fn value(&self, values: &Values, name: &'static str) -> ConstantValue {
        let place = &self.0[(name.as_ptr() as usize).wrapping_mul(0x9e37_79b9) >> 8 & (PLACES - 1)];
        match place.get() {
            Some((known, value)) if std::ptr::eq(known, name) => value,
            _ => {
                let value = values.value(name);
                place.set(Some((name, value)));
                value
            }
        }
    }
}
