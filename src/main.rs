//! gemma4c: the command line. All of it is in the library target, which tests import too.

use std::process::ExitCode;

fn main() -> ExitCode {
    gemma4c::main()
}
