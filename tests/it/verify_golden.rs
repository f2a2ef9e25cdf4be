//! `gemma4c verify --golden`: what agrees with a reference file passes, what does not is found and said, and a file
//! that is no reference is refused.
//!
//! The reference is what the program itself computed, disturbed on purpose. That the program agrees with other programs
//! is another test's to show (`tests/it/golden.rs`).

use crate::common::{Place, Ran, Tensors, golden, ids, random_tokens};
use safetensors::tensor::{Dtype, TensorView};

/// Tokens of the prompt, and of its continuation.
const PROMPT: usize = 9;
const GREEDY: usize = 4;

/// A tensor as it is stored: name, type, shape and bytes.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// What a reference file says.
#[derive(Clone)]
struct Reference {
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    vocabulary: usize,
    logits: Vec<f32>,
    greedy_logits: Vec<f32>,
    gaps: Option<Vec<f32>>,
}

impl Reference {
    /// A plan, and what it computes: the prompt at once, the rest one by one.
    fn of(place: &Place) -> Reference {
        place.ok("synth tiny-moe -q q8_0 --layers 2 -o model.gguf --seed 4");
        place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64");
        let tokens = random_tokens(7, PROMPT + GREEDY, 1024);
        let fed = ids(&tokens[..PROMPT + GREEDY - 1]);
        let ours = place.logits("plan.bin", &format!("--tokens {fed} --all --prefill {PROMPT}"));
        let logits = ours.get("logits");
        Reference {
            tokens: tokens[..PROMPT].to_vec(),
            greedy: tokens[PROMPT..].to_vec(),
            vocabulary: logits.width(),
            logits: logits.rows(0..PROMPT).to_vec(),
            greedy_logits: logits.rows(PROMPT - 1..PROMPT - 1 + GREEDY).to_vec(),
            gaps: None,
        }
    }

    /// All tensors of the file.
    fn tensors(&self) -> Vec<Stored> {
        let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let ids = |tokens: &[u32]| tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>();
        let mut tensors = vec![
            ("tokens".to_string(), Dtype::I32, vec![PROMPT], ids(&self.tokens)),
            ("logits".into(), Dtype::F32, vec![PROMPT, self.vocabulary], floats(&self.logits)),
            ("greedy.tokens".into(), Dtype::I32, vec![GREEDY], ids(&self.greedy)),
            ("greedy.logits".into(), Dtype::F32, vec![GREEDY, self.vocabulary], floats(&self.greedy_logits)),
        ];
        tensors.extend(self.gaps.as_ref().map(|gaps| ("router_gap.1".into(), Dtype::F32, vec![PROMPT], floats(gaps))));
        tensors
    }
}

fn write(place: &Place, tensors: &[Stored]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("as many bytes as its shape says"))
    });
    place.write("golden.safetensors", safetensors::serialize(views, None).expect("a file"));
}

fn verify(place: &Place, reference: &Reference, options: &str) -> Ran {
    write(place, &reference.tensors());
    place.run(&format!("verify plan.bin --golden golden.safetensors {options}"))
}

#[test]
fn what_agrees_passes_however_it_is_fed() {
    let place = Place::new();
    let reference = Reference::of(&place);
    for (options, read) in [("", PROMPT), ("--prefill 1", 1), ("--prefill 5 --chunk 2", 5), ("--prefill 12", 12)] {
        let ran = verify(&place, &reference, options);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{options}\n{}", ran.stdout);
        let decoded = PROMPT + GREEDY - 1 - read;
        let figures = "12 rows: rms 0.000e0 of 0.001, worst row 0.000e0 of 0.001, largest 0.000e0 of 0.001, same best 12, \
                       widest overturned 0.000 of 0.002";
        let head = "Gemma 4 tiny-moe, random weights on cpu against golden.safetensors";
        assert_eq!(ran.stdout, format!("{head}: {read} tokens read, {decoded} decoded\n{figures}\nok\n"));
    }
}

/// Each disturbance with the words it is found by, and a limit that lets it pass.
#[test]
fn what_differs_is_found_and_said() {
    let place = Place::new();
    let right = Reference::of(&place);
    let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("values");
    let width = right.vocabulary;

    let mut read = right.clone();
    read.logits[3 * width + 17] += 0.01;
    let mut decoded = right.clone();
    decoded.greedy_logits[2 * width + 17] -= 0.01;
    let mut nothing = right.clone();
    nothing.greedy_logits[width] = f32::NAN;
    let mut all = right.clone();
    all.logits.iter_mut().chain(&mut all.greedy_logits).for_each(|v| *v += 0.002);
    let mut other = right.clone();
    let row = &mut other.logits[5 * width..6 * width];
    let (first, largest) = (best(row), row[best(row)]);
    row[(first + 1) % width] = largest + 0.05;
    for (wrong, words, allowed) in [
        (&read, "row 3, read: a logit is off by 1.000e-2", "--limit-max 0.011"),
        (&decoded, "row 10, decoded: a logit is off by 1.000e-2", "--limit-max 0.011"),
        (&all, "all rows: rms 2.000e-3", "--limit-rms 0.0021 --limit-row 0.0021 --limit-max 0.0021"),
        (&other, "row 5, read: the best token is ", "--clear-margin 0.06 --limit-rms 9 --limit-row 9 --limit-max 99"),
    ] {
        let ran = verify(&place, wrong, "");
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{words}\n{}", ran.stdout);
        assert!(ran.stdout.contains(&format!("\n  {words}")) && ran.stdout.ends_with("\nFAILED\n"), "{}", ran.stdout);
        let ran = verify(&place, wrong, allowed);
        assert_eq!(ran.code, Some(0), "{words}, {allowed}\n{}", ran.stdout);
    }
    // What is not a number is infinitely far from anything.
    let ran = verify(&place, &nothing, "--limit-rms 1e9 --limit-row 1e9 --limit-max 1e9");
    assert!(
        ran.code == Some(1) && ran.stdout.contains("row 9, decoded: ") && ran.stdout.contains("off by inf"),
        "{}",
        ran.stdout
    );
}

