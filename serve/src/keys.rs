//! API keys: only their hashes are kept, and all of them are compared in constant time.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};
use subtle::ConstantTimeEq;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::generation::any_seed;

/// The keys that open a server; none at all leaves it open.
pub struct Keys {
    seed: u64,
    hashes: Vec<[u8; 16]>,
}

impl Keys {
    /// One key a line; empty lines and lines that begin with `#` do not count.
    pub fn parse(text: &str) -> Keys {
        let seed = any_seed();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Keys { seed, hashes: lines.map(|key| hash(seed, key)).collect() }
    }

    fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Whether a request has one of them.
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        if self.is_empty() {
            return true;
        }
        let Some(given) = self.given(headers) else { return false };
        let found = self.hashes.iter().fold(subtle::Choice::from(0), |found, other| found | other.ct_eq(&given));
        found.into()
    }

    /// Whose a request is, among those that share the engine: by its address and, where the server has keys, its key.
    pub fn client(&self, address: IpAddr, headers: &HeaderMap) -> u64 {
        let key = self.given(headers).filter(|_| !self.is_empty()).unwrap_or_default();
        xxh3_64_with_seed(format!("{address} {key:?}").as_bytes(), self.seed)
    }

    /// The hash of the key that a request brings.
    fn given(&self, headers: &HeaderMap) -> Option<[u8; 16]> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| value.strip_prefix("Bearer "));
        let key = bearer.or_else(|| text("x-api-key"))?;
        Some(hash(self.seed, key.trim()))
    }
}

/// Keyed by a number that nobody outside knows, so that what it takes to compare says nothing about a key.
fn hash(seed: u64, key: &str) -> [u8; 16] {
    xxh3_128_with_seed(key.as_bytes(), seed).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_key_opens_in_either_header() {
        let keys = Keys::parse("# ours\nfirst\n\n second \n");
        assert_eq!(keys.hashes.len(), 2);
        let admits = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            keys.admit(&headers)
        };
        assert!(admits("authorization", "Bearer first") && admits("x-api-key", "second"));
        assert!(!admits("authorization", "first") && !admits("authorization", "Bearer third") && !admits("a", "first"));
        assert!(Keys::parse("").admit(&HeaderMap::new()));
    }

    #[test]
    fn a_client_is_an_address_and_a_key() {
        let with = |key: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", HeaderValue::from_static(key));
            headers
        };
        let [here, there] = [[127, 0, 0, 1], [10, 0, 0, 1]].map(IpAddr::from);
        let keys = Keys::parse("first\nsecond");
        assert_eq!(keys.client(here, &with("first")), keys.client(here, &with("first")));
        assert_ne!(keys.client(here, &with("first")), keys.client(here, &with("second")));
        assert_ne!(keys.client(here, &with("first")), keys.client(there, &with("first")));
        // Where no key is needed, one that is made up makes nobody another client.
        let open = Keys::parse("");
        assert_eq!(open.client(here, &with("first")), open.client(here, &with("second")));
    }
}
