//! gemma4c as a Python module: the library's models, and the whole program as a function.
//!
//! A model is owned by a thread of its own (`worker.rs`): while it computes, Python runs, and hears of Ctrl-C. Nothing
//! here is done once a token, but for the pieces of a stream. What Python sees is described in `gemma4c/_gemma4c.pyi`.

mod answer;
mod arguments;
mod arrays;
mod model;
mod worker;

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    gemma4c,
    Error,
    PyException,
    "Why a model cannot be found, compiled, opened or asked. The text names the file, argument or token that it is about."
);

/// An error of the library, with its causes.
fn raised(error: gemma4c::Error) -> PyErr {
    Error::new_err(gemma4c::message(error))
}

#[pymodule]
mod _gemma4c {
    use std::ffi::OsString;
    use std::io::{self, Write};
    use std::path::PathBuf;

    use pyo3::prelude::*;

    #[pymodule_export]
    use super::Error;
    #[pymodule_export]
    use super::answer::{Completion, Stream, ToolCall};
    #[pymodule_export]
    use super::model::{Model, demo_model};

    /// Runs the program with these arguments, its own name first, and returns the code to exit with.
    #[pyfunction]
    fn main(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<u8> {
        let code = py.detach(|| {
            let code = gemma4c::main_of(arguments.into_iter());
            // Nobody else flushes what this library's own standard library holds.
            io::stdout().flush().map(|()| code)
        });
        Ok(code.unwrap_or(0))
    }

    /// Says which file this module is, and in which folders NVIDIA's packages are.
    #[pyfunction]
    fn installed(module: PathBuf, packages: Vec<PathBuf>) {
        gemma4c::installation::set(module, packages);
    }
}
