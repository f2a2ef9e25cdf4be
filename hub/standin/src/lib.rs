//! A hub on this machine, for tests: it lists repositories and redirects to a storage on another port, as Hugging
//! Face's does, with TLS or without; it fails as one fails when it is told to; and it remembers what it was asked.
//!
//! It is no client's judge: it answers what it is asked, and the tests look at what was asked.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use ring::digest;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

/// Files of repositories, by `user/repository` and name.
pub type Repositories = BTreeMap<String, BTreeMap<String, Arc<Vec<u8>>>>;

/// What goes wrong, until it is taken back.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The storage ends connections once it has sent so many bytes.
    pub cut_after: Option<u64>,
    /// Of a file, the byte that is sent wrong.
    pub flipped: Option<(String, u64)>,
    /// The next requests get this status, and are told to wait for so many seconds.
    pub statuses: Vec<(u16, Option<u64>)>,
    /// The next requests to the storage are refused, as if their signature had expired.
    pub expired: u32,
    /// Repositories whose terms nobody accepted.
    pub gated: Vec<String>,
    /// Repositories that have a new name.
    pub renamed: BTreeMap<String, String>,
    /// Parts of files are not sent.
    pub without_ranges: bool,
}

/// A request as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub method: String,
    /// Of the storage, not of the hub.
    pub is_storage: bool,
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

/// A hub that runs as long as the process does.
pub struct Standin {
    /// What `HF_ENDPOINT` must be.
    pub endpoint: String,
    /// The certificate in PEM, for `SSL_CERT_FILE`; none without TLS.
    pub certificate: Option<String>,
    shared: Arc<Shared>,
}

struct Shared {
    repositories: Repositories,
    faults: Mutex<Faults>,
    asked: Mutex<Vec<Asked>>,
    sent: Mutex<u64>,
    storage: String,
}

/// The commit of every repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Standin {
    /// Listens on two free ports.
    pub fn start(repositories: Repositories, with_tls: bool) -> io::Result<Standin> {
        let listen = || TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)));
        let (hub, storage) = (listen()?, listen()?);
        let scheme = if with_tls { "https" } else { "http" };
        let address = |listener: &TcpListener| Ok(format!("{scheme}://localhost:{}", listener.local_addr()?.port()));
        let (endpoint, storage_address): (io::Result<String>, io::Result<String>) = (address(&hub), address(&storage));
        let tls = with_tls.then(tls).transpose()?;
        let shared = Arc::new(Shared {
            repositories,
            faults: Mutex::default(),
            asked: Mutex::default(),
            sent: Mutex::default(),
            storage: storage_address?,
        });
        let (config, certificate) = tls.unzip();
        for (listener, is_storage) in [(hub, false), (storage, true)] {
            let (shared, config) = (Arc::clone(&shared), config.clone());
            thread::spawn(move || {
                for stream in listener.incoming().filter_map(Result::ok) {
                    let (shared, config) = (Arc::clone(&shared), config.clone());
                    thread::spawn(move || serve(stream, config, &shared, is_storage));
                }
            });
        }
        Ok(Standin { endpoint: endpoint?, certificate, shared })
    }

    pub fn set(&self, faults: Faults) {
        *locked(&self.shared.faults) = faults;
    }

    /// What was asked since the last call.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut locked(&self.shared.asked))
    }

    /// Bytes of files that were sent since the last call.
    pub fn sent(&self) -> u64 {
        std::mem::take(&mut locked(&self.shared.sent))
    }
}

/// A certificate for this machine, made now.
fn tls() -> io::Result<(Arc<ServerConfig>, String)> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).map_err(io::Error::other)?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_no_client_auth();
    let config = config.with_single_cert(vec![made.cert.der().clone()], key).map_err(io::Error::other)?;
    Ok((Arc::new(config), made.cert.pem()))
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

fn serve(stream: TcpStream, tls: Option<Arc<ServerConfig>>, shared: &Shared, is_storage: bool) {
    let mut stream: Box<dyn Stream> = match tls {
        None => Box::new(stream),
        Some(config) => match ServerConnection::new(config) {
            Ok(connection) => Box::new(StreamOwned::new(connection, stream)),
            Err(_) => return,
        },
    };
    // One request after another; an error is the connection's end.
    while let Ok(Some(asked)) = receive(&mut *stream, is_storage) {
        locked(&shared.asked).push(asked.clone());
        let is_open = if is_storage { shared.store(&asked, &mut *stream) } else { shared.list(&asked, &mut *stream) };
        if !is_open.unwrap_or(false) {
            return;
        }
    }
}

/// A request without a body.
fn receive(stream: &mut dyn Stream, is_storage: bool) -> io::Result<Option<Asked>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if head.len() > 16384 || stream.read(&mut byte)? == 0 {
            return Ok(None);
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut lines = head.lines();
    let mut first = lines.next().unwrap_or_default().split(' ').map(str::to_owned);
    let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let header = |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    Ok(Some(Asked { method, is_storage, path, range: header("range"), token: header("authorization") }))
}

