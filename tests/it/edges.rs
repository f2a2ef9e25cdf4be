//! The edges between the launches of plans: they cover what launches do to memory, and a plan that lacks one is
//! refused.

use crate::common::Place;
use crate::common::lowered::{self, Options};
use gemma4c::launched::Plan;
use gemma4c::launched::recipes::{of_types, with_passes_off};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target;
use gemma4c_dsl::{Access, ParamKind};
use gemma4c_plan::PlanError;
use gemma4c_plan::cuda::{Argument, CudaProgram, Launch, Phase, Region};
use gemma4c_plan::hazards::{Order, needs, reduced};

/// What each step of a phase must wait for, without what follows from the rest.
fn needed(program: &CudaProgram, phase: &Phase) -> Vec<Vec<u32>> {
    let launches: Vec<&Launch> = phase.steps.iter().map(|step| &step.launch).collect();
    reduced(&needs(&launches, &program.kernels).expect("memory in few pieces"))
}

#[test]
fn every_step_waits_for_whoever_touched_its_memory() {
    let ordinary = of_types(Arch::Sm90a, &[DType::Q4_0]);
    for recipe in ordinary.into_iter().chain(with_passes_off(Arch::Sm90a)) {
        let name = recipe.name();
        let plan = Plan::lower(recipe).expect("the full sizes can be lowered");
        let program = &plan.lowered.program;
        for phase in &program.phases {
            let edges: Vec<Vec<u32>> = phase.steps.iter().map(|step| step.after.clone()).collect();
            let order = Order::of(&edges);
            for (at, own) in needed(program, phase).iter().enumerate() {
                let missing = own.iter().find(|before| !order.is_before(**before, at as u32));
                assert_eq!(missing, None, "{name}, {}: step {at}", phase.name);
            }
        }
    }
}

/// Decode is a chain by what it computes, not by decree: no two of its launches could run side by side.
#[test]
fn a_step_of_decode_needs_the_one_before_it() {
    for recipe in of_types(Arch::Sm90a, &[DType::Q8_0, DType::Q4_0]) {
        let name = recipe.name();
        let plan = Plan::lower(recipe).expect("the full sizes can be lowered");
        let phase = &plan.lowered.program.phases[0];
        for (at, own) in needed(&plan.lowered.program, phase).iter().enumerate().skip(1) {
            assert_eq!(own, &[at as u32 - 1], "{name}, step {at}");
            assert_eq!(own, &phase.steps[at].after);
        }
    }
}

/// What a kernel reads before it waits for its predecessor is written by no step. Page tables are the host's.
#[test]
fn what_is_read_early_is_never_written() {
    for recipe in of_types(Arch::Sm90a, &[DType::Q4_0]) {
        let name = recipe.name();
        let plan = Plan::lower(recipe).expect("the full sizes can be lowered");
        let (program, instances) = (&plan.lowered.program, &plan.lowered.instances);
        let steps = program.phases.iter().flat_map(|phase| &phase.steps).map(|step| &step.launch);
        for launch in steps.filter(|launch| launch.programmatic) {
            let instance = &instances[launch.kernel as usize];
            for (param, argument) in instance.params().iter().zip(&launch.arguments) {
                let is_early = matches!(param.def.kind, ParamKind::Memory { access: Access::Weights, .. });
                if let (true, Argument::Memory(range)) = (is_early, argument) {
                    let is_pages = range.region == Region::Arena
                        && [program.places.pages, program.places.windows].contains(&range.offset);
                    let is_constant =
                        is_pages || matches!(range.region, Region::Weights | Region::Host) || range.bytes == 0;
                    assert!(is_constant, "{name}: {instance} reads `{}` early: {range:?}", param.name);
                }
            }
        }
    }
}

