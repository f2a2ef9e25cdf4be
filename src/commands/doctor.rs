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
    match machine::gpus() {
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
    match Toolchain::find() {
        Ok(found) => print(&format!("nvrtc    {found}\n"))?,
        Err(error) => print(&format!("nvrtc    {error}\n"))?,
    }
    print(&format!("cache    {}\n", cached::described()))?;
    print("\nPlans for the cpu compile and run on this machine.\n")?;
    Ok(Outcome::Done)
}
