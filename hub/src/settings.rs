//! Where models come from and where they are kept: the environment variables of Hugging Face's own tools, with their
//! meanings.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::HubError;

/// Requests at once for one file.
const CONNECTIONS: usize = 8;
/// Bytes of a request: few enough that all connections' pieces fit into memory twice.
const PIECE: u64 = 8 << 20;

/// What a hub is opened with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The hub, without a slash at its end.
    pub endpoint: String,
    /// The folder of all repositories.
    pub cache: PathBuf,
    /// Is sent to the endpoint, and to nobody else.
    pub token: Option<String>,
    /// Nothing is asked of the network.
    pub is_offline: bool,
    /// Root certificates in PEM that replace the built-in ones.
    pub roots: Option<Vec<u8>>,
    /// Requests at once for one file.
    pub connections: usize,
    /// Bytes of one request.
    pub piece: u64,
    /// Half of the first wait before something is tried again.
    pub patience: Duration,
}

impl Settings {
    /// `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and their elder names, and `SSL_CERT_FILE`.
    pub fn from_env() -> Result<Settings, HubError> {
        Settings::read(&|name| env::var_os(name))
    }

    fn read(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Settings, HubError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let user_cache = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        let home = path("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub"))).ok_or(HubError::NoCache)?;
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let stored = || fs::read_to_string(token_file?).ok();
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(stored);
        let roots = path("SSL_CERT_FILE").map(|path| fs::read(&path).map_err(HubError::read(&path))).transpose()?;
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if !["https://", "http://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            return Err(HubError::Endpoint { endpoint });
        }
        Ok(Settings {
            endpoint,
            cache,
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            is_offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            roots,
            connections: CONNECTIONS,
            piece: PIECE,
            patience: Duration::from_millis(250),
        })
    }
}

fn is_true(value: &str) -> bool {
    ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, HubError> {
        let of =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
        Settings::read(&of)
    }

    #[test]
    fn the_cache_is_where_hugging_face_has_it() {
        let all = [
            ("HF_HUB_CACHE", "/a"),
            ("HUGGINGFACE_HUB_CACHE", "/b"),
            ("HF_HOME", "/c"),
            ("XDG_CACHE_HOME", "/d"),
            ("HOME", "/e"),
        ];
        let places = ["/a", "/b", "/c/hub", "/d/huggingface/hub", "/e/.cache/huggingface/hub"];
        for (first, place) in places.iter().enumerate() {
            assert_eq!(read(&all[first..]).expect("settings").cache, PathBuf::from(place));
        }
        assert!(matches!(read(&[]), Err(HubError::NoCache)));
    }

    #[test]
    fn variables_have_their_meanings() {
        let usual = read(&[("HOME", "/nowhere")]).expect("settings");
        assert_eq!((usual.endpoint.as_str(), usual.token, usual.is_offline), ("https://huggingface.co", None, false));
        let set =
            [("HOME", "/nowhere"), ("HF_ENDPOINT", "http://a:1/"), ("HF_TOKEN", " t\n"), ("HF_HUB_OFFLINE", "YES")];
        let set = read(&set).expect("settings");
        assert_eq!((set.endpoint.as_str(), set.token.as_deref(), set.is_offline), ("http://a:1", Some("t"), true));
        assert!(matches!(read(&[("HOME", "/"), ("HF_ENDPOINT", "a")]), Err(HubError::Endpoint { .. })));
        assert!(matches!(read(&[("HOME", "/"), ("SSL_CERT_FILE", "/none")]), Err(HubError::Read { .. })));
    }
}