impl Shared {
    /// The hub's own answers: lists of files, and where they are. Whether the connection stays open.
    fn list(&self, asked: &Asked, stream: &mut dyn Stream) -> io::Result<bool> {
        let faults = {
            let mut faults = locked(&self.faults);
            let before = faults.clone();
            faults.statuses = faults.statuses.iter().skip(1).copied().collect();
            before
        };
        if let Some((status, wait)) = faults.statuses.first() {
            let wait = wait.map(|seconds| format!("retry-after: {seconds}\r\n")).unwrap_or_default();
            return respond(stream, asked, *status, &wait, b"no");
        }
        let path = asked.path.split('?').next().unwrap_or_default().trim_start_matches('/');
        let (name, what) = match path.strip_prefix("api/models/") {
            Some(rest) => rest.split_once("/revision/").unwrap_or((rest, "")),
            None => path.split_once("/resolve/").unwrap_or((path, "")),
        };
        if let Some(new) = faults.renamed.get(name) {
            let location = format!("location: {}\r\n", asked.path.replacen(name, new, 1));
            return respond(stream, asked, 307, &location, b"");
        }
        let Some(files) = self.repositories.get(name) else {
            return respond(stream, asked, 401, "x-error-code: RepoNotFound\r\n", b"Repository not found");
        };
        if faults.gated.iter().any(|gated| gated == name) {
            return respond(stream, asked, 403, "x-error-code: GatedRepo\r\n", b"Access is restricted");
        }
        if path.starts_with("api/") {
            let sibling = |(name, bytes): (&String, &Arc<Vec<u8>>)| {
                json!({
                    "rfilename": name, "size": bytes.len(), "blobId": COMMIT,
                    "lfs": { "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134 },
                })
            };
            let siblings: Vec<Value> = files.iter().map(sibling).collect();
            let answer = json!({ "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings });
            return respond(stream, asked, 200, "content-type: application/json\r\n", answer.to_string().as_bytes());
        }
        let file = what.split_once('/').and_then(|(_, file)| files.get_key_value(file));
        let Some((file, bytes)) = file else {
            return respond(stream, asked, 404, "x-error-code: EntryNotFound\r\n", b"Entry not found");
        };
        let hash = sha256(bytes);
        let headers = format!(
            "location: {}/{name}/{file}?signature=x\r\nx-linked-etag: \"{hash}\"\r\nx-linked-size: {}\r\n\
             x-repo-commit: {COMMIT}\r\n",
            self.storage,
            bytes.len()
        );
        respond(stream, asked, 302, &headers, b"")
    }

    /// A file, or a part of one.
    fn store(&self, asked: &Asked, stream: &mut dyn Stream) -> io::Result<bool> {
        let path = asked.path.split('?').next().unwrap_or_default().trim_start_matches('/');
        let found = self.repositories.iter().find_map(|(name, files)| {
            let file = path.strip_prefix(name.as_str())?.strip_prefix('/')?;
            files.get_key_value(file)
        });
        let Some((name, bytes)) = found else { return respond(stream, asked, 404, "", b"not found") };
        let faults = {
            let mut faults = locked(&self.faults);
            let before = faults.clone();
            faults.expired = faults.expired.saturating_sub(1);
            before
        };
        if faults.expired > 0 {
            return respond(stream, asked, 403, "", b"the signature has expired");
        }
        let whole = 0..bytes.len();
        let range = asked.range.as_deref().filter(|_| !faults.without_ranges);
        let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let part = match range {
            None => whole.clone(),
            Some((start, end)) => {
                let number = |text: &str| text.parse::<usize>().ok();
                let end = number(end).map_or(bytes.len(), |last| last.saturating_add(1)).min(bytes.len());
                number(start).unwrap_or(0).min(end)..end
            }
        };
        let mut part_bytes = bytes[part.clone()].to_vec();
        if let Some((flipped, at)) = &faults.flipped
            && flipped == name
            && part.contains(&(*at as usize))
        {
            part_bytes[*at as usize - part.start] ^= 0x40;
        }
        let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
        let length = part_bytes.len();
        write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {length}\r\n")?;
        write!(stream, "content-range: bytes {}-{}/{}\r\n\r\n", part.start, part.end.max(1) - 1, bytes.len())?;
        let part_bytes = if asked.method == "HEAD" { Vec::new() } else { part_bytes };
        for piece in part_bytes.chunks(4096) {
            let mut sent = locked(&self.sent);
            if faults.cut_after.is_some_and(|most| *sent + piece.len() as u64 > most) {
                return Ok(false);
            }
            *sent += piece.len() as u64;
            drop(sent);
            stream.write_all(piece)?;
        }
        stream.flush()?;
        Ok(true)
    }
}

/// An answer, of which a `HEAD` gets the head alone.
fn respond(stream: &mut dyn Stream, asked: &Asked, status: u16, headers: &str, body: &[u8]) -> io::Result<bool> {
    write!(stream, "HTTP/1.1 {status} {status}\r\n{headers}content-length: {}\r\n\r\n", body.len())?;
    stream.write_all(if asked.method == "HEAD" { b"" } else { body })?;
    stream.flush()?;
    Ok(true)
}

/// In hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    digest::digest(&digest::SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
