//! Media that lie elsewhere, fetched over HTTP: only from hosts that whoever runs the server has named, within limits
//! of bytes and time.
//!
//! A client must not reach through the server what it cannot reach itself. So nothing is fetched unless hosts are
//! named; a host that only a pattern names must have public addresses; the addresses that were checked are those that
//! are connected to; and redirects are not followed. Proxies of the environment are not used, since one would resolve
//! names by itself.

use std::collections::btree_map::{self, BTreeMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Semaphore;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

use super::fetched::{Fetched, starts_with_scheme};
use super::source::{MOST_MEDIA, Part};

/// Bytes of all that a request has fetched, at most.
const MOST_BYTES: u64 = 32 << 20;
/// How long one file may take.
const TIME: Duration = Duration::from_secs(10);
/// Requests that fetch at once.
const AT_ONCE: usize = 16;

/// Hosts that media may be fetched from.
#[derive(Clone, Debug, Default)]
pub struct AllowedHosts(Arc<[Entry]>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    /// By its name, wherever it is.
    Host(String),
    /// All below a domain that have public addresses.
    Below(String),
    /// All that have public addresses.
    Any,
}

/// How a host is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allowed {
    Anywhere,
    PublicOnly,
}

impl AllowedHosts {
    /// Names, `*.domain` for all below a domain, and `*` for all.
    pub fn parse(entries: &[String]) -> Result<AllowedHosts, String> {
        let entry = |text: &String| {
            let lower = text.trim().to_ascii_lowercase();
            let name = lower.strip_prefix("*.").unwrap_or(&lower);
            let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b));
            match lower.as_str() {
                "*" => Ok(Entry::Any),
                _ if !is_name => Err(format!("{text:?} is no host: a name such as example.org, *.example.org or *")),
                below if below.starts_with("*.") => Ok(Entry::Below(below[1..].to_owned())),
                host => Ok(Entry::Host(host.trim_matches(['[', ']']).to_owned())),
            }
        };
        entries.iter().map(entry).collect::<Result<Vec<Entry>, String>>().map(|entries| AllowedHosts(entries.into()))
    }

    fn allows(&self, host: &str) -> Option<Allowed> {
        let host = host.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase();
        let by = |entry: &Entry| match entry {
            Entry::Host(name) => (*name == host).then_some(Allowed::Anywhere),
            Entry::Below(domain) => host.ends_with(domain.as_str()).then_some(Allowed::PublicOnly),
            Entry::Any => Some(Allowed::PublicOnly),
        };
        let all: Vec<Allowed> = self.0.iter().filter_map(by).collect();
        all.iter().find(|allowed| **allowed == Allowed::Anywhere).or(all.first()).copied()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What a request's parts refer to.
pub fn remote_urls(body: &Value) -> Vec<String> {
    let mut urls = Vec::new();
    for field in ["messages", "input"] {
        find_urls(&body[field], &mut urls);
    }
    urls
}

/// Fetches it, beside the threads that serve connections and those that read requests: another's host may be slow.
pub async fn fetch_all(hosts: &AllowedHosts, urls: Vec<String>) -> Fetched {
    static FETCHERS: Semaphore = Semaphore::const_new(AT_ONCE);
    if urls.is_empty() {
        return Fetched::default();
    }
    let _permit = FETCHERS.acquire().await;
    let hosts = hosts.clone();
    let work = tokio::task::spawn_blocking(move || {
        let (mut fetched, mut left) = (BTreeMap::new(), MOST_BYTES);
        for url in urls {
            if let btree_map::Entry::Vacant(free) = fetched.entry(url) {
                let got = fetch(free.key(), &hosts, left);
                left -= got.as_ref().map_or(0, |bytes: &Vec<u8>| bytes.len() as u64);
                free.insert(got);
            }
        }
        Fetched(fetched)
    });
    work.await.unwrap_or_default()
}

/// Addresses that parts of messages name, as many as a request may have media.
fn find_urls(value: &Value, urls: &mut Vec<String>) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| find_urls(value, urls)),
        Value::Object(fields) => {
            if let Ok(Some(part)) = Part::read("", value)
                && let Some(url) = part.source.remote()
                && urls.len() < MOST_MEDIA
            {
                urls.push(url.to_owned());
            }
            fields.get("content").into_iter().for_each(|content| find_urls(content, urls));
        }
        _ => {}
    }
}

