//! What was fetched for a request.

use std::collections::BTreeMap;

/// What was fetched for a request, by its address, or why it was not.
#[derive(Default)]
pub struct Fetched(pub(super) BTreeMap<String, Result<Vec<u8>, String>>);

impl Fetched {
    pub fn bytes(&self, url: &str) -> Result<&[u8], String> {
        match self.0.get(url) {
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(why)) => Err(why.clone()),
            None if !starts_with_scheme(url, "http:") && !starts_with_scheme(url, "https:") => {
                Err("a URL must begin with data:, http:// or https://".into())
            }
            None => {
                Err("this server fetches nothing: send the file in a data URL, or start it with --media-url-allow"
                    .into())
            }
        }
    }
}

pub fn starts_with_scheme(url: &str, scheme: &str) -> bool {
    url.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
}
