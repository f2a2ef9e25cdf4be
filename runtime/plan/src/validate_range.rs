//! A range lies in its region.

use crate::cuda::{CudaProgram, Range};

pub(crate) fn check_range(program: &CudaProgram, range: &Range, what: &str) -> Result<(), String> {
    let size = program.memory.of(range.region);
    match range.offset.checked_add(range.bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(format!("{what} takes {} bytes at {} of {size} in {:?}", range.bytes, range.offset, range.region)),
    }
}
