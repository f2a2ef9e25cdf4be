//! Progress on stderr, and only where a person watches.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts bytes. It is invisible when stderr is not a terminal.
pub fn bytes(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style).with_message(what.to_string())
}

/// The same of a file that comes over a network, with the time that is left.
pub fn download(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style).with_message(what.to_string())
}

/// A bar that counts tokens.
pub fn tokens(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} tokens {per_sec}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style).with_message(what.to_string())
}

/// A bar that counts answers.
pub fn answers(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("answering {wide_bar} {pos}/{len} {msg} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style)
}

/// A sign that something takes a while, where nobody knows how long.
pub fn waiting(what: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{spinner} {msg} {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner());
    let bar = ProgressBar::new_spinner().with_style(style).with_message(what.to_string());
    bar.enable_steady_tick(std::time::Duration::from_millis(120));
    bar
}
