//! Where libnvrtc may be: one list of places, tried in order, the first that loads wins.
//!
//! `GEMMA4C_NVRTC` comes first and alone: what a person names is used or is an error, never silently replaced. Then the
//! source tree's own copy, so that register counts are the same on every developer's machine, whatever is installed
//! there; then what came with this library where it was installed with a package manager ([`came_with`]), the library
//! path, CUDA toolkits and Python environments. The working directory is not searched: a library runs code when it is
//! loaded.

use super::error::{Looked, NvrtcError};
use super::sys;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The names libnvrtc goes by, the newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where to look for libnvrtc.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// A library file or one of the folders below it: the only place looked at, if given.
    pub named: Option<PathBuf>,
    /// The source tree's own copy.
    pub source_tree: Option<PathBuf>,
    /// Folders of packages that were installed together with this library.
    pub packages: Vec<PathBuf>,
    /// Whether to ask the system's loader (LD_LIBRARY_PATH and the system's folders).
    pub library_path: bool,
    /// CUDA toolkits and Python environments by what led to them; `None` where that led nowhere.
    pub prefixes: Vec<(String, Option<PathBuf>)>,
}

/// A library that loaded, and what led to it.
pub(super) struct Found {
    pub library: sys::Library,
    pub path: PathBuf,
    pub through: String,
}

static PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// From here on libnvrtc is also looked for in these folders of packages. For a library that does not know where its
/// dependencies were installed, and whose environment need not say so: a Python that runs by its path alone has no
/// `$VIRTUAL_ENV`.
pub fn came_with(packages: Vec<PathBuf>) {
    *PACKAGES.lock().unwrap_or_else(PoisonError::into_inner) = packages;
}

impl Places {
    /// The places of this machine and environment.
    pub fn from_env() -> Places {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let mut prefixes = Vec::new();
        for name in ["CUDA_HOME", "CUDA_PATH"] {
            prefixes.push((format!("${name}"), variable(name)));
        }
        let toolkits = matching(Path::new("/usr/local"), "cuda");
        if toolkits.is_empty() {
            prefixes.push(("/usr/local/cuda*".to_owned(), None));
        }
        prefixes.extend(toolkits.into_iter().map(|folder| ("a CUDA toolkit".to_owned(), Some(folder))));
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            prefixes.push((format!("${name}"), variable(name)));
        }
        prefixes.push(("the user's Python packages".to_owned(), variable("HOME").map(|home| home.join(".local"))));
        Places {
            named: variable("GEMMA4C_NVRTC"),
            source_tree: Some(Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(".cache").join("nvrtc")),
            packages: PACKAGES.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            library_path: true,
            prefixes,
        }
    }

    pub(super) fn find(&self) -> Result<Found, NvrtcError> {
        if let Some(named) = &self.named {
            return under(named, "$GEMMA4C_NVRTC")
                .map_err(|reason| NvrtcError::Override { value: named.display().to_string(), reason });
        }
        let mut looked = vec![Looked { place: "$GEMMA4C_NVRTC".to_owned(), reason: "not set".to_owned() }];
        if let Some(folder) = &self.source_tree {
            match under(folder, "the source tree's .cache/nvrtc") {
                Ok(found) => return Ok(found),
                Err(reason) => looked.push(Looked { place: folder.display().to_string(), reason }),
            }
        }
        for folder in &self.packages {
            match under(folder, "the installed packages") {
                Ok(found) => return Ok(found),
                Err(reason) => looked.push(Looked { place: folder.display().to_string(), reason }),
            }
        }
        if self.library_path {
            match on_library_path() {
                Ok(found) => return Ok(found),
                Err(reason) => looked.push(Looked { place: "the library path".to_owned(), reason }),
            }
        }
        for (label, prefix) in &self.prefixes {
            let Some(prefix) = prefix else {
                let reason = if label.starts_with('$') { "not set" } else { "not there" };
                looked.push(Looked { place: label.clone(), reason: reason.to_owned() });
                continue;
            };
            match under(prefix, label) {
                Ok(found) => return Ok(found),
                Err(reason) => looked.push(Looked { place: format!("{label} ({})", prefix.display()), reason }),
            }
        }
        Err(NvrtcError::NotFound { looked })
    }
}

/// Loads the library from a file, or from a folder that is or holds a library folder.
fn under(place: &Path, through: &str) -> Result<Found, String> {
    let files = match fs::metadata(place) {
        Err(error) => return Err(error.to_string()),
        Ok(metadata) if metadata.is_file() => vec![place.to_owned()],
        Ok(_) => library_folders(place)
            .iter()
            .flat_map(|folder| NAMES.map(|name| folder.join(name)))
            .filter(|file| file.is_file())
            .collect(),
    };
    let mut reasons = Vec::new();
    for path in files {
        // A bare file name would make the loader search its own path instead.
        let path = std::path::absolute(&path).unwrap_or(path);
        match sys::Library::open(&path) {
            Ok(library) => return Ok(Found { library, path, through: through.to_owned() }),
            Err(reason) => reasons.push(format!("{} does not load: {reason}", path.display())),
        }
    }
    match reasons.is_empty() {
        true => Err("no libnvrtc in it".to_owned()),
        false => Err(reasons.join("; ")),
    }
}

fn on_library_path() -> Result<Found, String> {
    let mut reasons = Vec::new();
    for name in NAMES {
        match sys::Library::open(Path::new(name)) {
            Ok(library) => {
                return Ok(Found { library, path: mapped_file(name), through: "the library path".to_owned() });
            }
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}

/// The file behind a library the loader found by name: the kernel's list of mapped files knows.
fn mapped_file(name: &str) -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps
        .lines()
        .filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])))
        .find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)));
    path.unwrap_or(Path::new(name)).to_owned()
}

/// The folders below `prefix` where one of the known installations keeps the library: the folder itself, a toolkit's or
/// a conda environment's `lib`, a folder of Python packages, and the packages of a Python environment.
fn library_folders(prefix: &Path) -> Vec<PathBuf> {
    let lib = prefix.join("lib");
    let mut folders = vec![prefix.to_owned(), prefix.join("lib64"), lib.clone()];
    folders.extend(matching(&prefix.join("targets"), "").into_iter().map(|target| target.join("lib")));
    let mut packages = vec![prefix.to_owned()];
    for python in matching(&lib, "python3") {
        packages.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
    }
    // The wheels' own layouts: all of CUDA 13 in one folder, one folder a component before that.
    folders.extend(
        packages.iter().flat_map(|folder| ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|name| folder.join(name))),
    );
    folders
}

/// The folders in `parent` whose name starts with `start`, the last in order first: newest versions lead.
fn matching(parent: &Path, start: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let mut folders: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start)) && path.is_dir())
        .collect();
    folders.sort_unstable_by(|a, b| b.cmp(a));
    folders
}
