//! One file from the hub to the cache: in pieces over several connections, appended in their order.
//!
//! So what has arrived is always the file's start: it can be hashed on the way, and whoever comes next, we or another
//! program, goes on behind it. The price is memory, two pieces for each connection.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ring::digest;

use crate::cache::{Cache, make_folder};
use crate::client::{Client, Failure, TRIES, unreachable};
use crate::error::HubError;
use crate::listing::RemoteFile;

/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// A file to fetch.
pub struct Download<'a> {
    pub client: &'a Client,
    pub cache: &'a Cache,
    pub repository: &'a str,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    /// Requests at once.
    pub connections: usize,
    /// Bytes of one, at most.
    pub piece: u64,
}

/// Bytes of a request, at least, and pieces of a file that needs no larger ones: what is cut loses little.
const SMALLEST_PIECE: u64 = 64 << 10;
const PIECES: u64 = 64;

impl Download<'_> {
    /// Fetches what is missing, compares all of it with its hash, and gives it its name. The caller has the lock.
    /// `arrived` is told how many bytes are here, often.
    pub fn run(&self, arrived: &mut dyn FnMut(u64)) -> Result<PathBuf, HubError> {
        let path = self.cache.incomplete(&self.file.etag);
        let folder = path.parent().unwrap_or(Path::new("."));
        make_folder(folder)?;
        let mut partial =
            File::options().create(true).read(true).append(true).open(&path).map_err(HubError::write(&path))?;
        let mut here = partial.metadata().map_err(HubError::read(&path))?.len();
        if here > self.file.bytes {
            partial.set_len(0).map_err(HubError::write(&path))?;
            here = 0;
        }
        let mut hash = Hash::of(self.file);
        hash.add_file(&mut partial, arrived).map_err(HubError::read(&path))?;
        self.check_space(folder, self.file.bytes - here)?;
        self.transfer(here, arrived, &mut |piece| {
            hash.add(piece);
            partial.write_all(piece).map_err(|error| match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    let here = partial.metadata().map_or(0, |info| info.len());
                    self.no_space(folder, self.file.bytes.saturating_sub(here))
                }
                _ => HubError::Write { path: path.clone(), source: error },
            })
        })?;
        let found = hash.finish();
        if found != self.file.etag {
            fs::remove_file(&path).map_err(HubError::write(&path))?;
            let (file, expected) = (self.file.name.clone(), self.file.etag.clone());
            return Err(HubError::Damaged { file, hash: hash_name(&expected), expected, found });
        }
        partial.sync_all().map_err(HubError::write(&path))?;
        let blob = self.cache.blob(&self.file.etag);
        fs::rename(&path, &blob).map_err(HubError::write(&blob))?;
        Ok(blob)
    }

    /// Better now than after an hour.
    fn check_space(&self, folder: &Path, needed: u64) -> Result<(), HubError> {
        // A file system that cannot say how much is free is written to until it is full.
        let free = rustix::fs::statvfs(folder).map_or(u64::MAX, |info| info.f_bavail.saturating_mul(info.f_frsize));
        if free < needed { Err(self.no_space(folder, needed)) } else { Ok(()) }
    }

    fn no_space(&self, folder: &Path, needed: u64) -> HubError {
        let free = rustix::fs::statvfs(folder).map_or(0, |info| info.f_bavail.saturating_mul(info.f_frsize));
        HubError::NoSpace { file: self.file.name.clone(), folder: folder.into(), needed, free }
    }

    /// Hands on the bytes from `here` on, in their order.
    fn transfer(
        &self,
        here: u64,
        arrived: &mut dyn FnMut(u64),
        sink: &mut dyn FnMut(&[u8]) -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        let piece = (self.file.bytes / PIECES).max(SMALLEST_PIECE).min(self.piece);
        let pieces: Vec<Range<u64>> = (here..self.file.bytes)
            .step_by(piece as usize)
            .map(|start| start..(start + piece).min(self.file.bytes))
            .collect();
        let connections = self.connections.min(pieces.len()).max(1);
        let source = Source { download: self, address: Mutex::new(None), is_over: AtomicBool::new(false) };
        let received = AtomicU64::new(here);
        thread::scope(|scope| {
            let channels: Vec<Receiver<Result<Vec<u8>, HubError>>> = (0..connections)
                .map(|connection| {
                    // One piece waits here while the next one arrives.
                    let (sender, receiver) = sync_channel(1);
                    let own = pieces.iter().skip(connection).step_by(connections).cloned().collect();
                    let (source, received) = (&source, &received);
                    scope.spawn(move || source.bring(own, &sender, received));
                    receiver
                })
                .collect();
            let taken = (0..pieces.len()).try_for_each(|index| {
                loop {
                    match channels[index % connections].recv_timeout(TICK) {
                        Ok(piece) => break sink(&piece?),
                        Err(RecvTimeoutError::Timeout) => arrived(received.load(Ordering::Relaxed)),
                        Err(RecvTimeoutError::Disconnected) => {
                            break Err(unreachable(&self.client.endpoint, "a connection has ended".into()));
                        }
                    }
                }?;
                arrived(received.load(Ordering::Relaxed));
                Ok(())
            });
            source.is_over.store(true, Ordering::Relaxed);
            taken
        })
    }
}

