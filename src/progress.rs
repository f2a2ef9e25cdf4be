//! Progress on stderr, and only where a person watches.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts bytes. It is invisible when stderr is not a terminal.
pub fn bytes(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
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
