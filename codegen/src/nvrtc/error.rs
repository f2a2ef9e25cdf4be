//! Errors of finding and calling NVRTC. A compile error carries the log and the source lines it points at, numbered:
//! the text is generated, so the reader has no file to open.

use super::job::Source;
use crate::arch::Arch;
use std::fmt::Write;

/// The lines shown before and after one that an error points at.
const CONTEXT: usize = 3;
/// The errors whose lines are shown; the rest are most often consequences.
const SHOWN_ERRORS: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    #[error("NVRTC, the compiler from CUDA C to machine code, was not found.\n{}", looked_at(.looked))]
    NotFound { looked: Vec<Looked> },

    #[error("GEMMA4C_NVRTC={value}: {reason}\n{ADVICE_FOR_OVERRIDE}")]
    Override { value: String, reason: String },

    #[error("kernel `{kernel}` is wanted for {arch}, which {toolchain} does not know: it compiles for {known}")]
    UnsupportedArch { kernel: String, arch: Arch, toolchain: String, known: String },

    #[error("kernel `{kernel}` does not compile for {arch}:\n\n{report}")]
    Refused { kernel: String, arch: Arch, report: String },

    #[error("the source of kernel `{kernel}` has no `extern \"C\" __global__` function of that name; it has {found}")]
    NoEntry { kernel: String, found: String },

    #[error("kernel `{kernel}`: {what} contains a NUL character, which C cannot hold")]
    Nul { kernel: String, what: &'static str },

    #[error("kernel `{kernel}` for {arch}: NVRTC's {call} failed with {status}")]
    Call { kernel: String, arch: Arch, call: &'static str, status: String },
}

/// One place where NVRTC could have been, and why it was not taken from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    pub place: String,
    pub reason: String,
}

const ADVICE_FOR_OVERRIDE: &str =
    "It must name libnvrtc.so.13 (or .12), the folder that holds it, a CUDA toolkit or a Python environment.";

fn looked_at(looked: &[Looked]) -> String {
    let mut text = String::from("Looked at:\n");
    for Looked { place, reason } in looked {
        let _ = writeln!(text, "  {place}: {reason}");
    }
    text.push_str(
        "Any one of these helps:\n  \
         pip install 'nvidia-cuda-nvrtc==13.0.*'     in the Python environment that is active\n  \
         scripts/test.sh                             fetches it into .cache/nvrtc of the source tree\n  \
         a CUDA toolkit, 12.8 or newer               its GPU driver is not needed to compile\n  \
         GEMMA4C_NVRTC=PATH                          names the library or its folder",
    );
    text
}

/// The log, then the lines its errors point at, in the source and in the assembly text.
pub(super) fn report(source: &Source, log: &str, assembly: &str) -> String {
    let in_source = error_lines(log, &format!("{}(", source.file_name()), "):");
    let in_assembly = error_lines(log, ASSEMBLY_PLACE, ";");
    let mut text = log.trim_end().to_owned();
    for excerpt in [excerpt(&source.text, &in_source), excerpt(assembly, &in_assembly)] {
        if !excerpt.is_empty() {
            text.push_str("\n\n");
            text.push_str(excerpt.trim_end());
        }
    }
    text
}

/// How the assembler names a place in its input.
const ASSEMBLY_PLACE: &str = "ptx input, line ";

/// Whether the assembler refused what the compiler before it accepted: most often inline PTX.
pub fn blames_assembly(log: &str) -> bool {
    !error_lines(log, ASSEMBLY_PLACE, ";").is_empty()
}

/// Whether the log says what was wrong, and not only how far the assembler came.
pub fn names_an_error(log: &str) -> bool {
    log.lines().any(|line| line.contains("error") && !line.starts_with("ptxas info"))
}

/// Line numbers of the log's errors, written as `PREFIX 12 SUFFIX … error`.
pub fn error_lines(log: &str, prefix: &str, suffix: &str) -> Vec<usize> {
    let number = |line: &str| {
        let (number, message) = line.split_once(prefix)?.1.split_once(suffix)?;
        message.contains("error").then(|| number.trim().parse().ok())?
    };
    log.lines().filter_map(number).take(SHOWN_ERRORS).collect()
}

/// The marked lines of a text with their neighbours, numbered from 1; a gap shows as `...`.
pub fn excerpt(text: &str, marked: &[usize]) -> String {
    let mut shown = String::new();
    let mut previous = 0;
    for (number, line) in (1..).zip(text.lines()) {
        if !marked.iter().any(|mark| mark.abs_diff(number) <= CONTEXT) {
            continue;
        }
        if !shown.is_empty() && number > previous + 1 {
            shown.push_str("    ...\n");
        }
        let mark = if marked.contains(&number) { '>' } else { ' ' };
        let _ = writeln!(shown, "{mark}{number:5} | {line}");
        previous = number;
    }
    shown
}