fn fetch(url: &str, hosts: &AllowedHosts, most: u64) -> Result<Vec<u8>, String> {
    if !["http://", "https://"].iter().any(|scheme| starts_with_scheme(url, scheme)) {
        return Err("a URL must begin with data:, http:// or https://".into());
    }
    let uri: Uri = url.parse().map_err(|_| "its URL is wrong".to_owned())?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| "its URL names no host".to_owned())?;
    let allowed = hosts.allows(host).ok_or_else(|| format!("this server does not fetch from {host}"))?;
    let config = Agent::config_builder()
        .timeout_global(Some(TIME))
        .max_redirects(0)
        .max_redirects_will_error(true)
        .proxy(None)
        .max_response_header_size(16 << 10)
        .user_agent("gemma4c")
        .build();
    let agent = Agent::with_parts(config, DefaultConnector::default(), CheckedResolver { allowed });
    let mut response = agent.get(uri.clone()).call().map_err(|error| describe(host, &error))?;
    response.body_mut().with_config().limit(most).read_to_vec().map_err(|error| describe(host, &error))
}

fn describe(host: &str, error: &Error) -> String {
    match error {
        Error::TooManyRedirects => format!("{host} redirects, which is not followed"),
        Error::BodyExceedsLimit(_) => {
            format!("{host} sends more than {MOST_BYTES} bytes, the most that a request may have fetched")
        }
        Error::Timeout(_) => format!("{host} did not answer within {} seconds", TIME.as_secs()),
        Error::StatusCode(status) => format!("{host} answers with status {status}"),
        Error::HostNotFound => format!("{host} is not found, or has no public address"),
        other => format!(
            "it cannot be fetched from {host}: {}",
            other.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
        ),
    }
}

/// Resolves a name, and keeps the addresses that may be connected to.
#[derive(Debug)]
struct CheckedResolver {
    allowed: Allowed,
}

impl Resolver for CheckedResolver {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let found = DefaultResolver::default().resolve(uri, config, timeout)?;
        let mut kept = self.empty();
        let may_be = |ip: IpAddr| self.allowed == Allowed::Anywhere || is_public(ip);
        found.iter().filter(|address| may_be(address.ip())).for_each(|address| kept.push(*address));
        if kept.is_empty() { Err(Error::HostNotFound) } else { Ok(kept) }
    }
}

/// Whether an address is one of the internet's, and not of this machine, its network or its cloud.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => is_public_v6(ip),
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    // Carriers' own (100.64/10), protocol assignments, benchmarking, and what is reserved.
    let is_special = (a == 100 && b & 0xc0 == 64) || (a == 192 && b == 0 && c == 0) || (a == 198 && b & 0xfe == 18);
    let is_special = is_special || a == 0 || a >= 240;
    !(is_special
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_broadcast()
        || ip.is_documentation()
        || ip.is_multicast())
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let parts = ip.segments();
    let [.., high, low] = parts;
    let embedded = Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match parts {
        // Addresses of IPv4 in other clothes: mapped, translated (64:ff9b::), and 6to4.
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => is_public_v4(embedded),
        [0x2002, high, low, ..] => is_public_v4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low))),
        // Teredo, and documentation.
        [0x2001, 0, ..] | [0x2001, 0xdb8, ..] => false,
        // Only these are given out to the world: everything private, local or reserved is elsewhere.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_known_in_every_dress() {
        let public = |text: &str| is_public(text.parse().unwrap());
        for address in ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"] {
            assert!(public(address), "{address}");
        }
        for address in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "192.0.0.1",
            "198.18.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
            "::7f00:1",
        ] {
            assert!(!public(address), "{address}");
        }
    }

    #[test]
    fn hosts_are_allowed_by_name_and_by_pattern() {
        let hosts = |entries: &[&str]| {
            AllowedHosts::parse(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>())
        };
        let some = hosts(&["Example.org", "*.pictures.net", "[::1]"]).unwrap();
        assert_eq!(some.allows("example.ORG."), Some(Allowed::Anywhere));
        assert_eq!(some.allows("a.pictures.net"), Some(Allowed::PublicOnly));
        assert_eq!(some.allows("[::1]"), Some(Allowed::Anywhere));
        for host in ["pictures.net", "evilpictures.net", "www.example.org", "localhost", ""] {
            assert_eq!(some.allows(host), None, "{host}");
        }
        assert_eq!(hosts(&["*", "mine"]).unwrap().allows("mine"), Some(Allowed::Anywhere));
        assert_eq!(hosts(&["*"]).unwrap().allows("127.0.0.1"), Some(Allowed::PublicOnly));
        for wrong in ["", "http://x.org", "a b", "*.", "x/y"] {
            assert!(hosts(&[wrong]).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn addresses_are_found_in_parts_alone() {
        let body = serde_json::json!([
            { "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "http://a/x.png" } }, { "type": "text", "text": "http://b" }] },
            { "type": "message", "content": [{ "type": "input_image", "image_url": "https://c/y.png" }, { "type": "input_image", "image_url": "data:,x" }] },
            { "role": "user", "content": [{ "type": "tool_result", "content": [{ "type": "image", "source": { "type": "url", "url": "https://d/z.png" } }] }] },
        ]);
        let mut urls = Vec::new();
        find_urls(&body, &mut urls);
        assert_eq!(urls, ["http://a/x.png", "https://c/y.png", "https://d/z.png"]);
    }
}
