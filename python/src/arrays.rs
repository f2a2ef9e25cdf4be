//! Numbers for numpy, which is imported only where an array is asked for.

use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// A float32 array of this shape, of rows that follow each other.
pub fn floats<'py, 'a>(
    py: Python<'py>,
    shape: &[usize],
    rows: impl Iterator<Item = &'a [f32]>,
) -> PyResult<Bound<'py, PyAny>> {
    let count: usize = shape.iter().product();
    // Python's own memory: the array looks at it, and may write to it.
    let bytes = PyByteArray::new_with(py, 4 * count, |bytes| {
        let mut rest = bytes;
        for row in rows {
            let (own, after) = rest.split_at_mut(4 * row.len());
            own.chunks_exact_mut(4).zip(row).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
            rest = after;
        }
        Ok(())
    })?;
    py.import("numpy")?.call_method1("frombuffer", (bytes, "<f4"))?.call_method1("reshape", (shape.to_vec(),))
}
