//! What the assembler says about a kernel in NVRTC's log, under `--ptxas-options=-v`.
//!
//! The cubin holds the same numbers in undocumented sections; the log is the documented place. Dynamic shared memory is
//! a launch parameter and in neither.

use serde::{Deserialize, Serialize};

/// What one kernel occupies on an SM, per thread unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    pub registers: u32,
    /// Static shared memory of a block. Dynamic shared memory is not known to the compiler.
    pub shared_bytes: u32,
    /// Local memory: arrays indexed at run time, spills and call frames, calls included.
    pub stack_bytes: u32,
    /// Bytes written to local memory because registers ran out.
    pub spill_stores: u32,
    /// Bytes read back.
    pub spill_loads: u32,
}

impl Resources {
    pub fn spills(&self) -> bool {
        self.spill_stores + self.spill_loads > 0
    }
}

/// The entry functions of a log with their resources, in the log's order.
///
/// An entry's lines start at `Compiling entry function 'NAME'` and run to the next such line; what lies between
/// includes the device functions that were not inlined into it, whose spills are its spills.
pub fn entries(log: &str) -> Vec<(&str, Resources)> {
    let mut entries: Vec<(&str, Resources)> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split_once('\'').map_or(rest, |(name, _)| name);
            entries.push((name, Resources::default()));
        } else if let Some((_, resources)) = entries.last_mut() {
            resources.registers = resources.registers.max(number_in(line, "Used ", " registers"));
            resources.shared_bytes = resources.shared_bytes.max(number_before(line, " bytes smem"));
            let frame =
                number_before(line, " bytes stack frame").max(number_before(line, " bytes cumulative stack size"));
            resources.stack_bytes = resources.stack_bytes.max(frame);
            resources.spill_stores += number_before(line, " bytes spill stores");
            resources.spill_loads += number_before(line, " bytes spill loads");
        }
    }
    entries
}

/// The log without the lines that differ from run to run, so that equal inputs give equal results.
pub fn without_times(log: &str) -> String {
    let kept: Vec<&str> = log.lines().filter(|line| !line.contains("Compile time = ")).collect();
    kept.join("\n")
}

/// Lines a person should see although the kernel compiled: warnings, and the assembler's notes of lost performance.
pub(super) fn is_warning(line: &str) -> bool {
    let warns = line.contains("warning") && !line.starts_with("Remark:");
    warns || line.contains("Performance Loss")
}

/// The number right before `unit`, or 0: the assembler leaves out what is zero.
fn number_before(line: &str, unit: &str) -> u32 {
    let Some((before, _)) = line.split_once(unit) else { return 0 };
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

fn number_in(line: &str, before: &str, after: &str) -> u32 {
    line.split_once(before).map_or(0, |(_, rest)| number_before(rest, after))
}
