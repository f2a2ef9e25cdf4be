//! A plan and its weights as one file, written once and never held as a whole.

use std::io::{self, Seek, SeekFrom, Write};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_codegen::cuda::image;
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::Region;
use gemma4c_plan::embedded::{Embedded, Summing, host_start, same_layout};

use crate::output::{self, OutputFile};

/// What a write hands on at a time: `progress` hears of it as often.
const PIECE: usize = 16 << 20;

/// Writes a plan with the weights it was compiled from, under its name only once it is complete, and returns its size. `progress` is
/// told the bytes of weights done and the bytes there are. `models` has the plan's files, in their order.
pub fn write(plan: &mut Plan, models: &[&Gguf], path: &OutputFile, progress: &mut dyn FnMut(u64, u64)) -> Result<u64> {
    let cannot_write = || format!("cannot write {}", path.display());
    if let Err(why) = same_layout(plan) {
        bail!(
            "--embed-weights: {why}; one image of the weights must serve all GPUs of a plan, so compile for one of them"
        );
    }
    Embedded::prepare(plan).context("the weights are larger than any file")?;
    let own = plan.to_bytes()?;
    let start = Embedded::start(own.len() as u64);
    let total = plan.embedded.as_ref().map_or(0, |weights| weights.bytes);
    let mut file = output::new_file(path)?;
    // What it says of the weights is not known yet, but how long it is.
    file.seek(SeekFrom::Start(start)).with_context(cannot_write)?;
    let mut weights = Weights { file: &mut file, summing: Summing::default(), done: 0, total, progress };
    write_weights(plan, models, &mut weights).with_context(cannot_write)?;
    let (done, sums) = (weights.done, weights.summing.finish());
    ensure!(done == total, "{done} bytes of weights were written, {total} were planned");
    if let Some(embedded) = &mut plan.embedded {
        embedded.sums = sums;
    }
    let complete = plan.to_bytes()?;
    ensure!(complete.len() == own.len(), "a plan of {} bytes has become one of {}", own.len(), complete.len());
    file.rewind().with_context(cannot_write)?;
    file.write_all(&complete).with_context(cannot_write)?;
    file.persist(path).with_context(cannot_write)?;
    Ok(start + total)
}

fn write_weights(plan: &Plan, models: &[&Gguf], out: &mut Weights<'_>) -> Result<()> {
    let of_files: Vec<&Gguf> = models.iter().flat_map(|model| model.files().iter().map(move |_| *model)).collect();
    let mut tensors = Vec::new();
    for weight in &plan.weights {
        let model = of_files.get(weight.file as usize).with_context(|| format!("file {} is missing", weight.file))?;
        let tensor = model.tensor(&weight.name).with_context(|| format!("tensor {} is missing", weight.name))?;
        tensors.push(model.data(tensor));
    }
    let Some(cuda) = &plan.cuda else {
        for (weight, bytes) in plan.weights.iter().zip(tensors) {
            out.zeros_to(weight.offset)?;
            out.write_all(bytes)?;
        }
        return Ok(());
    };
    let program = &cuda.program;
    image::write_region(program, &plan.weights, Region::Weights, &|weight| tensors[weight as usize], out)?;
    if program.memory.host > 0 {
        out.zeros_to(host_start(program).context("the weights are larger than any file")?)?;
        image::write_region(program, &plan.weights, Region::Host, &|weight| tensors[weight as usize], out)?;
    }
    Ok(())
}

/// Where the weights go: every byte is written once, and summed on its way.
struct Weights<'a> {
    file: &'a mut dyn Write,
    summing: Summing,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Weights<'_> {
    fn zeros_to(&mut self, end: u64) -> io::Result<()> {
        let zeros = vec![0; end.saturating_sub(self.done) as usize];
        self.write_all(&zeros)
    }
}

impl Write for Weights<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(&bytes[..bytes.len().min(PIECE)])?;
        self.summing.update(&bytes[..written]);
        self.done += written as u64;
        (self.progress)(self.done, self.total);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
