//! Programs of one plan for several GPUs mean the same.

use crate::common::lowered::{Options, plan_for};
use crate::common::{Place, random_tokens};
use crate::simulated::{Distance, Feed, on_cpu, on_simulator};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target;
use gemma4c_runtime::Asked;

/// What a program computes does not depend on the GPU it is shaped for, but for roundings.
#[test]
fn programs_of_one_plan_compute_the_same() {
    let place = Place::new();
    let short = Options { context: Some(64), chunk: Some(16), ..Options::default() };
    let gpu = |key: &str| Target::find(key).expect("a GPU of the table").clone();
    let model = place.path("model.gguf");
    for synth in ["tiny-e -q q8_0 --layers 3", "tiny-moe -q q4_0 --layers 2"] {
        place.ok(&format!("synth {synth} -o model.gguf"));
        let targets = [gpu("h200"), gpu("rtx-4070-ti"), Target::of_arch(Arch::Compute80)];
        let plan = plan_for(&model, &short, &targets);
        let tokens = random_tokens(7, 9, plan.model.vocab_size);
        let feed = Feed { tokens: &tokens, pieces: vec![6], asked: Asked::Last };
        let expected = feed.rows(&mut on_cpu(plan.clone(), &model));
        for (at, target) in targets.iter().enumerate() {
            let mut one = plan.clone();
            one.choose(at);
            let found = feed.rows(&mut on_simulator(one, &model));
            let pairs = found.iter().zip(&expected);
            let distance = pairs.map(|((_, ours), (_, cpu))| Distance::of(ours, cpu)).reduce(Distance::and);
            let distance = distance.expect("rows");
            assert!(distance.rms() < 0.15 && distance.largest < 1.0, "{synth} for {target}: {distance:?}");
        }
    }
}
