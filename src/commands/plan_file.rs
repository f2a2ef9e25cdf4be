//! The arguments that say which plan is run, where, and by how many sequences at once; and opening it with a bar.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use gemma4c_plan::Plan;
use gemma4c_runtime::engine::{self, Engine, Gap};
use gemma4c_runtime::{ModelLocation, OnGpu, Session};

use crate::device::{Device, EngineOptions, Place};
use crate::output::{self, OutputFile};
use crate::{files, progress};

/// A plan, and where its model may lie.
#[derive(Clone, clap::Args)]
pub struct PlanArgs {
    /// A plan, as written by `gemma4c compile`.
    #[arg(value_name = "PLAN.bin")]
    pub plan: PathBuf,

    /// The model file, or its folder, if it has moved.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// The device to run on.
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,

    /// Of a plan for several GPUs: the program to run, by the GPU's name [default: the one that fits the GPU best]
    #[arg(long, value_name = "GPU")]
    pub program: Option<String>,

    /// Use that many SMs of the GPU and no others, to time a plan for a smaller one.
    #[arg(long, value_name = "N")]
    pub sms: Option<u32>,

    /// Bytes of the GPU's memory that it may take, where somebody says.
    #[arg(skip)]
    pub memory: Option<u64>,

    /// The plan itself, where a model was given and it was made on the way.
    #[arg(skip)]
    pub made: Option<Box<Plan>>,
}

impl PlanArgs {
    /// Reads and checks the plan, but not its weights.
    pub fn read(&self) -> Result<Plan> {
        match &self.made {
            Some(plan) => Ok((**plan).clone()),
            None => Ok(files::read_plan(&self.plan)?),
        }
    }

    /// Loads the plan and its model.
    pub fn open(&self) -> Result<Session> {
        self.open_read(self.read()?)
    }

    /// The same of the plan, once read.
    pub fn open_read(&self, plan: Plan) -> Result<Session> {
        open(&self.place(), plan)
    }

    /// Makes a plan ready to run many sequences, for whoever waits for the last of them.
    pub fn open_engine(&self, plan: Plan, options: EngineOptions) -> Result<Engine<Box<dyn engine::Device>>> {
        let bar = progress::bytes("loading", 0);
        let opened = self.place().open_engine(plan, options, &mut |told| progress::show_loading(&bar, told));
        bar.finish_and_clear();
        Ok(opened?)
    }

    pub fn place(&self) -> Place {
        Place { location: self.location(), device: self.device, on: self.on_gpu() }
    }

    pub fn on_gpu(&self) -> OnGpu {
        OnGpu { program: self.program.clone(), multiprocessors: self.sms, memory: self.memory }
    }

    pub fn location(&self) -> ModelLocation {
        ModelLocation { plan: self.plan.clone(), given: self.model.clone() }
    }
}

/// How an engine shares the device, from the command line.
#[derive(Clone, Copy, Default, clap::Args)]
pub struct EngineArgs {
    /// Of many sequences: the longest gap between tokens that the prompts of others may cause [default: prompts come
    /// first; of serve, a chunk of 512 tokens, within 20 and 80 ms]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub itl: Option<Duration>,

    /// Of many sequences: host memory, such as 8GiB, for prefixes of prompts that the device has no room to keep
    /// [default: none]
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub host_cache: Option<u64>,
}

impl EngineArgs {
    /// Refuses what a command that opens no engine would not heed.
    pub fn refuse_without(&self, what: &str) -> Result<()> {
        ensure!(self.itl.is_none(), "--itl is for many sequences: it needs {what}");
        ensure!(self.host_cache.is_none(), "--host-cache is for many sequences: it needs {what}");
        Ok(())
    }

    /// The longest gap between tokens. Where somebody waits for each answer, prompts do not come first.
    pub fn gap(&self, serves: bool) -> Gap {
        match self.itl {
            Some(itl) => Gap::Within(itl),
            None if serves => Gap::Measured,
            None => Gap::Any,
        }
    }

    /// What these arguments say of an engine's options, for whoever waits for the last answer.
    pub fn options(&self) -> EngineOptions {
        EngineOptions { gap: self.gap(false), host_bytes: self.host_bytes(), ..EngineOptions::default() }
    }

    pub fn host_bytes(&self) -> u64 {
        self.host_cache.unwrap_or(0)
    }
}

/// A time, with its unit or without.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix("ms").unwrap_or(text).trim();
    let number: f64 = number.parse().map_err(|_| "a time is a number of milliseconds, such as 50ms".to_owned())?;
    match number > 0.0 {
        true => Duration::try_from_secs_f64(number / 1000.0).map_err(|_| "out of range".into()),
        false => Err("more than 0 is needed".into()),
    }
}

/// A number of positions, in thousands of 1,024 with a k: 32k is 32768.
pub fn positions(text: &str) -> Result<u32, String> {
    let (number, factor) = match text.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1024),
        None => (text, 1),
    };
    let number: u32 =
        number.parse().map_err(|_| "a context is a number of positions, such as 8192 or 8k".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "out of range".into())
}

/// A part of something: more than 0, at most 1.
pub fn part(text: &str) -> Result<f64, String> {
    let part: f64 = text.parse().map_err(|_| "a part is a number such as 0.9".to_owned())?;
    if part > 0.0 && part <= 1.0 { Ok(part) } else { Err("a part is more than 0 and at most 1".into()) }
}

/// Bytes, with a unit or without.
pub fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "mib" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err("a size is a number with B, MB, GB, MiB or GiB".into()),
    };
    let number: f64 = number.parse().map_err(|_| "a size starts with a number".to_owned())?;
    let bytes = number * factor as f64;
    if bytes.is_finite() && bytes >= 1.0 && bytes < u64::MAX as f64 {
        Ok(bytes as u64)
    } else {
        Err("out of range".into())
    }
}

/// Makes a plan ready to run one sequence, with a bar.
pub fn open(place: &Place, plan: Plan) -> Result<Session> {
    let bar = progress::bytes("loading", 0);
    let opened = place.open_session(plan, &mut |told| progress::show_loading(&bar, told));
    bar.finish_and_clear();
    Ok(opened?)
}

/// Writes a plan under its name only once it is complete.
pub fn write(plan: &Plan, path: &OutputFile) -> Result<u64> {
    let bytes = plan.to_bytes()?;
    output::write_whole(path, &bytes)?;
    Ok(bytes.len() as u64)
}
