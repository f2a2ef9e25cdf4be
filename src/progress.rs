//! Progress on stderr, and only where a person watches.

use indicatif::{ProgressBar, ProgressStyle};

use crate::{by_name, device};

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

/// Shows what is told while a plan is opened.
pub fn show_loading(bar: &ProgressBar, told: device::Told) {
    match told {
        device::Told::Note(note) => bar.suspend(|| eprintln!("{note}")),
        device::Told::Loaded(done, total) => {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

/// Shows what is told while a model is fetched, with a bar for each file.
#[derive(Default)]
pub struct Fetching {
    bar: Option<ProgressBar>,
}

impl Fetching {
    pub fn show(&mut self, told: by_name::Told<'_>) {
        match told {
            by_name::Told::Note(note) => eprintln!("[{note}]"),
            by_name::Told::Arrived { name, bytes, total } => {
                self.bar.get_or_insert_with(|| download(name, total)).set_position(bytes);
            }
            by_name::Told::Whole => self.clear(),
        }
    }

    /// Takes away the bar of a file that is whole, or that did not come.
    pub fn clear(&mut self) {
        self.bar.take().into_iter().for_each(|bar| bar.finish_and_clear());
    }
}
