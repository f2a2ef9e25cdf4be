//! Requests to the hub and to where it redirects: redirects followed by hand, because the token is for the hub alone;
//! statuses turned into errors that say what to do; and patience with what may be better in a moment.

use std::io::Read;
use std::ops::Range;
use std::thread;
use std::time::Duration;

use ureq::http::{HeaderMap, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::error::HubError;
use crate::settings::Settings;

/// Times that a piece of a file is tried in all, and a list: whoever waits for that may be without a network.
pub const TRIES: u32 = 5;
const TRIES_OF_LIST: u32 = 3;
/// A server that wants longer than this is not waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// How long a connection may be silent.
const SILENCE: Duration = Duration::from_secs(30);
/// Redirects of one request.
const REDIRECTS: usize = 8;
/// Bytes of a list of files.
const LONGEST_LIST: u64 = 64 << 20;

pub struct Client {
    agent: Agent,
    pub endpoint: String,
    token: Option<String>,
    patience: Duration,
}

/// What a server sends.
pub struct Answer {
    /// Where it came from, after all redirects.
    pub address: String,
    pub status: u16,
    pub body: Body,
}

/// Why a request brought nothing, and whether it may bring something later.
pub struct Failure {
    pub error: HubError,
    pub may_pass: bool,
    /// How long the server wants to be left alone.
    pub wait: Option<Duration>,
}

impl Failure {
    pub fn lasting(error: HubError) -> Failure {
        Failure { error, may_pass: false, wait: None }
    }

    pub fn passing(error: HubError) -> Failure {
        Failure { error, may_pass: true, wait: None }
    }
}

impl Client {
    pub fn new(settings: &Settings) -> Result<Client, HubError> {
        let mut tls = TlsConfig::builder();
        if let Some(pem) = &settings.roots {
            let certificate = |item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            };
            let roots: Vec<_> = parse_pem(pem).filter_map(certificate).collect();
            if roots.is_empty() {
                return Err(HubError::Roots);
            }
            tls = tls.root_certs(RootCerts::from(roots));
        }
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("gemma4c/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .max_idle_connections_per_host(settings.connections)
            .max_idle_connections(2 * settings.connections);
        Ok(Client {
            agent: config.build().new_agent(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
            patience: settings.patience,
        })
    }

    /// A whole answer of the hub about a repository.
    pub fn list(&self, address: &str, repository: &str) -> Result<Vec<u8>, HubError> {
        self.patiently(TRIES_OF_LIST, || {
            let answer = self.get(address, None, repository)?;
            let mut bytes = Vec::new();
            let read = answer.body.into_reader().take(LONGEST_LIST).read_to_end(&mut bytes);
            read.map_err(|error| Failure::passing(unreachable(address, error.to_string())))?;
            Ok(bytes)
        })
    }

    /// Tries again what may pass, after longer and longer waits, or as long as the server says.
    pub fn patiently<T>(&self, tries: u32, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, HubError> {
        let mut failed = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => {
                    failed += 1;
                    let wait = failure.wait.unwrap_or(self.patience * (1 << failed));
                    if !failure.may_pass || failed == tries || wait > LONGEST_WAIT {
                        return Err(failure.error);
                    }
                    thread::sleep(wait);
                }
            }
        }
    }

    /// One try of a request, as far as the body; `repository` is for messages.
    pub fn get(&self, address: &str, range: Option<Range<u64>>, repository: &str) -> Result<Answer, Failure> {
        let mut address = address.to_owned();
        for _ in 0..REDIRECTS {
            let mut request = self.agent.get(&address);
            if let Some(token) = self.token.as_ref().filter(|_| origin(&address) == origin(&self.endpoint)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if let Some(range) = &range {
                // An end that is not included.
                request = request.header("range", format!("bytes={}-{}", range.start, range.end - 1));
            }
            let response = request.call().map_err(|error| self.failure(&address, error))?;
            let status = response.status();
            if !status.is_redirection() {
                return match status.is_success() {
                    true => Ok(Answer { address, status: status.as_u16(), body: response.into_body() }),
                    false => Err(self.refusal(&address, status, response.headers(), repository)),
                };
            }
            let target = response.headers().get("location").and_then(|target| target.to_str().ok());
            let Some(target) = target.and_then(|target| join(&address, target)) else {
                let why = "a redirect that leads nowhere".into();
                return Err(Failure::lasting(HubError::Answer { address, why }));
            };
            address = target;
        }
        Err(Failure::lasting(HubError::Answer { address, why: "too many redirects".into() }))
    }

    fn failure(&self, address: &str, error: ureq::Error) -> Failure {
        let why = match &error {
            ureq::Error::Io(error) => error.to_string(),
            ureq::Error::HostNotFound => "the name of the host is not known".into(),
            error => error.to_string(),
        };
        let host = origin(address).to_owned();
        match error {
            ureq::Error::Rustls(_) | ureq::Error::Tls(_) => Failure::lasting(HubError::Untrusted { host, why }),
            // What rustls finds wrong with a certificate comes through the reader.
            ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                Failure::lasting(HubError::Untrusted { host, why })
            }
            ureq::Error::HostNotFound => Failure::lasting(HubError::Unreachable { host, why }),
            _ => Failure::passing(HubError::Unreachable { host, why }),
        }
    }

    /// What a status means, in the hub's own words where it has some.
    fn refusal(&self, address: &str, status: StatusCode, headers: &HeaderMap, repository: &str) -> Failure {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let (endpoint, repository, has_token) = (self.endpoint.clone(), repository.to_owned(), self.token.is_some());
        if origin(address) == origin(&endpoint) {
            let error = match (header("x-error-code"), status.as_u16()) {
                (Some("GatedRepo"), _) => Some(HubError::Gated { endpoint, repository }),
                // A repository that is not there and one that may not be seen look the same.
                (Some("RepoNotFound"), _) | (_, 404) => {
                    Some(HubError::NoRepository { endpoint, repository, has_token })
                }
                (_, 401) if has_token => Some(HubError::Token { endpoint }),
                (_, 401) => Some(HubError::NoRepository { endpoint, repository, has_token }),
                (_, 403) => Some(HubError::Gated { endpoint, repository }),
                _ => None,
            };
            if let Some(error) = error {
                return Failure::lasting(error);
            }
        }
        let wait = header("retry-after").and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
        if status == StatusCode::TOO_MANY_REQUESTS {
            let seconds = wait.map_or(60, |wait| wait.as_secs());
            let error = HubError::TooMany { host: origin(address).into(), seconds };
            return Failure { error, may_pass: true, wait };
        }
        // Signed addresses expire, so that what a storage refuses now it may give under a new one.
        let is_storage = origin(address) != origin(&self.endpoint);
        let may_pass = status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT || is_storage;
        // What follows the path may be a signature.
        let address = address.split('?').next().unwrap_or_default().to_owned();
        Failure { error: HubError::Status { address, status: status.as_u16() }, may_pass, wait }
    }
}

pub fn unreachable(address: &str, why: String) -> HubError {
    HubError::Unreachable { host: origin(address).into(), why }
}

/// `https://host:port` of an address.
fn origin(address: &str) -> &str {
    let start = address.find("://").map_or(0, |at| at + 3);
    let end = address[start..].find(['/', '?', '#']).map_or(address.len(), |at| start + at);
    &address[..end]
}

/// Where a redirect leads.
fn join(from: &str, target: &str) -> Option<String> {
    let scheme = from.split_once("://").map(|(scheme, _)| scheme)?;
    match target {
        _ if ["https://", "http://"].iter().any(|scheme| target.starts_with(scheme)) => Some(target.to_owned()),
        _ if target.starts_with("//") => Some(format!("{scheme}:{target}")),
        _ if target.starts_with('/') => Some(format!("{}{target}", origin(from))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_joined_and_origins_compared_with_their_ports() {
        let from = "https://hub:8/a/b?c=http://d";
        assert_eq!(origin(from), "https://hub:8");
        assert_eq!(origin("https://hub"), "https://hub");
        assert_ne!(origin("https://hub.evil/"), origin("https://hub/"));
        assert_eq!(join(from, "/x").as_deref(), Some("https://hub:8/x"));
        assert_eq!(join(from, "//cdn/x").as_deref(), Some("https://cdn/x"));
        assert_eq!(join(from, "http://cdn/x").as_deref(), Some("http://cdn/x"));
        assert_eq!(join(from, "file:///etc/passwd"), None);
    }
}
