//! Products in one launch give the bits of a launch each: a sequence may move between them.

use crate::common::lowered::{self, LowerOptions};
use crate::common::{Place, random_tokens};
use crate::simulated::{Feed, each, on_simulator};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_plan::Plan;
use gemma4c_runtime::Asked;

fn runs(plan: &Plan) -> usize {
    let program = &plan.cuda.as_ref().expect("a GPU plan").program;
    let is_run = |kernel: u32| program.kernels[kernel as usize].name.contains("product_run");
    program.phases[0].steps.iter().filter(|step| is_run(step.launch.kernel)).count()
}

#[test]
fn one_launch_has_the_bits_of_many() {
    let models = [("tiny-dense -q q4_0 --layers 2", 2), ("tiny-e -q q8_0 --layers 3", 3)];
    each(&models, |(synth, expected)| {
        let place = Place::new();
        place.ok(&format!("synth {synth} -o model.gguf"));
        let model = place.path("model.gguf");
        let options =
            LowerOptions { context: Some(64), chunk: Some(32), disabled: Vec::new(), ..LowerOptions::default() };
        let gpu = [Gpu::of_arch(Arch::Sm90a).with_multiprocessors(4)];
        let plan = |options: LowerOptions| lowered::plan_for(&model, &options, &gpu);
        let (one, many) = (plan(options.clone()), plan(options.without(&["persistent"])));
        assert_eq!((runs(&one), runs(&many)), (*expected, 0), "{synth}");
        let tokens = random_tokens(7, 6, one.model.vocab_size);
        let feed = Feed { tokens: &tokens, pieces: vec![4], asked: Asked::Last };
        let bits = |plan: Plan| feed.bits(&mut on_simulator(plan, &model));
        match bits(one) == bits(many) {
            true => Ok(()),
            false => Err(format!("{synth}: other bits")),
        }
    });
}
