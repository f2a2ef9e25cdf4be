//! `scripts/test-gpu.sh` without a GPU: on the CPU it runs what can be run there, finds what is wrong, and says what it
//! left out.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Place, Ran, finish, golden};

/// Runs the script with the built program, its scratch in a folder of its own.
fn script(place: &Place, golden: &Path, options: &[&str]) -> Ran {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/test-gpu.sh"));
    command.args(["--binary", env!("CARGO_BIN_EXE_gemma4c"), "--device", "cpu"]).args(options).stdin(Stdio::null());
    command.arg("--golden").arg(golden).arg("--scratch").arg(place.path("."));
    finish(&mut command)
}

/// The line of a table for a check.
fn row<'t>(table: &'t str, check: &str) -> &'t str {
    table.lines().find(|line| line.starts_with(check)).unwrap_or_else(|| panic!("no {check} in\n{table}"))
}

#[test]
fn what_agrees_passes_and_what_is_left_out_is_said() {
    let (place, folder) = (Place::new(), golden::some());
    let checks = "goldens,chunks,repeat,memcheck";
    let ran = script(&place, &folder, &["--only", checks, "--models", "m_tiny_q4_0"]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.stdout, ran.stderr);
    assert!(row(&ran.stdout, "goldens").contains(" ok       71 rows: rms "), "{}", ran.stdout);
    assert!(row(&ran.stdout, "chunks").contains(", 0 of them other bytes (0)"), "{}", ran.stdout);
    assert!(row(&ran.stdout, "memcheck").contains(" NOT RUN  there is no GPU"), "{}", ran.stdout);
    assert!(row(&ran.stdout, "repeat").contains(" NOT RUN  it is for none of these models"), "{}", ran.stdout);
    let last = ran.stdout.lines().last().expect("a last line");
    let not_run = "; NOT RUN: memcheck repeat";
    assert!(last.starts_with("2 checks, 0 failed, ") && last.ends_with(not_run), "{last}");
    let left = std::fs::read_dir(place.path(".")).expect("a folder").count();
    assert_eq!(left, 0, "the scratch folder is left as it was found");
}

/// The same reference data, but for one row of one model.
#[test]
fn what_does_not_agree_fails_and_a_missing_file_is_refused() {
    let Some(folder) = golden::folder() else { return };
    let (place, data) = (Place::new(), Place::new());
    for part in ["", "massive", "trained"] {
        std::fs::create_dir_all(data.path(part)).expect("a folder");
        for entry in std::fs::read_dir(folder.join(part)).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                let to = data.path(part).join(path.file_name().expect("a name"));
                std::os::unix::fs::symlink(&path, to).expect("a link");
            }
        }
    }
    let file = "m_tiny_q4_0.golden.safetensors";
    let mut bytes = data.read(file);
    std::fs::remove_file(data.path(file)).expect("a link that can be removed");
    let missing = script(&place, &data.path("."), &["--only", "goldens"]);
    assert_eq!((missing.code, missing.stdout.as_str()), (Some(2), ""), "{}", missing.stderr);
    assert!(missing.stderr.contains(&format!("has no {file}")), "{}", missing.stderr);

    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let text = String::from_utf8(bytes[8..8 + header].to_vec()).expect("a header");
    let after = text.split("\"logits\":").nth(1).and_then(|rest| rest.split("\"data_offsets\":[").nth(1));
    let start: usize = after.and_then(|rest| rest.split(',').next()?.parse().ok()).expect("where the logits start");
    bytes[8 + header + start..][..4].copy_from_slice(&29.0f32.to_le_bytes());
    data.write(file, bytes);
    let ran = script(&place, &data.path("."), &["--only", "goldens", "--models", "m_tiny_q4_0,m_tiny_q8_0"]);
    assert_eq!(ran.code, Some(1), "{}{}", ran.stdout, ran.stderr);
    assert!(row(&ran.stdout, "goldens     m_tiny_q4_0").contains(" FAILED   71 rows: "), "{}", ran.stdout);
    assert!(row(&ran.stdout, "goldens     m_tiny_q8_0").contains(" ok       71 rows: "), "{}", ran.stdout);
    assert!(ran.stderr.contains("row 0, read: the best token is "), "{}", ran.stderr);

    for (options, words) in [
        (&["--only", "everything"][..], "--only everything: there are kernels "),
        (&["--models", "x"], "--models x: there are d_tiny_bf16 "),
        (&["--only", "verify"], "nothing was checked"),
        (&["--jobs", "0"], "--jobs 0"),
        (&["--frobnicate"], "unknown argument --frobnicate"),
    ] {
        let ran = script(&place, &folder, options);
        assert!(ran.code == Some(2) && ran.stderr.contains(words), "{options:?}: {}", ran.stderr);
    }
}