/// A row whose experts may change places is not judged alone, but it counts in the rms of all.
#[test]
fn rows_with_unclear_routing_are_left_out() {
    let place = Place::new();
    let mut reference = Reference::of(&place);
    reference.logits[4 * reference.vocabulary] += 0.01;
    let mut gaps = vec![1.0; PROMPT];
    gaps[4] = 0.1;
    reference.gaps = Some(gaps);
    let ran = verify(&place, &reference, "--clear-gap 0.2");
    assert!(ran.code == Some(0) && ran.stdout.contains(", 1 with unclear routing\n"), "{}", ran.stdout);
    assert!(!ran.stdout.contains(": rms 0.000e0"), "{}", ran.stdout);
    assert_eq!(verify(&place, &reference, "--clear-gap 0.05").code, Some(1));
    // f32 changes no expert's place.
    assert_eq!(verify(&place, &reference, "").code, Some(1));
}

#[test]
fn what_is_no_reference_is_refused() {
    let place = Place::new();
    let reference = Reference::of(&place);
    let line = "verify plan.bin --golden golden.safetensors";
    let edited = |words: &str, edit: &dyn Fn(&mut Vec<Stored>)| {
        let mut tensors = reference.tensors();
        edit(&mut tensors);
        write(&place, &tensors);
        let message = place.refused(line);
        assert!(message.contains("golden.safetensors") && message.contains(words), "{message}");
    };
    edited("it has no tensor `tokens`", &|tensors| drop(tensors.remove(0)));
    edited("it has no tensor `logits`", &|tensors| drop(tensors.remove(1)));
    edited("it has `greedy.tokens`, but no `greedy.logits`", &|tensors| drop(tensors.remove(3)));
    edited("`tokens` is F32, not I32 or I64", &|tensors| tensors[0].1 = Dtype::F32);
    edited("`logits` is I32, not F32", &|tensors| tensors[1].1 = Dtype::I32);
    edited("`tokens` has -1 in it", &|tensors| tensors[0].3[..4].fill(0xff));
    edited("8 rows of `logits` for 9 `tokens`", &|tensors| {
        tensors[1].3.truncate(8 * reference.vocabulary * 4);
        tensors[1].2[0] = 8;
    });
    edited("`logits` has the shape [9216]", &|tensors| tensors[1].2 = vec![PROMPT * reference.vocabulary]);
    edited("`greedy.logits` has the shape [2, 2048], not [4, 1024]", &|tensors| tensors[3].2 = vec![2, 2048]);
    edited("its logits are of 512 tokens, the plan's of 1024", &|tensors| {
        tensors.truncate(2);
        tensors[1].2[1] = 512;
        tensors[1].3.truncate(PROMPT * 512 * 4);
    });

    write(&place, &reference.tensors());
    for (options, words) in [
        ("--prefill 0", "--prefill 0 is out of range: 1 to 12"),
        ("--prefill 13", "--prefill 13 is out of range"),
        ("--chunk 0", "--chunk 0: at least 1 token"),
        ("--limit-rms nan", "--limit-rms NaN"),
        ("--seed 1", "cannot be used with"),
    ] {
        let message = place.refused(&format!("{line} {options}"));
        assert!(message.contains(words), "{message}");
    }
    assert!(place.refused("verify plan.bin --limit-max 3").contains("--golden"));
    place.write("golden.safetensors", "not one");
    assert!(place.refused(line).contains("golden.safetensors: not a safetensors file"));
    assert!(place.refused("verify plan.bin --golden .").contains("not a regular file"));
}

/// Files that another program wrote, through the program: with routers, and with the continuation of a trained model.
#[test]
fn real_references_are_read() {
    let (place, folder) = (Place::new(), golden::some());
    for name in ["m_tiny_q4_0", "trained/austen_q4_0"] {
        let path = |end: &str| folder.join(format!("{name}.{end}")).display().to_string();
        place.ok(&format!("compile '{}' -o plan.bin --target cpu", path("gguf")));
        let report = place.ok(&format!("verify plan.bin --golden '{}'", path("golden.safetensors")));
        let file = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
        let rows = file.ids("tokens").len() + file.ids("greedy.tokens").len() - 1;
        assert!(
            report.contains(&format!("\n{rows} rows: ")) && report.contains(&format!(", same best {rows},")),
            "{report}"
        );
    }
}
