//! What `gemma4c diff` tells of two plans. They are made by hand, so that only what a test changes is different.

use crate::common::Place;
use crate::common::cuda_plan::{FUSED, unfused, with_cuda};
use gemma4c_plan::Plan;

fn write(place: &Place, name: &str, plan: &Plan) {
    place.write(name, plan.to_bytes().expect("a plan that can be written"));
}

#[test]
fn equal_plans_do_not_differ() {
    let place = Place::new();
    write(&place, "a.bin", &with_cuda(unfused(&place), FUSED));
    assert_eq!(place.ok("diff a.bin a.bin"), "no difference\n");
    assert_eq!(place.ok("diff cpu.bin cpu.bin --check"), "no difference\n");
}

/// A pass is switched off: what was one launch is three, and another kernel does the product.
#[test]
fn fusion_launches_memory_and_kernels_are_told() {
    let place = Place::new();
    let old = with_cuda(unfused(&place), FUSED);
    let mut groups = FUSED.to_vec();
    groups.splice(
        3..5,
        [
            (
                "matvec[K = 256, NORMS = 2]",
                &["attention.update", "attention.out", "mlp.normed", "gated.gate", "gated.up"][..],
            ),
            ("map", &["gated.activated", "gated.product"]),
            ("matvec[K = 256, NORMS = 0, split = 2]", &["gated.out"]),
        ],
    );
    let mut new = with_cuda(unfused(&place), &groups);
    let cuda = new.cuda.as_mut().expect("a GPU plan");
    cuda.program.passes[2].enabled = false;
    cuda.program.passes[2].applied = 0;
    cuda.program.memory.arena *= 2;
    cuda.program.memory.host = 4096;
    cuda.code[0].source += "// more\n";
    write(&place, "a.bin", &old);
    write(&place, "b.bin", &new);
    assert_text!("plans", "diff", place.ok("diff a.bin b.bin"));
    let ran = place.run("diff a.bin b.bin --check");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""));
}

#[test]
fn what_has_no_words_of_its_own_is_named() {
    let place = Place::new();
    let old = with_cuda(unfused(&place), FUSED);
    let mut new = old.clone();
    let cuda = new.cuda.as_mut().expect("a GPU plan");
    cuda.program.phases[0].steps[3].launch.grid = [32, 1, 1];
    new.sampling.top_k += 1;
    write(&place, "a.bin", &old);
    write(&place, "b.bin", &new);
    assert_eq!(place.ok("diff a.bin b.bin"), "also different\n  how it samples\n  arguments and grids of launches\n");
}

#[test]
fn plans_of_different_targets_are_compared_as_far_as_they_go() {
    let place = Place::new();
    write(&place, "gpu.bin", &with_cuda(unfused(&place), FUSED));
    let text = place.ok("diff cpu.bin gpu.bin");
    assert!(text.starts_with("target          cpu -> cuda for H200 (sm_90a, 132 SMs)\n"), "{text}");
    place.ok("synth tiny-dense --layers 4 -o longer.gguf");
    place.ok("compile longer.gguf -o longer.bin --target cpu --ctx 128");
    let text = place.ok("diff cpu.bin longer.bin");
    for expected in ["context         64 -> 128", "steps\n", "matmul          14 -> 27 (+13)"] {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
    assert!(place.refused("diff cpu.bin model.gguf").contains("is a model, not a plan"));
}
