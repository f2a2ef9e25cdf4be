//! The chat page: its files, compiled in, and the headers they go out with.
//!
//! The files load nothing from elsewhere, and the policy holds a browser to that: scripts and styles are these files,
//! no text that a model or a user writes can become either, and the page talks to its own server only. What the page
//! does is in `page/`.

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};

/// Path, media type and text of each file.
const FILES: [(&str, &str, &str); 6] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/page/chat.mjs", "text/javascript; charset=utf-8", include_str!("page/chat.mjs")),
    ("/page/media.mjs", "text/javascript; charset=utf-8", include_str!("page/media.mjs")),
    ("/page/store.mjs", "text/javascript; charset=utf-8", include_str!("page/store.mjs")),
    ("/page/markdown.mjs", "text/javascript; charset=utf-8", include_str!("page/markdown.mjs")),
];

const POLICY: &str = "default-src 'none'; connect-src 'self'; img-src data: blob:; media-src data: blob:; style-src 'self'; \
                      script-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The paths of the page, which need no key: a browser has none before it shows the page that asks for one.
pub fn paths() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(path, _, _)| *path)
}

/// The file at one of these paths.
pub fn file(path: &str) -> Option<Response<Body>> {
    let (_, kind, text) = FILES.iter().find(|(known, _, _)| *known == path)?;
    let mut response = Response::new(Body::from(*text));
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, *kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Files of two versions of the server do not fit each other.
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_its_own_files_and_no_others() {
        let named = |text: &str, starts: &[&str]| -> Vec<String> {
            let quoted =
                |start: &str| text.split(start).skip(1).filter_map(|rest| rest.split('"').next()).collect::<Vec<_>>();
            starts.iter().flat_map(|start| quoted(start)).map(str::to_owned).collect()
        };
        for (path, _, text) in FILES {
            for outside in
                ["http://", "https://", "//cdn", "url(", "@import", "innerHTML", "insertAdjacentHTML", "eval("]
            {
                // The scheme of an address in an answer is compared, which is no address.
                let is_pattern = path == "/page/markdown.mjs" && outside.starts_with("http");
                assert!(is_pattern || !text.contains(outside), "{path} has {outside}");
            }
            for name in named(text, &[" href=\"", " src=\""]) {
                assert!(file(&format!("/{name}")).is_some(), "{path} names {name}");
            }
            for name in named(text, &[" from \"./"]) {
                assert!(file(&format!("/page/{name}")).is_some(), "{path} imports {name}");
            }
        }
    }

    /// The policy allows no inline scripts and styles, so there must be none.
    #[test]
    fn nothing_on_the_page_needs_an_inline_script_or_style() {
        assert!(!POLICY.contains("unsafe") && POLICY.starts_with("default-src 'none'"));
        let (_, _, page) = FILES[0];
        assert!(page.starts_with("<!doctype html>") && !page.contains("<style") && !page.contains(" style="));
        assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=").count());
        let handlers = page
            .split(" on")
            .skip(1)
            .filter(|rest| rest.split_once('=').is_some_and(|(name, _)| name.chars().all(char::is_alphabetic)));
        assert_eq!(handlers.count(), 0, "an attribute is a script");
    }
}
