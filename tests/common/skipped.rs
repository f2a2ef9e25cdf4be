//! What a test says when it cannot check something because this machine lacks it: reference data, NVRTC.
//!
//! A test that found nothing to compare with passes, so its silence would look like success. Each says so in a line of
//! its own, past the test harness, which swallows the output of tests that pass; `scripts/test.sh` counts these lines
//! in its last one.

use std::fs::OpenOptions;
use std::io::Write;

/// Names a file to which the lines are appended too, for whoever counts them.
const LIST: &str = "GEMMA4C_NOT_CHECKED";

/// Says that this thread's test, or a part of it, has checked nothing for want of `what`.
pub fn not_checked(what: &str) {
    let thread = std::thread::current();
    let line = format!("NOT CHECKED: {}: {what}\n", thread.name().unwrap_or("a test"));
    std::io::stderr().write_all(line.as_bytes()).expect("stderr takes a message");
    if let Some(list) = std::env::var_os(LIST) {
        let mut list = OpenOptions::new().create(true).append(true).open(list).expect("the list can be written");
        list.write_all(line.as_bytes()).expect("the list takes a line");
    }
}
