//! The first thing a newcomer runs: it writes English, says what it did, and leaves files that other commands take.

use crate::common::{Place, golden};

/// What the embedded model writes on a CPU when nobody asks for anything else. A CPU's results are the same everywhere.
const TEXT: &str = r#""Tell me, Mr. Darcy," said Elizabeth, "you are not uncommon."

"I dare say he is so good as you are now, and he is not here; and I dare say it is not a very good woman."

"Indeed! What is it too?"

"No, it is not possible that they are."
"#;

/// The text before the report.
fn text(output: &str) -> &str {
    output.split_once("\nmodel ").unwrap_or_else(|| panic!("no report in\n{output}")).0
}

#[test]
fn it_writes_english_and_says_how() {
    let place = Place::new();
    let output = place.ok("demo --device cpu");
    assert_eq!(text(&output), TEXT);
    for line in [
        "model    a Gemma 4 of 10.7 million parameters, trained on Jane Austen; 6.44 MB in Q4_0",
        "device   the CPU, as asked for",
        "plan     6 layers, 182 steps, ",
        "speed    prefill ",
        "drafts   ",
        "check    a run without drafts gave the same 66 tokens, and the same bits in all 2048 logits of the last position",
    ] {
        assert!(output.lines().any(|l| l.starts_with(line)), "{line} is not in\n{output}");
    }
    // The README shows this, but for what depends on the machine.
    let readme = include_str!("../../README.md");
    let depends = |line: &str| ["device", "plan ", "speed"].iter().any(|word| line.starts_with(word));
    for line in output.lines().filter(|line| !depends(line)) {
        assert!(readme.lines().any(|shown| shown == line), "the README does not show {line:?}");
    }
    // Again in the same folder.
    assert_eq!(text(&place.ok("demo --device cpu")), TEXT);
}

#[test]
fn what_it_leaves_is_for_the_other_commands() {
    let place = Place::new();
    place.ok("demo --device cpu -n 3 -o here/and/there");
    let mut files: Vec<String> = std::fs::read_dir(place.path("here/and/there"))
        .expect("the folder")
        .map(|file| file.expect("a file").file_name().to_string_lossy().into_owned())
        .collect();
    files.sort();
    assert_eq!(files, ["austen.gguf", "austen_draft.gguf", "plan.bin", "plan.html"]);
    let run = place.ok("run here/and/there/plan.bin --seed 0 -n 66 -p '\"Tell me, Mr. Darcy,\" said Elizabeth,'");
    assert_eq!(format!("\"Tell me, Mr. Darcy,\" said Elizabeth,{run}"), TEXT);
    place.ok("inspect here/and/there/plan.bin --html again.html");
    assert_eq!(place.read("again.html"), place.read("here/and/there/plan.html"));
    assert!(place.ok("inspect here/and/there/austen.gguf").starts_with("model          austen\n"));
}

#[test]
fn it_continues_a_readers_own_words() {
    let place = Place::new();
    let say = |line: &str| text(&place.ok(&format!("demo --device cpu -n 12 {line}"))).to_owned();
    let one = say("-p 'The carriage'");
    assert!(one.starts_with("The carriage") && one.len() > 30, "{one}");
    assert_eq!(one, say("-p 'The carriage' --seed 0"));
    assert_ne!(one, say("-p 'The carriage' --seed 1"));
    assert_eq!(say("-p 'The carriage' --temp 0"), say("-p 'The carriage' --top-k 1 --seed 7"));
    assert_ne!(say("-p 'The carriage' --temp 2 --top-k 0 --top-p 1"), one);
    // From nothing at all, and from what no vocabulary has.
    assert!(say("-p ''").len() > 10);
    assert!(say("-p '東京 🚀'").starts_with("東京 🚀"));
}

#[test]
fn what_cannot_be_done_is_said_before_a_word_is_written() {
    let place = Place::new();
    assert_eq!(place.refused("demo -n 0"), "error: -n 0: the demo has nothing to show without a token\n");
    assert!(place.refused("demo --device cpu --temp 101").contains("a temperature"));
    assert!(place.refused("demo --chat").contains("--chat"));
    let refused = place.refused(&format!("demo --device cpu -p '{}'", "once more ".repeat(9000)));
    assert!(refused.ends_with(" tokens, and the model 8192 positions: give less\n"), "{refused}");
    for folder in ["file", "file/below"] {
        place.write("file", "not a folder");
        let refused = place.refused(&format!("demo --device cpu -o {folder}"));
        assert!(refused.starts_with(&format!("error: cannot put the demo's files in {folder}: ")), "{refused}");
    }
    std::fs::create_dir_all(place.path("taken/plan.bin")).expect("a folder");
    let refused = place.refused("demo --device cpu -o taken");
    assert!(refused.contains("cannot write taken/plan.bin: it is there, and not a regular file"), "{refused}");
}

/// Of what the drafter guesses, three tokens a round, the share that is right where the model always takes its best
/// token. On a CPU it is the same everywhere.
#[test]
fn half_of_the_drafts_are_right_and_change_nothing() {
    let place = Place::new();
    let output = place.ok("demo --device cpu --temp 0 -n 200 -p 'The carriage'");
    let counts = output.lines().find_map(|line| line.strip_prefix("drafts   ")).expect("a line of drafts");
    let number = |word: usize| counts.split_whitespace().nth(word).and_then(|word| word.parse::<f64>().ok());
    let share = number(0).expect("how many were right") / number(2).expect("of how many");
    assert!(share > 0.45, "{counts}");
    let run = "run gemma4c-demo/plan.bin -p 'The carriage' --temp 0 -n 200 --draft";
    let undrafted = place.ok(&format!("{run} off"));
    assert_eq!(undrafted, place.ok(&format!("{run} 7")));
    assert_eq!(text(&output), format!("The carriage{undrafted}"));
}

/// The figures that `assets/README.md` gives were taken from the reference's file.
#[test]
fn the_embedded_model_is_the_one_that_was_measured() {
    let Some(folder) = golden::folder() else { return };
    let reference = std::fs::read(folder.join("trained/austen_q4_0.gguf")).expect("the trained model");
    let place = Place::new();
    place.ok("demo --device cpu -n 1");
    assert!(place.read("gemma4c-demo/austen.gguf") == reference, "the embedded model is another one");
}
