//! What tests of compiled kernels share: NVRTC, or a loud word that it is missing.

use crate::skipped;
use gemma4c_codegen::nvrtc::Toolchain;

/// This machine's NVRTC. Where it is expected (`CI`, or `GEMMA4C_REQUIRE_NVRTC` as the test script sets it) a missing one
/// fails the test; elsewhere the test is left out, and says so.
pub fn toolchain() -> Option<Toolchain> {
    let error = match Toolchain::find() {
        Ok(toolchain) => return Some(toolchain),
        Err(error) => error,
    };
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "false");
    let expected = ["CI", "GEMMA4C_REQUIRE_NVRTC"].into_iter().find(is_set);
    if let Some(name) = expected {
        panic!("{name} is set, so NVRTC must be here.\n{error}");
    }
    skipped::not_checked(&error.to_string());
    None
}
