//! `gemma4c doctor`: what this machine has for gemma4c, and what to do about what it lacks.

use anyhow::Result;
use gemma4c_codegen::nvrtc::Toolchain;
use gemma4c_runtime::machine;

use super::{Outcome, cached};
use crate::output::{self, print};

/// Show what gemma4c finds on this machine: processor, memory, NVIDIA driver and GPUs, NVRTC.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: &Args) -> Result<Outcome> {
    let cpu = machine::cpu();
    print(&format!("cpu      {} threads, vectors: {}\n", cpu.threads, cpu.vectors))?;
    let memory = cpu.memory.map_or("unknown".into(), output::bytes);
    print(&format!("memory   {memory}\n"))?;
    let gpus = machine::gpus();
    let has_gpu = gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty());
    match gpus {
        Ok(gpus) if gpus.is_empty() => print("gpu      none: the driver is there, but it sees no device\n")?,
        Ok(gpus) => {
            for gpu in gpus {
                let (major, minor) = gpu.compute_capability;
                let memory = output::bytes(gpu.memory);
                print(&format!("gpu      {}, compute capability {major}.{minor}, {memory}\n", gpu.name))?;
            }
        }
        Err(why) => print(&format!("gpu      none: {why}\n"))?,
    }
    let toolchain = Toolchain::find();
    let compiles = toolchain.is_ok();
    match toolchain {
        Ok(found) => print(&format!("nvrtc    {found}\n"))?,
        Err(error) => print(&format!("nvrtc    {error}\n"))?,
    }
    print(&format!(
        "cache    {}\n",
        cached::Contents::read().map_or_else(|error| error.to_string(), |contents| contents.to_string())
    ))?;
    print(&format!("\n{}\n", verdict(has_gpu, compiles)))?;
    Ok(Outcome::Done)
}

/// What can be done here. A plan for a CPU needs nothing; one for a GPU is compiled by NVRTC, and is run by the driver.
fn verdict(has_gpu: bool, compiles: bool) -> &'static str {
    match (has_gpu, compiles) {
        (true, true) => "Plans for the GPU and for the cpu compile and run on this machine.",
        (true, false) => {
            "Plans for the cpu compile and run on this machine. Plans for the GPU run, but do not compile without NVRTC."
        }
        (false, true) => {
            "Plans for the cpu compile and run on this machine. Plans for a GPU compile, but do not run without one."
        }
        (false, false) => "Plans for the cpu compile and run on this machine.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert!(verdict(true, true).contains("GPU and for the cpu"));
        assert!(verdict(true, false).ends_with("without NVRTC."));
        assert!(verdict(false, true).ends_with("do not run without one."));
        assert!(!verdict(false, false).contains("GPU"));
    }
}
