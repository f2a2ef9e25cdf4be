//! `gemma4c kernels` as a person meets it: what it lists and prints, what it checks, and what it says to a wrong name.

use std::process::Output;

use assert_cmd::cargo::cargo_bin_cmd;

/// Runs `gemma4c kernels` with these arguments.
fn kernels(arguments: &[&str]) -> Output {
    cargo_bin_cmd!("gemma4c").arg("kernels").args(arguments).output().expect("gemma4c runs")
}

/// What a successful run prints.
#[track_caller]
fn printed(arguments: &[&str]) -> String {
    let output = kernels(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("text in UTF-8")
}

/// What a refused run says.
#[track_caller]
fn refused(arguments: &[&str]) -> String {
    let output = kernels(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}: a refusal belongs on stderr");
    String::from_utf8(output.stderr).expect("text in UTF-8")
}

fn assert_cli_snapshot(name: &str, text: &str) {
    insta::with_settings!({
        snapshot_path => "../../snapshots/cli",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, text) });
}

#[test]
fn the_list_has_every_kernel_of_every_family() {
    let list = printed(&[]);
    for family in gemma4c_codegen::families::FAMILIES {
        assert!(list.contains(&format!("{}: {}\n", family.name, family.about)), "{list}");
        for kernel in family.kernels {
            assert!(list.contains(&format!("\n  {} ", kernel.name)), "{} is not in\n{list}", kernel.name);
        }
    }
    assert_cli_snapshot("kernels-family-probe", &printed(&["--family", "probe"]));
}

#[test]
fn one_kernel_is_described() {
    assert_cli_snapshot("kernels-read-all", &printed(&["read_all"]));
}

#[test]
fn texts_are_printed_as_they_are() {
    let (family, kernel) = gemma4c_codegen::families::kernel("read_all").expect("the probe is there");
    assert_eq!(printed(&["read_all", "--cuda"]).trim(), kernel.cuda.trim());
    assert_eq!(printed(&["read_all", "--rust"]).trim(), kernel.rust.trim());
    let both = printed(&["read_all", "--rust", "--cuda"]);
    assert!(both.contains(kernel.cuda.trim()) && both.contains(kernel.rust.trim()), "{both}");

    let named = &family.instances_of_cases()[0];
    let label = format!("no plan, a case: {}", named.label);
    assert_eq!(printed(&["read_all", "--cuda", "--instance", &label]), named.source().text);
}

/// Instances are what plans launch, called after the place.
#[test]
fn an_instance_of_a_plan_is_printed_by_its_place() {
    let text = printed(&["pick", "--cuda", "--instance", "e2b q8_0, the largest logit"]);
    assert!(text.contains("constexpr u32 KEPT = 1;") && text.contains("void __launch_bounds__"), "{text}");
    assert!(text.contains(" pick("), "{text}");
}

#[test]
fn the_simulator_and_the_host_check_a_family() {
    for device in ["sim", "host"] {
        let table = printed(&["--family", "probe", "--check", "--device", device]);
        let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        let cases = gemma4c_codegen::cases::probe::cases().len().to_string();
        assert_eq!(rows[0], ["family", "cases", "passed", "seconds"], "{table}");
        assert_eq!(rows[1][..3], ["probe", cases.as_str(), cases.as_str()], "{table}");
        assert_eq!(rows[2][..3], ["all", cases.as_str(), cases.as_str()], "{table}");
    }
}

#[test]
fn a_wrong_name_is_told_the_right_ones() {
    let error = refused(&["no_such_kernel"]);
    assert!(error.starts_with("error: no kernel is called `no_such_kernel`; there are\n"), "{error}");
    for kernel in gemma4c_codegen::families::FAMILIES.iter().flat_map(|family| family.kernels) {
        assert!(error.contains(kernel.name), "{} is not in\n{error}", kernel.name);
    }
    let error = refused(&["--family", "no_such_family"]);
    assert!(error.starts_with("error: no family of kernels is called `no_such_family`; there are "), "{error}");
    assert!(error.contains("probe"), "{error}");
    let error = refused(&["read_all", "--cuda", "--instance", "no such"]);
    assert!(error.starts_with("error: no instance is called `no such`; there are\n  read_all: "), "{error}");
    let error = refused(&["--sass-stats", "--arch", "sm_90"]);
    assert!(error.contains("unknown architecture `sm_90`; known are sm_80, sm_89, sm_90a, sm_100a"), "{error}");
    let error = refused(&["--check", "--device", "tpu"]);
    assert!(error.contains("[possible values: sim, host, cuda]"), "{error}");
    assert!(refused(&["--check", "--bench"]).contains("cannot be used with"));
}
