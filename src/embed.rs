//! A plan and its weights as one file, written once and never held as a whole.

use std::borrow::Cow;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use gemma4c_codegen::cuda::image;
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::cuda::Region;
use gemma4c_plan::embedded::{Embedded, Summing, host_start, same_layout};
use gemma4c_plan::{Plan, Weight};

use crate::error::Error;
use crate::files;

/// What a write hands on at a time: `progress` hears of it as often.
const PIECE: usize = 16 << 20;

/// Writes a plan with the weights it was compiled from, under its name only once it is complete, and returns its size.
/// `progress` is told the bytes of weights done and the bytes there are. `models` has the plan's files, in their order.
pub fn write(plan: &mut Plan, models: &[&Gguf], path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<u64, Error> {
    if let Err(why) = same_layout(plan) {
        return Err(Error::Option(format!(
            "--embed-weights: {why}; one image of the weights must serve all GPUs of a plan, so compile for one of them"
        )));
    }
    // What is made of pieces says by them where it is, until the plan has it as it is.
    let file_of = |weight: &Weight| weight.spans().next().map_or(weight.file, |span| span.file);
    let from: Vec<u32> = plan.weights.iter().map(file_of).collect();
    Embedded::prepare(plan).ok_or_else(too_large)?;
    let own = plan.to_bytes()?;
    let start = Embedded::start(own.len() as u64);
    let total = plan.embedded.as_ref().map_or(0, |weights| weights.bytes);
    let mut file = files::new_file(path).map_err(Error::write(path))?;
    // What it says of the weights is not known yet, but how long it is.
    file.seek(SeekFrom::Start(start)).map_err(Error::write(path))?;
    let mut weights = Weights { file: &mut file, summing: Summing::default(), done: 0, total, progress };
    write_weights(plan, (models, &from), &mut weights, path)?;
    let (done, sums) = (weights.done, weights.summing.finish());
    if done != total {
        return Err(Error::Option(format!("{done} bytes of weights were written, {total} were planned")));
    }
    if let Some(embedded) = &mut plan.embedded {
        embedded.sums = sums;
    }
    let complete = plan.to_bytes()?;
    if complete.len() != own.len() {
        let (own, complete) = (own.len(), complete.len());
        return Err(Error::Option(format!("a plan of {own} bytes has become one of {complete}")));
    }
    file.rewind().and_then(|()| file.write_all(&complete)).map_err(Error::write(path))?;
    file.persist(path).map_err(|error| Error::Write { path: path.into(), source: error.error })?;
    Ok(start + total)
}

fn too_large() -> Error {
    Error::Option("the weights are larger than any file".into())
}

/// Writes the plan's weights, each from a file of these models.
fn write_weights(
    plan: &Plan,
    (models, from): (&[&Gguf], &[u32]),
    out: &mut Weights<'_>,
    path: &Path,
) -> Result<(), Error> {
    let of_files: Vec<&Gguf> = models.iter().flat_map(|model| model.files().iter().map(move |_| *model)).collect();
    let bytes = |index: usize| -> Result<Cow<'_, [u8]>, Error> {
        let (weight, file) = (&plan.weights[index], from[index]);
        let missing = || Error::Option(format!("tensor {} of file {file} is missing", weight.name));
        let model = of_files.get(file as usize).ok_or_else(missing)?;
        Ok(model.bytes(model.tensor(&weight.name).ok_or_else(missing)?)?)
    };
    let Some(cuda) = &plan.cuda else {
        for (index, weight) in plan.weights.iter().enumerate().filter(|(_, weight)| !weight.is_reserved()) {
            let bytes = bytes(index)?;
            out.zeros_to(weight.offset).and_then(|()| out.write_all(&bytes)).map_err(Error::write(path))?;
        }
        return Ok(());
    };
    let program = &cuda.program;
    let tensor = |weight: gemma4c_plan::WeightId| bytes(weight.index()).map_err(|error| error.to_string());
    image::write_region(program, &plan.weights, Region::Weights, &tensor, out).map_err(Error::within(path))?;
    if program.memory.host > 0 {
        out.zeros_to(host_start(program).ok_or_else(too_large)?).map_err(Error::write(path))?;
        image::write_region(program, &plan.weights, Region::Host, &tensor, out).map_err(Error::within(path))?;
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
