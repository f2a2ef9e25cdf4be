//! Models that are compiled on the way, and the cache of their plans: found again, made again when damaged, done
//! without where there is no place.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Place, Ran, finish};

/// A folder with a small model, and commands that keep their plans in `cache` there.
fn place() -> Place {
    let place = Place::new();
    place.ok("synth tiny-e --layers 4 -q q8_0 -o model.gguf");
    place
}

fn with_cache(place: &Place, line: &str) -> Command {
    let mut command = place.command(line);
    command.env("GEMMA4C_CACHE", place.path("cache"));
    command
}

fn works(command: &mut Command) -> Ran {
    let ran = finish(command);
    assert_eq!(ran.code, Some(0), "{command:?}: {}", ran.stderr);
    ran
}

fn plans(place: &Place) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(place.path("cache/plans")).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

const RUN: &str = "run model.gguf --tokens 5,6 -n 4 --temp 0 --device cpu --ctx 64";

#[test]
fn a_plan_is_made_once_and_found_again() {
    let place = place();
    let run = |line: &str| works(&mut with_cache(&place, line));
    let first = run(RUN);
    assert!(first.stderr.contains("[compiled for this machine in "), "{}", first.stderr);
    let again = run(RUN);
    assert!(!again.stderr.contains("compiled") && again.stdout == first.stdout, "{}", again.stderr);
    // Other options, another plan. A model that has moved has another, too: a plan says where its weights are.
    assert!(run(&RUN.replace("64", "32")).stderr.contains("compiled"));
    fs::create_dir(place.path("moved")).unwrap();
    fs::rename(place.path("model.gguf"), place.path("moved/model.gguf")).unwrap();
    assert_eq!(run(&RUN.replace("model", "moved/model")).stdout, first.stdout);
    assert!(run("cache").stdout.contains("cache: 3 plans and 0 kernels, "));
    assert!(run("doctor").stdout.contains("\ncache "));
    place.ok("compile moved/model.gguf -o plan.bin --target cpu --ctx 64");
    for (flag, name) in [("--ctx 32", "--ctx"), ("--mmproj plan.bin", "--mmproj"), ("--draft plan.bin", "--draft FILE")]
    {
        let said = place.refused(&format!("run plan.bin --tokens 5 {flag}"));
        assert!(said.contains(&format!("{name} is for a GGUF model")), "{said}");
    }
}

#[test]
fn a_damaged_plan_is_made_again() {
    let place = place();
    let first = works(&mut with_cache(&place, RUN));
    let [plan] = &plans(&place)[..] else { panic!("one plan") };
    let whole = fs::read(plan).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&whole[..whole.len() / 2], &flipped, b""] {
        fs::write(plan, damaged).unwrap();
        let again = works(&mut with_cache(&place, RUN));
        assert!(again.stderr.contains("[the plan in the cache is made again: "), "{}", again.stderr);
        assert_eq!(again.stdout, first.stdout);
        assert!(fs::read(plan).unwrap() == whole, "the plan is as it was");
    }
}

#[test]
fn without_a_cache_a_plan_is_made_for_the_run() {
    let place = place();
    let first = works(&mut with_cache(&place, RUN));
    // A file where a folder should be refuses whoever runs this, root included.
    place.write("taken", "");
    let says = |command: &mut Command, why: &str| {
        let ran = works(command);
        let told = "[compiled for this run alone in ";
        assert!(ran.stderr.contains(told) && ran.stderr.contains(why), "{}", ran.stderr);
        assert_eq!(ran.stdout, first.stdout);
    };
    says(place.command(RUN).env("GEMMA4C_CACHE", place.path("taken")), "cannot write ");
    let mut homeless = place.command(RUN);
    homeless.env_remove("GEMMA4C_CACHE").env_remove("XDG_CACHE_HOME").env_remove("HOME");
    says(&mut homeless, "none of GEMMA4C_CACHE, XDG_CACHE_HOME and HOME is set");
}

#[test]
fn clearing_asks_and_takes_only_what_is_ours() {
    let place = place();
    works(&mut with_cache(&place, RUN));
    place.write("cache/plans/letter.txt", "mine");
    let refused = finish(&mut with_cache(&place, "cache clear"));
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("cache: 1 plan and 0 kernels, ") && refused.stderr.contains("say --yes"));
    assert_eq!(plans(&place).len(), 2, "nothing was deleted");
    let cleared = works(&mut with_cache(&place, "cache clear --yes")).stdout;
    assert!(cleared.starts_with("deleted ") && cleared.contains("1 plan and 0 kernels, "), "{cleared}");
    assert_eq!(plans(&place), [place.path("cache/plans/letter.txt")]);
}

/// `run` and `serve` of a model take what `compile` takes beside it.
#[test]
fn a_model_is_compiled_with_its_drafter_and_projector() {
    let place = place();
    place.ok("synth tiny-e --draft -o draft.gguf");
    place.ok("synth tiny-e --mmproj -o mmproj.gguf");
    place.ok("synth tiny-e -q q8_0 -o whole.gguf");
    let line = "run whole.gguf --tokens 5,6 -n 6 --temp 0 --device cpu --ctx 1k";
    let alone = works(&mut with_cache(&place, line));
    let drafted = works(&mut with_cache(&place, &format!("{line} --draft draft.gguf")));
    assert!(drafted.stderr.contains("[drafts: "), "{}", drafted.stderr);
    assert_eq!(drafted.stdout, alone.stdout, "drafts change no token");
    // A generated vocabulary has no tokens of pictures: the projector is read, and that is found.
    let seeing = finish(&mut with_cache(&place, &format!("{line} --mmproj mmproj.gguf --image-tokens 70")));
    assert!(seeing.stderr.contains("the model's vocabulary lacks the tokens of pictures"), "{}", seeing.stderr);
    let reports = plans(&place).iter().map(|plan| works(place.command("inspect").arg(plan)).stdout).collect::<String>();
    assert!(reports.contains("context        1024 of"), "{reports}");
    assert!(reports.contains("drafter"), "{reports}");
    let refused = finish(&mut with_cache(&place, &format!("{line} --draft nowhere.gguf")));
    assert!(refused.code == Some(2) && refused.stderr.contains("or a drafter's file"), "{}", refused.stderr);
    let refused = finish(&mut with_cache(&place, &line.replace("1k", "9x")));
    assert!(refused.code == Some(2) && refused.stderr.contains("such as 8192 or 8k"), "{}", refused.stderr);
}