#[test]
fn a_plan_that_lacks_an_edge_is_refused() {
    let place = Place::new();
    place.ok("synth tiny-moe -q q8_0 -o model.gguf");
    let options = Options { context: Some(64), chunk: Some(32), ..Options::default() };
    let plan = lowered::plan(&place.path("model.gguf"), &options);
    let with = |edit: &dyn Fn(&mut CudaProgram)| {
        let mut plan = plan.clone();
        edit(&mut plan.cuda.as_mut().expect("a GPU plan").program);
        plan.to_bytes()
    };
    // With just the edges that are needed it is a plan: rows are sorted by expert beside the dense half.
    let needed_alone = with(&|program| {
        let edges = needed(program, &program.phases[1]);
        assert!(edges.iter().any(|own| own.len() > 1), "nothing joins: {edges:?}");
        for (step, own) in program.phases[1].steps.iter_mut().zip(edges) {
            step.launch.programmatic &= own.len() == 1;
            step.after = own;
        }
    });
    place.write("plan.bin", needed_alone.expect("a plan"));
    place.ok("inspect plan.bin");
    // Without one of them it is none.
    let lacking = with(&|program| {
        let step = &mut program.phases[0].steps[5];
        (step.after, step.launch.programmatic) = (vec![3], false);
    });
    let expected = "step 5 of decode does not wait for step 4, whose memory it uses";
    assert_eq!(lacking.unwrap_err(), PlanError::Invalid(expected.into()));
}

/// Weights are widened beside the chain, into two places that take turns. The plan says so, and without one of these
/// edges it is none.
#[test]
fn a_product_waits_for_the_launch_that_widens_its_weights() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 --layers 3 -o model.gguf");
    let options = Options { context: Some(256), chunk: Some(256), ..Options::default() };
    let gpu = [Target::of_arch(Arch::Sm90a).with_multiprocessors(1)];
    let plan = lowered::plan_for(&place.path("model.gguf"), &options, &gpu);
    let program = &plan.cuda.as_ref().expect("a GPU plan").program;
    let phase = program.phases.last().expect("a phase");
    let is_widening = |at: &usize| program.kernels[phase.steps[*at].launch.kernel as usize].name == "widen";
    let widening: Vec<usize> = (0..phase.steps.len()).filter(is_widening).collect();
    let reader = |at: usize| (at + 1..).find(|later| phase.steps[*later].after.contains(&(at as u32)));
    let readers: Vec<usize> = widening.iter().filter_map(|at| reader(*at)).collect();
    assert!(widening.len() > 3 && readers.len() == widening.len());
    // From the third turn on, whoever read the place before the last turn is all that is waited for.
    for (turn, at) in widening.iter().enumerate().skip(2) {
        assert_eq!(phase.steps[*at].after, [readers[turn - 2] as u32]);
        assert_eq!(phase.steps[readers[turn]].after, [*at as u32 - 1, *at as u32]);
        assert!(!phase.steps[readers[turn]].launch.programmatic);
    }

    let refused = |at: usize, after: Vec<u32>| {
        let mut plan = plan.clone();
        let phase = plan.cuda.as_mut().expect("a GPU plan").program.phases.last_mut().expect("a phase");
        phase.steps[at].after = after;
        plan.to_bytes().expect_err("an edge is missing")
    };
    let (widens, reads, before) = (widening[3], readers[3], readers[1]);
    let missing = |at: usize, needed: usize| {
        PlanError::Invalid(format!("step {at} of prefill 256 does not wait for step {needed}, whose memory it uses"))
    };
    assert_eq!(refused(reads, vec![reads as u32 - 2]), missing(reads, widens));
    assert_eq!(refused(widens, vec![]), missing(widens, widening[1]));
    assert_eq!(refused(widens, vec![widening[1] as u32]), missing(widens, before));

    place.write("plan.bin", plan.to_bytes().expect("a plan"));
    let waits = format!("waits for steps {} and {widens}", reads - 2);
    assert!(place.ok("inspect plan.bin --phase 'prefill 256'").contains(&format!("\n             {waits}\n")));
    place.ok("inspect plan.bin --html plan.html");
    let page = String::from_utf8(place.read("plan.html")).expect("text");
    assert!(page.contains(&format!("<small>{waits}</small>")));
    assert!(page.contains(&format!("<small>waits for step {before}</small>")));
}
