//! Every refusal of the kernel language, as its author sees it. `TRYBUILD=overwrite cargo test -p gemma4c-dsl --test
//! refusals` rewrites the expected messages; read the difference.

#[test]
fn refusals_say_what_to_write_instead() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
