//! Models that are named instead of given as files: `user/repository`, or `user/repository:tag`. They come from Hugging
//! Face's hub, or from its cache where they are already, and from there on they are files like any other.

use std::path::{Path, PathBuf};
use std::time::Instant;

use gemma4c_blocks::DType;
use gemma4c_hub::pick::{self, Selection, Variant, Wanted};
use gemma4c_hub::{Hub, HubError, ModelName, Progress};
use gemma4c_runtime::machine;

use crate::device::Device;
use crate::output;

/// What else of a repository is of use.
#[derive(Clone, Copy)]
pub struct Beside {
    pub projector: bool,
    pub drafter: bool,
}

/// The files of a model that was named.
#[derive(Default)]
pub struct Brought {
    pub model: PathBuf,
    pub projector: Option<PathBuf>,
    pub drafter: Option<PathBuf>,
}

/// What is told while a model is fetched.
pub enum Told<'a> {
    /// A decision, or something that takes time.
    Note(String),
    /// So many bytes of a file are here, of so many.
    Arrived { name: &'a str, bytes: u64, total: u64 },
    /// The file is here as a whole.
    Whole,
}

/// Of a machine's memory, what weights may take: the rest is for keys and values, activations and whoever else is there.
const FOR_WEIGHTS: (u64, u64, &str) = (4, 5, "four fifths");

/// The name that stands where a file could; `None` where there is such a file, or there can be no such name.
pub fn name(given: &Path) -> Option<ModelName> {
    given.to_str().filter(|_| !given.exists()).and_then(ModelName::parse)
}

/// Brings a model's files here. Without a tag, the best for where it will run.
pub fn bring(
    name: &ModelName,
    device: Device,
    beside: Beside,
    tell: &mut dyn FnMut(Told<'_>),
) -> Result<Brought, HubError> {
    let hub = Hub::from_env()?;
    let found = hub.look_up(&name.repository)?;
    let repository = &found.repository;
    if let Some(why) = &found.instead {
        tell(Told::Note(format!("{} as it is in the cache: {why}", name.repository)));
    }
    if repository.name != name.repository {
        tell(Told::Note(format!("{} is called {} now", name.repository, repository.name)));
    }
    let (room, place) = room(device);
    let wanted = Wanted {
        tag: name.tag.as_deref(),
        room: (room, &place),
        is_readable: &is_readable,
        projector: beside.projector,
        drafter: beside.drafter,
    };
    let selection = pick::select(repository, &wanted)?;
    tell(Told::Note(format!("{}: {}", repository.name, describe(&selection))));
    let files = selection.files();
    let missing: u64 = files.iter().filter(|file| !hub.has(repository, file)).map(|file| file.bytes).sum();
    let started = Instant::now();
    let paths = hub.fetch(repository, &files, &mut |what| match what {
        Progress::Waits { file } => {
            tell(Told::Note(format!("{} is being fetched by another program: waiting for it", file.name)));
        }
        Progress::Arrived { file, bytes } => tell(Told::Arrived { name: &file.name, bytes, total: file.bytes }),
        Progress::Whole { .. } => tell(Told::Whole),
    })?;
    if missing > 0 {
        let seconds = started.elapsed().as_secs_f64();
        tell(Told::Note(format!("fetched {} in {seconds:.1} s", output::bytes(missing))));
    }
    let first_of = |variant: &Option<Variant<'_>>| {
        let first = variant.as_ref()?.files.first()?;
        let at = files.iter().position(|file| file == first)?;
        paths.get(at).cloned()
    };
    let (projector, drafter) = (first_of(&selection.projector), first_of(&selection.drafter));
    Ok(Brought { model: paths[0].clone(), projector, drafter })
}

/// `Q8_0, 8.03 GB, with projector mmproj-BF16.gguf, 990 MB; as asked for`.
fn describe(selection: &Selection<'_>) -> String {
    let sized = |variant: &Variant<'_>| output::bytes(variant.bytes());
    let mut text = format!("{}, {}", selection.model.tag, sized(&selection.model));
    for (what, variant) in [("projector", &selection.projector), ("drafter", &selection.drafter)] {
        if let Some(variant) = variant {
            text += &format!(", with {what} {}, {}", variant.files[0].name, sized(variant));
        }
    }
    format!("{text}; {}", selection.why)
}

/// Bytes that weights may take where the model will run, and the same for people.
fn room(device: Device) -> (u64, String) {
    let gpu = machine::gpus().ok().and_then(|gpus| gpus.into_iter().next());
    let (memory, whose) = match gpu.filter(|_| matches!(device, Device::Auto | Device::Cuda)) {
        Some(gpu) => (gpu.memory, gpu.name),
        None => (machine::cpu().memory.unwrap_or(u64::MAX), "this machine".to_owned()),
    };
    let (of, all, share) = FOR_WEIGHTS;
    let room = memory / all * of;
    (room, format!("{}, {share} of the memory of {whose}", output::bytes(room)))
}

/// Whether weights of a format can be read, as quantisers call it.
fn is_readable(format: &str) -> bool {
    DType::from_name(&format.to_ascii_lowercase()).is_some()
}
