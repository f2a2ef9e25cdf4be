//! GPU plans with their launches side by side, as programmatic dependent launch runs them: no launch touches before its
//! wait what another has yet to write or to read, and the results are those of one launch after the other.

use crate::common::lowered::{self, Options};
use crate::common::{Tensors, golden};
use crate::simulated::{Feed, each, exhaustive, on_simulator};
use gemma4c::simulate;
use gemma4c_dsl::sim::Interleaving;
use gemma4c_plan::Plan;
use gemma4c_runtime::{Asked, ModelLocation};

/// Rows of a plan's logits, and how it was run.
fn rows(plan: &Plan, model: &std::path::Path, tokens: &[u32], way: Option<Interleaving>) -> Vec<(usize, Vec<f32>)> {
    let location = ModelLocation { plan: model.with_file_name("plan.bin"), given: Some(model.into()) };
    let mut session = match way {
        None => on_simulator(plan.clone(), model),
        Some(way) => simulate::open_chained(plan.clone(), &location, way).expect("a plan that can be simulated"),
    };
    // A whole chunk, and a token alone.
    Feed { tokens, pieces: vec![4], asked: Asked::Last }.rows(&mut session)
}

/// A model with per-layer embeddings, whose other launches are those of a dense one, and a model with experts.
#[test]
fn launches_wait_for_what_they_need() {
    let folder = golden::some();
    let options = Options { context: Some(128), chunk: Some(4), ..Options::default() };
    each(&golden::of(&["e_tiny_q4_0", "m_tiny_q4_0"]), |name| {
        let model = folder.join(format!("{name}.gguf"));
        let file = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
        let tokens = &file.ids("tokens")[..5];
        let plan = lowered::plan(&model, &options);
        let expected = rows(&plan, &model, tokens, None);
        // The check does not depend on the interleaving; one that differs most from one after the other is enough most
        // days.
        let ways = if exhaustive() { &Interleaving::ALL[..] } else { &[Interleaving::SuccessorFirst] };
        for &way in ways {
            if rows(&plan, &model, tokens, Some(way)) != expected {
                return Err(format!("{name}: {way:?} gives other logits than one launch after the other"));
            }
        }
        Ok(())
    });
}
