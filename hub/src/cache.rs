//! The Hugging Face cache on disk:
//!
//! ```text
//! models--USER--REPOSITORY/refs/main                      a commit
//! models--USER--REPOSITORY/snapshots/COMMIT/FILE          a link to ../../blobs/ETAG
//! models--USER--REPOSITORY/blobs/ETAG                     a file's bytes; ETAG.incomplete while they arrive
//! .locks/models--USER--REPOSITORY/ETAG.lock               held by whoever fetches ETAG
//! ```
//!
//! A name appears only when what it names is whole.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::error::HubError;
use crate::listing::{RemoteFile, Repository, is_hash};

/// The folders of one repository.
pub struct Cache {
    folder: PathBuf,
    locks: PathBuf,
}

impl Cache {
    pub fn of(root: &Path, repository: &str) -> Cache {
        let name = format!("models--{}", repository.replace('/', "--"));
        Cache { folder: root.join(&name), locks: root.join(".locks").join(name) }
    }

    /// Where a file of a commit is, once it is whole.
    pub fn file(&self, commit: &str, name: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit).join(name)
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// What has arrived of a file, from its start on.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The repository as it was when it was last looked up.
    pub fn repository(&self, name: &str) -> Option<Repository> {
        let commit = fs::read_to_string(self.folder.join("refs/main")).ok()?;
        let commit = commit.trim().to_owned();
        let snapshot = is_hash(&commit).then(|| self.folder.join("snapshots").join(&commit))?;
        let mut files = Vec::new();
        list(&snapshot, "", &mut files);
        files.sort_by(|a: &RemoteFile, b| a.name.cmp(&b.name));
        (!files.is_empty()).then(|| Repository { name: name.into(), commit, files })
    }

    /// Waits until nobody else fetches the file; `waits` is told if somebody does.
    pub fn lock(&self, etag: &str, waits: impl FnOnce()) -> Result<File, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        make_folder(&self.locks)?;
        let lock = File::options().create(true).append(true).open(&path).map_err(HubError::write(&path))?;
        if lock.try_lock().is_err() {
            waits();
            lock.lock().map_err(HubError::write(&path))?;
        }
        Ok(lock)
    }

    /// Names a blob as the file of a commit.
    pub fn link(&self, commit: &str, file: &RemoteFile) -> Result<PathBuf, HubError> {
        let path = self.file(commit, &file.name);
        let up = "../".repeat(file.name.split('/').count() + 1);
        let folder = path.parent().unwrap_or(&self.folder);
        make_folder(folder)?;
        // A link cannot replace a file in one step, but a rename can.
        let place = tempfile::Builder::new().prefix(".link-").tempdir_in(folder).map_err(HubError::write(folder))?;
        let link = place.path().join("link");
        symlink(format!("{up}blobs/{}", file.etag), &link).map_err(HubError::write(&link))?;
        fs::rename(&link, &path).map_err(HubError::write(&path))?;
        Ok(path)
    }

    /// Remembers what `main` is.
    pub fn note_main(&self, commit: &str) -> Result<(), HubError> {
        let refs = self.folder.join("refs");
        make_folder(&refs)?;
        let write = || -> io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(&refs)?;
            file.write_all(commit.as_bytes())?;
            file.persist(refs.join("main"))?;
            Ok(())
        };
        write().map_err(HubError::write(&refs.join("main")))
    }
}

pub fn make_folder(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(HubError::write(path))
}

/// Files of a snapshot whose bytes are here.
fn list(folder: &Path, prefix: &str, files: &mut Vec<RemoteFile>) {
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        let name = format!("{prefix}{name}");
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&path, &format!("{name}/"), files);
        } else if let Ok(info) = fs::metadata(&path) {
            let target = fs::read_link(&path).ok();
            let etag = target.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
            files.push(RemoteFile { name, bytes: info.len(), etag });
        }
    }
}
