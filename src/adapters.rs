//! The adapters that a plan is compiled with: opening them for a model, and saying what was applied.

use gemma4c_models::adapter::{self, Adapter, Part};
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::Header;
use gemma4c_plan::MOST_ADAPTERS;

use crate::error::Error;
use crate::options::{AdapterAt, Options};

/// The model that adapters are for: its text, and the projector that has its towers.
#[derive(Clone, Copy)]
pub struct For<'a> {
    pub text: &'a Header,
    pub projector: Option<&'a Header>,
}

impl For<'_> {
    fn parts(self) -> Result<Vec<Part>, Error> {
        let mut parts = vec![Part::Text];
        if let Some(projector) = self.projector {
            parts.push(Part::Vision);
            parts.extend(gemma4::has_audio(projector)?.then_some(Part::Audio));
        }
        Ok(parts)
    }
}

/// Those that the options name, and how strong each is.
pub fn open(options: &Options, model: For<'_>) -> Result<Vec<(Adapter, f32)>, Error> {
    let given = options.adapters.len();
    if given > MOST_ADAPTERS {
        return Err(Error::Option(format!("--lora is given {given} times: a plan has at most {MOST_ADAPTERS}")));
    }
    let for_gpu = !options.gpus.is_empty();
    options.adapters.iter().enumerate().map(|at| open_one(at, model, for_gpu)).collect()
}

/// An adapter for a model, and which of its adapters it is. For a GPU, which multiplies groups of 32 values, it has
/// such a rank.
pub fn open_one((number, at): (usize, &AdapterAt), model: For<'_>, for_gpu: bool) -> Result<(Adapter, f32), Error> {
    let stored = adapter::read(&at.path)?;
    let adapter = stored.of_model(&Config::read(model.text)?, &model.parts()?)?.numbered(number);
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
