//! Opening whatever names a model: a plan, a GGUF file, or a name on the hub, as `gemma4c run` does it.

use std::path::PathBuf;

use gemma4c_plan::cuda::KvType;

use super::{Loading, Model};
use crate::by_name::{self, Beside, Brought};
use crate::device::Device;
use crate::error::Error;
use crate::files;
use crate::plans::{self, Made, Wanted};
use crate::progress::Fetching;

/// Sequences that a model is compiled for where nobody says.
const USUAL_SEQUENCES: u32 = 8;

/// A model that is about to be opened, however it was named. [`Model::find`] begins, [`Opener::open`] ends.
///
/// ```
/// use gemma4c::{Device, Model, Sampling};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let gguf = gemma4c::demo_model(folder.path())?;
/// let mut model = Model::find(&gguf).device(Device::Cpu).context(512).quiet().open()?;
/// assert_eq!(model.context(), 512);
/// # assert!(!model.generate("She was", &Sampling::greedy().max_tokens(4))?.text.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is opened before `open`"]
pub struct Opener {
    given: PathBuf,
    wanted: Wanted,
    sequences: Option<u32>,
    is_drafted: bool,
    is_quiet: bool,
}

impl Model {
    /// Begins to open whatever names a model: a plan, a GGUF file, or a name on Hugging Face's hub. A model is compiled
    /// for this machine, once: its plan is kept in the cache.
    pub fn find(given: impl Into<PathBuf>) -> Opener {
        let (given, wanted) = (given.into(), Wanted::default());
        Opener { given, wanted, sequences: None, is_drafted: true, is_quiet: false }
    }
}

impl Opener {
    /// What runs it: a GPU if there is one, unless set.
    pub fn device(mut self, device: Device) -> Opener {
        self.wanted.device = device;
        self
    }

    /// Positions that a sequence may have: on a GPU as many as there is memory for, on a CPU 8192, unless set.
    pub fn context(mut self, positions: u32) -> Opener {
        self.wanted.context = Some(positions);
        self
    }

    /// The type of keys and values: f16 unless set, and q8_0 where a usual context does not fit otherwise.
    pub fn kv(mut self, kv: KvType) -> Opener {
        self.wanted.kv = Some(kv);
        self
    }

    /// The part of a GPU's memory that may be taken: 0.9 unless set.
    pub fn memory(mut self, part: f64) -> Opener {
        self.wanted.memory = Some(part);
        self
    }

    /// Sequences at once: 8 unless set, or what a plan was compiled for.
    pub fn sequences(mut self, count: u32) -> Opener {
        self.sequences = Some(count);
        self
    }

    /// The GGUF file of a drafter, in place of the one that comes with a model's name.
    pub fn drafter(mut self, path: impl Into<PathBuf>) -> Opener {
        self.wanted.drafter = Some(path.into());
        self
    }

    /// Without a drafter, also where one is there.
    pub fn undrafted(mut self) -> Opener {
        self.is_drafted = false;
        self
    }

    /// Without notes and bars on standard error.
    pub fn quiet(mut self) -> Opener {
        self.is_quiet = true;
        self
    }

    /// Fetches what must be fetched, compiles what must be compiled, and loads the weights.
    pub fn open(&self) -> Result<Model, Error> {
        let brought = self.bring()?;
        let is_named = brought.is_some();
        let brought = brought.unwrap_or_else(|| Brought { model: self.given.clone(), ..Brought::default() });
        if self.sequences == Some(0) {
            return Err(Error::Option("sequences 0: at least one is needed".into()));
        }
        let Made { plan, path } = match is_named || files::is_model(&brought.model)? {
            true => self.make(brought)?,
            false => {
                self.refuse_for_plan()?;
                Made { plan: files::read_plan(&self.given)?, path: self.given.clone() }
            }
        };
        let Opener { sequences, is_drafted, is_quiet, .. } = *self;
        Model::load(plan, path, Loading { device: self.wanted.device, sequences, is_drafted, is_quiet })
    }

    /// The files of a model that is named; `None` where a file is.
    fn bring(&self) -> Result<Option<Brought>, Error> {
        let Some(name) = by_name::name(&self.given) else { return Ok(None) };
        let beside = Beside { projector: false, drafter: self.is_drafted && self.wanted.drafter.is_none() };
        let mut fetching = Fetching::default();
        let brought = by_name::bring(&name, self.wanted.device, beside, &mut |told| {
            if !self.is_quiet {
                fetching.show(told);
            }
        });
        fetching.clear();
        Ok(Some(brought?))
    }

    fn make(&self, brought: Brought) -> Result<Made, Error> {
        if let Some(part) = self.wanted.memory.filter(|part| !(*part > 0.0 && *part <= 1.0)) {
            return Err(Error::Option(format!("memory {part}: a part is more than 0 and at most 1")));
        }
        let wanted = Wanted {
            drafter: self.wanted.drafter.clone().or(brought.drafter).filter(|_| self.is_drafted),
            sequences: self.sequences.unwrap_or(USUAL_SEQUENCES),
            may_be_fewer: self.sequences.is_none(),
            verified: 1,
            ..self.wanted.clone()
        };
        plans::make(&brought.model, &wanted, &mut |note| {
            if !self.is_quiet {
                eprintln!("[{note}]");
            }
        })
    }

    /// What a model is compiled with is not for a plan, which was compiled with its own.
    fn refuse_for_plan(&self) -> Result<(), Error> {
        let Wanted { context, kv, memory, drafter, .. } = &self.wanted;
        let given = [
            ("context", context.is_some()),
            ("kv", kv.is_some()),
            ("memory", memory.is_some()),
            ("drafter", drafter.is_some()),
        ];
        let plan = self.given.display();
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => {
                Err(Error::Option(format!("{name} is for a GGUF model; {plan} is a plan, compiled with its own")))
            }
            None => Ok(()),
        }
    }
}
