//! Finished windows on disk, so that an interrupted run can go on.
//!
//! ```text
//! gemma4c perplexity checkpoint 1
//! plan: 0123456789abcdef
//! …                                       what else the figures depend on, a line each
//!
//! 1   3.21 0.94 …   3.20 0.95 …   0.0012 …   1 1 …
//! ```
//! A line a window, with tabs between its number, its tokens' negative log-likelihoods and, with another plan, the
//! other's, the divergences, and whether both find the same token likeliest (1 or 0). A number is written with as many
//! digits as give the same bits back. Lines are only ever appended, each in one write: an interruption leaves whole
//! lines and at most a part of one, which is cut off.

use std::fmt::{Display, Write as _};
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::score::{Against, Scores};
use super::windows::Window;
use crate::output::{self, OutputFile};

const FIRST_LINE: &str = "gemma4c perplexity checkpoint 1\n";
/// More than any header has: a file is looked at this far to say what it is.
const HEADER_BYTES: u64 = 1 << 16;
/// More than a number, its separator, and what goes with it take in any line.
const BYTES_A_TOKEN: usize = 128;

/// What the figures depend on.
pub struct Header {
    fields: Vec<(&'static str, String)>,
}

impl Header {
    pub fn new() -> Header {
        // Another build may compute otherwise.
        Header { fields: vec![("version", env!("CARGO_PKG_VERSION").into())] }
    }

    pub fn add(&mut self, name: &'static str, value: impl Display) {
        // A line is a field.
        self.fields.push((name, value.to_string().replace('\n', " ")));
    }

    fn text(&self) -> String {
        let fields: String = self.fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        format!("{FIRST_LINE}{fields}\n")
    }

    /// What a file's header has otherwise, in words; empty where it is the same.
    fn differences(&self, text: &str) -> Vec<String> {
        let there = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let differs = |(name, value): &(&str, String)| match there(name) {
            Some(found) if found == value => None,
            found => Some(format!("{name}: {} there, {value} here", found.unwrap_or("none"))),
        };
        self.fields.iter().filter_map(differs).collect()
    }
}

/// A file that takes finished windows.
#[derive(Debug)]
pub struct Checkpoint {
    file: File,
    path: PathBuf,
    windows: usize,
}

/// A checkpoint, and what is in it.
#[derive(Debug)]
pub struct Opened {
    pub checkpoint: Checkpoint,
    pub finished: Vec<Scores>,
}

impl Checkpoint {
    /// Opens or begins the checkpoint of a run. A file that is anything else is refused and left as it is.
    pub fn open(path: &OutputFile, header: &Header, windows: &[Window], has_against: bool) -> Result<Opened> {
        let name = path.display();
        let cannot_open = || format!("cannot open {name}");
        let mut file = output::open_kept(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{name} is in use: another run is writing to it"),
            Err(TryLockError::Error(error)) => return Err(error).with_context(|| format!("cannot lock {name}")),
        }
        let mut start = Vec::new();
        (&file).take(HEADER_BYTES).read_to_end(&mut start).with_context(cannot_open)?;
        let own = header.text();
        let cannot_write = || format!("cannot write {name}");
        let mut finished = Vec::new();
        let mut whole = own.len() as u64;
        if own.as_bytes().starts_with(&start) && start.len() < own.len() {
            // A new file, or one whose first write was interrupted.
            file.set_len(0).with_context(cannot_write)?;
            file.seek(SeekFrom::Start(0)).with_context(cannot_write)?;
            file.write_all(own.as_bytes()).with_context(cannot_write)?;
        } else {
            check_header(path, header, &start)?;
            file.seek(SeekFrom::Start(whole)).with_context(cannot_open)?;
            whole += read_windows(&mut BufReader::new(&file), path, &own, windows, has_against, &mut finished)?;
            file.set_len(whole).with_context(cannot_write)?;
            file.seek(SeekFrom::Start(whole)).with_context(cannot_write)?;
        }
        let checkpoint = Checkpoint { file, path: path.to_path_buf(), windows: finished.len() };
        Ok(Opened { checkpoint, finished })
    }

