//! The adapters that a plan is compiled with: opening them for a model, and saying what was applied.

use gemma4c_models::adapter::{self, Adapter};
use gemma4c_models::gemma4::Config;
use gemma4c_models::gguf::Header;
use gemma4c_plan::MOST_ADAPTERS;

use crate::error::Error;
use crate::options::{AdapterAt, Options};

/// Those that the options name, and how strong each is.
pub fn open(options: &Options, text: &Header) -> Result<Vec<(Adapter, f32)>, Error> {
    let given = options.adapters.len();
    if given > MOST_ADAPTERS {
        return Err(Error::Option(format!("--lora is given {given} times: a plan has at most {MOST_ADAPTERS}")));
    }
    let for_gpu = !options.gpus.is_empty();
    options.adapters.iter().enumerate().map(|at| open_one(at, text, for_gpu)).collect()
}

/// An adapter for a model, and which of its adapters it is. For a GPU, which multiplies groups of 32 values, it has
/// such a rank.
pub fn open_one((number, at): (usize, &AdapterAt), text: &Header, for_gpu: bool) -> Result<(Adapter, f32), Error> {
    let adapter = adapter::read(&at.path)?.of_model(&Config::read(text)?)?.numbered(number);
    Ok((if for_gpu { adapter.padded() } else { adapter }, at.scale))
}

/// What was applied, a sentence for each adapter.
pub fn applied(adapters: &[(Adapter, f32)]) -> Vec<String> {
    let of = |(adapter, scale): &(Adapter, f32)| {
        let times = if *scale == 1.0 { String::new() } else { format!(", times {scale}") };
        let pairs = adapter.pairs.len();
        format!("{}: applied {pairs} of {pairs} pairs{times}", adapter.path.display())
    };
    adapters.iter().map(of).collect()
}
