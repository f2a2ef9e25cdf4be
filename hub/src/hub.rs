//! The hub as a whole: what a repository has, and its files on this machine.

use std::path::PathBuf;

use crate::cache::Cache;
use crate::client::Client;
use crate::download::Download;
use crate::error::HubError;
use crate::listing::{RemoteFile, Repository};
use crate::settings::Settings;

/// Where models are looked up and kept.
pub struct Hub {
    settings: Settings,
    client: Client,
}

/// A repository, and how it was found.
pub struct Found {
    pub repository: Repository,
    /// Why this is what the cache has, and not what the hub has now.
    pub instead: Option<HubError>,
}

/// What happens while files are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// Somebody else fetches the file, and is waited for.
    Waits { file: &'a RemoteFile },
    /// So many of its bytes are here.
    Arrived { file: &'a RemoteFile, bytes: u64 },
    /// It is here as a whole.
    Whole { file: &'a RemoteFile },
}

impl Hub {
    /// As the environment says.
    pub fn from_env() -> Result<Hub, HubError> {
        Hub::new(Settings::from_env()?)
    }

    pub fn new(settings: Settings) -> Result<Hub, HubError> {
        let client = Client::new(&settings)?;
        Ok(Hub { settings, client })
    }

    /// What the repository has now, or, without a network, what it had when it was last asked.
    pub fn look_up(&self, name: &str) -> Result<Found, HubError> {
        let cached = || Cache::of(&self.settings.cache, name).repository(name);
        if self.settings.is_offline {
            let not_here = || HubError::NotHere { repository: name.into(), cache: self.settings.cache.clone() };
            return Ok(Found { repository: cached().ok_or_else(not_here)?, instead: None });
        }
        let address = format!("{}/api/models/{name}/revision/main?blobs=true", self.settings.endpoint);
        match self.client.list(&address, name) {
            Ok(answer) => Ok(Found { repository: Repository::read(name, &address, &answer)?, instead: None }),
            Err(error @ (HubError::Unreachable { .. } | HubError::TooMany { .. })) => match cached() {
                Some(repository) => Ok(Found { repository, instead: Some(error) }),
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Whether a file of the repository is here as a whole.
    pub fn has(&self, repository: &Repository, file: &RemoteFile) -> bool {
        let path = Cache::of(&self.settings.cache, &repository.name).file(&repository.commit, &file.name);
        path.metadata().is_ok_and(|info| info.len() == file.bytes)
    }

    /// Brings the files here, and says where they are.
    pub fn fetch(
        &self,
        repository: &Repository,
        files: &[&RemoteFile],
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Vec<PathBuf>, HubError> {
        let cache = Cache::of(&self.settings.cache, &repository.name);
        let paths = files.iter().map(|file| self.fetch_one(&cache, repository, file, progress));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        if !self.settings.is_offline {
            cache.note_main(&repository.commit)?;
        }
        Ok(paths)
    }

    fn fetch_one(
        &self,
        cache: &Cache,
        repository: &Repository,
        file: &RemoteFile,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        if self.has(repository, file) {
            return Ok(cache.file(&repository.commit, &file.name));
        }
        if self.settings.is_offline {
            return Err(HubError::NotWhole { repository: repository.name.clone(), file: file.name.clone() });
        }
        let _lock = cache.lock(&file.etag, || progress(Progress::Waits { file }))?;
        // Another program, or another commit, may have brought it.
        let is_here = cache.blob(&file.etag).metadata().is_ok_and(|info| info.len() == file.bytes);
        if !is_here {
            let download = Download {
                client: &self.client,
                cache,
                repository: &repository.name,
                commit: &repository.commit,
                file,
                connections: self.settings.connections,
                piece: self.settings.piece,
            };
            download.run(&mut |bytes| progress(Progress::Arrived { file, bytes }))?;
        }
        let path = cache.link(&repository.commit, file)?;
        progress(Progress::Whole { file });
        Ok(path)
    }
}
