//! Programs for GPUs: which are made, what each is shaped by, and how a plan for several of them is shown and run.

use crate::common::Place;
use crate::common::lowered::{Options, header, plan_for};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::{GPUS, Target};
use gemma4c_models::synth::Preset;
use gemma4c_plan::Plan;
use gemma4c_plan::embedded::same_layout;

fn short() -> Options {
    Options { context: Some(64), chunk: Some(16), ..Options::default() }
}

fn gpu(key: &str) -> Target {
    Target::find(key).expect("a GPU of the table").clone()
}

/// What is asked for must make sense, and is refused before a model is compiled.
#[test]
fn gpus_are_named_once_and_one_way() {
    let place = Place::new();
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    for (line, expected) in [
        ("--gpu h200 --arch sm_90a", "the argument '--gpu <NAME>' cannot be used with '--arch <SM>'"),
        ("--gpu h200,voodoo2", "no GPU is called `voodoo2`: there are h200, h100, h100-pcie, a100, rtx-3090, "),
        ("--arch sm_90", "unknown architecture `sm_90`; known are sm_80, "),
        ("--gpu h200 --gpu l40s,h200", "h200 is named twice"),
        ("--gpu h200,l40s --sms 100", "--sms shapes one program, but 2 GPUs are named"),
        ("--gpu h200 --sms 0", "invalid value '0' for '--sms <N>'"),
        ("--target cpu --gpu h200", "--gpu, --arch and --sms are about GPUs, but the target is the CPU"),
    ] {
        let refused = place.refused(&format!("compile model.gguf -o plan.bin {line}"));
        assert!(refused.contains(expected), "{line}\n{refused}");
    }
}

/// Every GPU of the table has a program for each kind of model, the dense one as large as it comes, within its limits;
/// its matrix-vector products are one wave.
#[test]
fn every_gpu_has_a_program_for_each_kind_within_its_limits() {
    let place = Place::new();
    let model = place.path("model.gguf");
    let any = Target::of_arch(Arch::Compute80);
    let targets: Vec<Target> = GPUS.iter().cloned().chain([any, gpu("h200").with_multiprocessors(112)]).collect();
    for preset in [Preset::E4b, Preset::Moe26bA4b, Preset::Dense31b] {
        header(&model, preset, DType::Q4_0);
        let plan = plan_for(&model, &Options::default(), &targets);
        for (target, cuda) in targets.iter().zip(plan.programs()) {
            let program = &cuda.program;
            assert_eq!(program.gpu, target.described());
            let what = format!("{} for {target}", preset.name());
            for kernel in &program.kernels {
                assert!(kernel.shared <= target.shared_bytes_per_block, "{what}: {}", kernel.instance);
                let is_for_hopper = ["product_wgmma", "product_tiles"].contains(&kernel.name.as_str());
                assert!(!is_for_hopper || target.arch.has_wgmma(), "{what}: {}", kernel.instance);
            }
            for step in program.phases.iter().flat_map(|phase| &phase.steps) {
                let (kernel, grid) = (&program.kernels[step.launch.kernel as usize], step.launch.grid);
                if ["matvec", "product_wgmma"].contains(&kernel.name.as_str()) {
                    assert!(grid[0] <= target.multiprocessors, "{what}: {grid:?} of {}", kernel.instance);
                }
                assert!(!step.launch.programmatic || target.arch.has_pdl(), "{what}: {}", kernel.instance);
                let is_ruled = step.reason.starts_with("by rule: ");
                assert_eq!(is_ruled, !target.measured && !step.runner_up.is_empty(), "{what}: {}", step.reason);
            }
            let reasons = || program.phases[0].steps.iter().map(|step| step.reason.as_str());
            let shaped = format!("shaped for {} SMs", target.multiprocessors);
            assert!(reasons().any(|reason| reason.contains(&shaped)), "{what}");
        }
        // One image of the weights serves all of one architecture; others may fuse otherwise, and meet their weights in
        // another order.
        let mut hopper = plan.clone();
        hopper.others.retain(|cuda| cuda.program.gpu.architecture == "sm_90a");
        assert_eq!((same_layout(&hopper), hopper.programs().count()), (Ok(()), 4), "{}", preset.name());
        if let Err(why) = same_layout(&plan) {
            assert!(why.starts_with("the programs for H200 (sm_90a, 132 SMs) and "), "{why}");
        }
        // The H200 is the same whoever else is in the plan.
        let alone = plan_for(&model, &Options::default(), &targets[..1]);
        assert!(alone.cuda == plan.cuda, "{}", preset.name());
    }
}

fn two(place: &Place) -> Plan {
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    plan_for(&place.path("model.gguf"), &short(), &[gpu("h200"), gpu("rtx-4090")])
}

/// `inspect` lists the programs, and shows the first or that of `--gpu`; the simulator takes the first or that of
/// `--program`.
#[test]
fn a_plan_for_two_gpus_is_shown_and_run_by_name() {
    let place = Place::new();
    place.write("plan.bin", two(&place).to_bytes().expect("a plan"));
    let both = "target         cuda for H200 (sm_90a, 132 SMs), RTX 4090 (sm_89, 128 SMs), by ";
    let shown = place.ok("inspect plan.bin");
    assert!(shown.contains(both) && shown.contains("\nprogram        that for H200 (sm_90a, 132 SMs)\n"), "{shown}");
    let other = place.ok("inspect plan.bin --gpu rtx-4090");
    assert!(other.contains("\nprogram        that for RTX 4090 (sm_89, 128 SMs)\n"), "{other}");
    assert!(other.contains("floor on RTX 4090"), "{other}");
    // Floors on a GPU that it has no program for are those of its first program.
    let a100 = place.ok("inspect plan.bin --gpu a100");
    assert!(a100.contains("that for H200") && a100.contains("floor on A100"), "{a100}");
    let json = |line: &str| -> serde_json::Value {
        serde_json::from_str(&place.ok(&format!("inspect plan.bin --json {line}"))).expect("JSON")
    };
    let (first, second) = (json(""), json("--gpu rtx-4090"));
    assert_eq!((first["arch"].as_str(), second["arch"].as_str()), (Some("sm_90a"), Some("sm_89")));
    assert_eq!(
        (first["program"]["measured"].as_bool(), second["program"]["measured"].as_bool()),
        (Some(true), Some(false))
    );
    assert_eq!(first["programs"].as_array().map(Vec::len), Some(2));

    let line = "run plan.bin --device sim --tokens 2,3,4 -n 2 --temp 0";
    let ran = place.ok(line);
    assert_eq!(place.ok(&format!("{line} --program h200")), ran);
    assert_eq!(place.ok(&format!("{line} --program rtx-4090")).split_whitespace().count(), 2);
    let refused = place.refused(&format!("{line} --program a100"));
    assert_eq!(refused, "error: the plan has no program for `a100`; it has h200, rtx-4090\n");
}

/// Two programs that want their weights in two places cannot share an image.
#[test]
fn layouts_that_differ_are_named() {
    let place = Place::new();
    let mut plan = two(&place);
    assert_eq!(same_layout(&plan), Ok(()));
    plan.others[0].program.memory.host += 4096;
    let gpus = "the programs for H200 (sm_90a, 132 SMs) and RTX 4090 (sm_89, 128 SMs)";
    assert_eq!(same_layout(&plan), Err(format!("{gpus} lay the host's tables out differently")));
    let weight = plan.others[0].program.loads[1].weight;
    plan.others[0].program.loads[1].parts.clear();
    let name = &plan.weights[weight.index()].name;
    assert_eq!(same_layout(&plan), Err(format!("{gpus} lay {name} out differently")));
}
