//! The proc macros of `gemma4c-dsl`: a shim over functions on token streams, which are tested as such.

mod dataflow;
mod kernel;

use proc_macro::TokenStream;

/// Names graph nodes after the bindings of the function that builds them. See `gemma4c_dsl`.
#[proc_macro_attribute]
pub fn dataflow(attribute: TokenStream, item: TokenStream) -> TokenStream {
    // The item comes back even when it is refused, so that an editor goes on working.
    dataflow::expand(attribute.into(), item.clone().into()).map_or_else(
        |error| {
            let mut out = TokenStream::from(error.to_compile_error());
            out.extend(item);
            out
        },
        TokenStream::from,
    )
}

/// Prints a Rust function as a CUDA kernel and keeps it as its meaning. See `gemma4c_dsl`.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::kernel(attribute.into(), item.into()).into()
}

/// Prints a Rust struct as a C++ struct of registers, for kernels and device functions to use. See `gemma4c_dsl`.
#[proc_macro_attribute]
pub fn registers(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::registers(attribute.into(), item.into()).into()
}

/// Prints a Rust struct as a C++ struct of memory handles and numbers that travel together. See `gemma4c_dsl`.
#[proc_macro_attribute]
pub fn view(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::view(attribute.into(), item.into()).into()
}

/// Makes a Rust struct a list of compile-time parameters that travel together. See `gemma4c_dsl`.
#[proc_macro_attribute]
pub fn config(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::config(attribute.into(), item.into()).into()
}

/// Prints a Rust function as a CUDA device function, for kernels to call and slots to be filled with. See
/// `gemma4c_dsl`.
#[proc_macro_attribute]
pub fn device(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::device(attribute.into(), item.into()).into()
}