/// Where pieces come from, for all connections.
struct Source<'a> {
    download: &'a Download<'a>,
    /// Where the hub redirects to, as long as that is good.
    address: Mutex<Option<String>>,
    /// Nobody wants the rest.
    is_over: AtomicBool,
}

impl Source<'_> {
    fn bring(&self, pieces: Vec<Range<u64>>, sender: &SyncSender<Result<Vec<u8>, HubError>>, received: &AtomicU64) {
        for range in pieces {
            let piece = self.piece(range, received);
            let is_last = piece.is_err();
            if sender.send(piece).is_err() || is_last {
                return;
            }
        }
    }

    /// One piece. What has arrived of it before a failure is not fetched again, and counts as progress: only a try that
    /// brings nothing is a failure.
    fn piece(&self, range: Range<u64>, received: &AtomicU64) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        while bytes.len() < (range.end - range.start) as usize {
            self.download.client.patiently(TRIES, || {
                let before = bytes.len();
                match self.read(range.start + before as u64..range.end, &mut bytes, received) {
                    Err(_) if bytes.len() > before && !self.is_over.load(Ordering::Relaxed) => Ok(()),
                    result => result,
                }
            })?;
        }
        Ok(bytes)
    }

    /// One request, as far as it goes.
    fn read(&self, range: Range<u64>, bytes: &mut Vec<u8>, received: &AtomicU64) -> Result<(), Failure> {
        let Download { client, repository, commit, file, .. } = self.download;
        let known = self.address().clone();
        let is_known = known.is_some();
        let address = known
            .unwrap_or_else(|| format!("{}/{repository}/resolve/{commit}/{}", client.endpoint, encoded(&file.name)));
        let answer = client.get(&address, Some(range.clone()), repository).map_err(|mut failure| {
            // An address that has expired is asked for anew, from the hub.
            failure.may_pass |= is_known;
            *self.address() = None;
            failure
        })?;
        if answer.status != 206 {
            let host = address.split('?').next().unwrap_or_default().to_owned();
            return Err(Failure::lasting(HubError::NoRanges { host, status: answer.status }));
        }
        *self.address() = Some(answer.address);
        let mut left = (range.end - range.start) as usize;
        let mut reader = answer.body.into_reader();
        let mut buffer = vec![0; left.min(256 << 10)];
        while left > 0 {
            if self.is_over.load(Ordering::Relaxed) {
                return Err(Failure::lasting(unreachable(&address, "nobody waits for it any more".into())));
            }
            let most = left.min(buffer.len());
            let got = reader.read(&mut buffer[..most]);
            let got = got.map_err(|error| Failure::passing(unreachable(&address, error.to_string())))?;
            if got == 0 {
                let why = "the connection ended before the file did".into();
                return Err(Failure::passing(unreachable(&address, why)));
            }
            bytes.extend_from_slice(&buffer[..got]);
            received.fetch_add(got as u64, Ordering::Relaxed);
            left -= got;
        }
        Ok(())
    }

    fn address(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.address.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name in an address: what is neither a letter nor a digit nor harmless as its code.
fn encoded(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => text.push(byte.into()),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

/// The hash that a file's etag is.
struct Hash(digest::Context);

impl Hash {
    fn of(file: &RemoteFile) -> Hash {
        match hash_name(&file.etag) {
            "SHA-256" => Hash(digest::Context::new(&digest::SHA256)),
            // As git names a blob.
            _ => {
                let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", file.bytes).as_bytes());
                Hash(context)
            }
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// What had arrived before.
    fn add_file(&mut self, file: &mut File, arrived: &mut dyn FnMut(u64)) -> io::Result<()> {
        let (mut buffer, mut done) = (vec![0; 1 << 20], 0);
        loop {
            let got = file.read(&mut buffer)?;
            if got == 0 {
                return Ok(());
            }
            self.add(&buffer[..got]);
            done += got as u64;
            arrived(done);
        }
    }

    fn finish(self) -> String {
        self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn hash_name(etag: &str) -> &'static str {
    if etag.len() == 64 { "SHA-256" } else { "SHA-1 of git" }
}