    /// Adds the next window.
    pub fn append(&mut self, scores: &Scores) -> Result<()> {
        self.windows += 1;
        let line = line(self.windows, scores);
        self.file.write_all(line.as_bytes()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn check_header(path: &Path, header: &Header, start: &[u8]) -> Result<()> {
    let name = path.display();
    let is_ours = start.starts_with(FIRST_LINE.as_bytes());
    ensure!(is_ours, "{name} is there, and not a checkpoint that this gemma4c can read: give another name");
    let text = String::from_utf8_lossy(start);
    let (text, _) = text.split_once("\n\n").unwrap_or((&text, ""));
    let differences = header.differences(text);
    ensure!(differences.is_empty(), "{name} is the checkpoint of another run ({})", differences.join("; "));
    ensure!(start.starts_with(header.text().as_bytes()), "{name} is damaged: its header is not as it was written");
    Ok(())
}

/// Reads the lines after the header, and returns how many bytes those have that are whole.
fn read_windows(
    from: &mut impl BufRead,
    path: &Path,
    header: &str,
    windows: &[Window],
    has_against: bool,
    finished: &mut Vec<Scores>,
) -> Result<u64> {
    let mut whole = 0;
    let mut bytes = Vec::new();
    for window in windows {
        bytes.clear();
        let most = (window.scored() + 1).saturating_mul(BYTES_A_TOKEN) as u64;
        let cannot_read = || format!("cannot read {}", path.display());
        let read = from.by_ref().take(most).read_until(b'\n', &mut bytes).with_context(cannot_read)?;
        let number = finished.len() + 1;
        let damaged = || {
            let line = header.lines().count() + number;
            format!("{} is damaged in line {line}: delete the file to begin again", path.display())
        };
        if bytes.pop_if(|byte| *byte == b'\n').is_none() {
            ensure!((read as u64) < most, damaged());
            return Ok(whole);
        }
        let scores = std::str::from_utf8(&bytes).ok().and_then(|line| parse(line, number, window, has_against));
        finished.push(scores.with_context(damaged)?);
        whole += read as u64;
    }
    let more = from.fill_buf().is_ok_and(|bytes| !bytes.is_empty());
    ensure!(!more, "{} is damaged: it has more than the {} windows of this run", path.display(), windows.len());
    Ok(whole)
}

fn line(number: usize, scores: &Scores) -> String {
    let mut line = number.to_string();
    let mut add = |values: &mut dyn Iterator<Item = String>| {
        for (index, value) in values.enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(line, "{}{value}", if index == 0 { '\t' } else { ' ' });
        }
    };
    // Debug writes small numbers with an exponent, and either way the shortest text that reads back to the same bits.
    let exact = |value: &f64| format!("{value:?}");
    add(&mut scores.nll.iter().map(exact));
    if let Some(Against { nll, kl, same_top }) = &scores.against {
        add(&mut nll.iter().map(exact));
        add(&mut kl.iter().map(exact));
        add(&mut same_top.iter().map(|same| u8::from(*same).to_string()));
    }
    line + "\n"
}

/// What `line` wrote of this window; `None` for anything else.
fn parse(line: &str, number: usize, window: &Window, has_against: bool) -> Option<Scores> {
    let mut fields = line.split('\t');
    if fields.next()? != number.to_string() {
        return None;
    }
    let floats = |field: &str| {
        let values: Vec<f64> = field.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
        (values.len() == window.scored() && values.iter().all(|value| value.is_finite())).then_some(values)
    };
    let flags = |field: &str| {
        let flag = |word: &str| match word {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        };
        let values: Vec<bool> = field.split(' ').map(flag).collect::<Option<_>>()?;
        (values.len() == window.scored()).then_some(values)
    };
    let nll = floats(fields.next()?)?;
    let against = match has_against {
        true => {
            let (nll, kl) = (floats(fields.next()?)?, floats(fields.next()?)?);
            Some(Against { nll, kl, same_top: flags(fields.next()?)? })
        }
        false => None,
    };
    fields.next().is_none().then_some(Scores { nll, against })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(tokens: usize) -> Window {
        Window { name: "window".into(), tokens: vec![0; tokens], first_scored: 1 }
    }

    #[test]
    fn a_line_gives_the_same_bits_back() {
        let nll = vec![0.1 + 0.2, 1.0 / 3.0, f64::MIN_POSITIVE / 3.0, 1e300, -0.0];
        let same_top = vec![true, false, false, true, true];
        let against = Against { nll: nll.iter().rev().copied().collect(), kl: vec![7e-17; 5], same_top };
        for scores in [Scores { nll: nll.clone(), against: None }, Scores { nll, against: Some(against) }] {
            let text = line(3, &scores);
            assert!(text.len() < 6 * BYTES_A_TOKEN, "{text}");
            let text = text.strip_suffix('\n').expect("a line");
            let has_against = scores.against.is_some();
            let back = parse(text, 3, &window(6), has_against).expect("what was written");
            assert_eq!(line(3, &back), line(3, &scores));
            assert_eq!(back, scores);
            assert_eq!(parse(text, 2, &window(6), has_against), None, "another window's");
            assert_eq!(parse(text, 3, &window(5), has_against), None, "a shorter window's");
            assert_eq!(parse(text, 3, &window(6), !has_against), None, "of one plan more or less");
            let (cut, _) = text.rsplit_once(' ').expect("several values");
            assert_eq!(parse(cut, 3, &window(6), has_against), None, "a value less");
        }
    }

    #[test]
    fn what_differs_is_named() {
        let header = |device: &str, phase: &str| {
            let mut header = Header::new();
            header.add("device", device);
            header.add("phase", phase);
            header
        };
        let there = header("cpu", "prefill").text();
        assert_eq!(header("cpu", "prefill").differences(&there), Vec::<String>::new());
        let differences = header("cpu", "decode").differences(&there);
        assert_eq!(differences, ["phase: prefill there, decode here"]);
        assert_eq!(header("a\nb", "prefill").differences(&there), ["device: cpu there, a b here"]);
        let mut more = header("cpu", "prefill");
        more.add("against", "f32");
        assert_eq!(more.differences(&there), ["against: none there, f32 here"]);
    }
}
