//! What can go wrong between a model's file and the text that it writes.

use std::io;
use std::path::{Path, PathBuf};

use gemma4c_codegen::cuda::image::ImageError;
use gemma4c_codegen::cuda::simulate::SimulateError;
use gemma4c_codegen::nvrtc::NvrtcError;
use gemma4c_codegen::{cpu, cuda};
use gemma4c_hub::HubError;
use gemma4c_models::adapter::AdapterError;
use gemma4c_models::chat::ChatError;
use gemma4c_models::checkpoint::CheckpointError;
use gemma4c_models::gemma4::{AudioError, ConfigError, DrafterError, ModelError, OpenError, VisionError};
use gemma4c_models::gguf::GgufError;
use gemma4c_models::tokenizer::{TokenizerError, VocabError};
use gemma4c_plan::PlanError;
use gemma4c_runtime::RuntimeError;
use gemma4c_runtime::engine::RequestError;
use gemma4c_serve::{DialogueError, SpeechError};

/// Why a model cannot be compiled, opened or asked. Each error names the file, tensor, option or token that it is
/// about.
///
/// ```
/// use gemma4c::{Error, Model};
///
/// let error = Model::open("nowhere.bin").unwrap_err();
/// assert!(matches!(error, Error::Read { .. }));
/// assert_eq!(error.to_string(), "cannot read nowhere.bin");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file is neither a plan nor a model, or the one where the other is wanted.
    #[error("{} {why}", path.display())]
    WrongFile {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        why: String,
    },
    /// A file has a fault of its own.
    #[error("{}", path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// Its fault.
        source: Box<Error>,
    },
    /// Of several GPUs, the one that there is no program for.
    #[error("for {gpu}")]
    For {
        /// The GPU.
        gpu: String,
        /// Why there is none.
        source: Box<Error>,
    },
    /// What a plan is to be compiled with contradicts itself, the model or the machine.
    #[error("{0}")]
    Option(String),
    /// The model has no vocabulary: it reads and writes token ids alone.
    #[error("the model has no vocabulary: give token ids")]
    NoVocabulary,
    /// The model has no chat template, so it cannot be given messages.
    #[error("the model has no chat template: give a text, not messages")]
    NoChatTemplate,
    /// Messages or tools are not what they must be.
    #[error(transparent)]
    Dialogue(#[from] DialogueError),
    /// Somebody ended it ([`Interrupt::set`](crate::Interrupt::set)).
    #[error("interrupted")]
    Interrupted,
    /// A file is no GGUF file, or a damaged one.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A folder or a file of safetensors is no checkpoint that can be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An adapter cannot be read, or not be applied whole.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// A GGUF file is no Gemma 4, or one that is described wrongly.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model lacks tensors, or has some of other shapes.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The projector's tower for pictures cannot be used.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// The projector's tower for sound cannot be used.
    #[error(transparent)]
    Audio(#[from] AudioError),
    /// The drafter cannot be used.
    #[error(transparent)]
    Drafter(#[from] DrafterError),
    /// The model's vocabulary is damaged.
    #[error(transparent)]
    Vocab(#[from] VocabError),
    /// A text or a token cannot be turned into the other.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be read, or refuses the messages.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The graph cannot be lowered for a CPU.
    #[error(transparent)]
    CpuLowering(#[from] cpu::LowerError),
    /// The graph cannot be lowered for a GPU.
    #[error(transparent)]
    Lowering(#[from] cuda::LowerError),
    /// NVRTC is not there, or does not compile a kernel.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// Weights cannot be brought into a GPU's layout.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A file is no plan, or a damaged one.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A launch fails in the simulator.
    #[error(transparent)]
    Simulation(#[from] SimulateError),
    /// The plan cannot be loaded or run.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// A model is not found by its name, or not fetched.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// A prompt cannot be answered.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl Error {
    /// For `map_err`: a file that cannot be read.
    pub(crate) fn read(path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Read { path: path.into(), source }
    }

    /// For `map_err`: a file that cannot be written.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Write { path: path.into(), source }
    }

    /// For `map_err`: a fault of a file.
    pub(crate) fn within<E: Into<Error>>(path: &Path) -> impl FnOnce(E) -> Error {
        move |source| Error::In { path: path.into(), source: Box::new(source.into()) }
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Error {
        match error {
            OpenError::Gguf(error) => error.into(),
            OpenError::Checkpoint(error) => error.into(),
        }
    }
}

impl From<SpeechError> for Error {
    fn from(error: SpeechError) -> Error {
        match error {
            SpeechError::NoVocabulary => Error::NoVocabulary,
            SpeechError::Tokenizer(error) => error.into(),
            SpeechError::Template(error) => error.into(),
        }
    }
}
