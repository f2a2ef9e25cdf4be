//! How large a function may be: lines of any, parameters of those that become CUDA.
//!
//! A reader takes in a function of a page and eight arguments; what is larger has parts with names. Kernels have the structs of
//! the language for that (`#[config]`, `#[view]`), and device functions for their stages. Kernels of matrix products are excepted:
//! their parameters are not counted, and the list below names those that are longer. It is exact: a function that has become
//! small enough must leave it.

use std::collections::BTreeSet;

use super::source::Source;
use super::{none, sources};

/// Lines of a function outside tests, from its name to its last brace.
const MOST_LINES: usize = 150;
/// Parameters of a kernel or a device function, and as many compile-time parameters: a view or a config is one.
const MOST_PARAMETERS: usize = 8;
/// Kernels of matrix products, whose parameters are not counted.
const PRODUCTS: [&str; 4] = ["matvec", "rows", "product", "quantise"];

/// Functions that are longer: kernels of products.
const LONG: [&str; 8] = [
    "codegen/src/kernels/matvec/mod.rs: matvec",
    "codegen/src/kernels/product/decoding.rs: product_decoding",
    "codegen/src/kernels/product/fed.rs: product_fed",
    "codegen/src/kernels/rows/cores.rs: rows_matvec",
    "codegen/src/kernels/rows/mma.rs: rows_mma",
    "codegen/src/kernels/rows/steps.rs: rows_tiles_in_steps",
    "codegen/src/kernels/rows/stream.rs: rows_stream",
    "codegen/src/kernels/rows/tiles.rs: rows_tiles",
];

#[test]
fn functions_fit_on_a_page() {
    compare("longer than 150 lines. Cut it into stages, named for what they do:", long, &LONG);
}

#[test]
fn kernels_take_few_parameters() {
    let remedy = "a kernel or device function with more than eight parameters, or compile-time parameters. Group by meaning \
                  what travels together, as `#[view]` or `#[config]`:";
    none(&format!("A function is {remedy}"), sources().iter().flat_map(many_parameters).collect());
}

/// What the rule finds, and what the list says that it finds.
fn compare(remedy: &str, rule: fn(&Source) -> Vec<String>, listed: &[&str]) {
    let found: BTreeSet<String> = sources().iter().flat_map(rule).collect();
    let listed: BTreeSet<String> = listed.iter().map(|place| place.to_string()).collect();
    none(&format!("A function is {remedy}"), found.difference(&listed).cloned().collect());
    none("Listed as too large, but it is not. Delete the line here:", listed.difference(&found).cloned().collect());
}

pub fn long(source: &Source) -> Vec<String> {
    let functions = source.functions().into_iter();
    functions.filter(|f| f.lines > MOST_LINES).map(|f| format!("{}: {}", source.path, f.name)).collect()
}

pub fn many_parameters(source: &Source) -> Vec<String> {
    let kernels = "codegen/src/kernels/";
    let is_product = source.path.strip_prefix(kernels).is_some_and(|path| {
        PRODUCTS.iter().any(|folder| path.starts_with(&format!("{folder}/")) || path == format!("{folder}.rs"))
    });
    let functions = source.functions().into_iter().filter(|f| f.is_cuda && !is_product);
    let is_large = |f: &super::source::Function| f.parameters > MOST_PARAMETERS || f.generics > MOST_PARAMETERS;
    functions.filter(is_large).map(|f| format!("{}: {}", source.path, f.name)).collect()
}
