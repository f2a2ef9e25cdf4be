//! Keys and values in 8 bits: the launches in the simulator against the CPU, which rounds keys and values as the
//! launches do.
//!
//! What is left between the two is the order of sums, queries and weights of prefill in f16, and codes that fall to the
//! other side of a middle. Against the golden files, which know nothing of 8 bits, the CPU has limits of its own
//! (`tests/it/golden.rs`).

use std::io::Write;

use crate::common::lowered::{self, Options};
use crate::common::{Tensors, golden};
use crate::simulated::{Distance, Feed, each, on_cpu, on_simulator};
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::Asked;

/// Prefill and decode, beyond the window and round its pages. Activations are not rounded, so that nothing hides what
/// keys and values do.
#[test]
fn launches_agree_with_the_cpu_in_8_bits() {
    let Some(folder) = golden::folder() else { return };
    // The rms over all rows: measured are 0.006 to 0.012, and 0.008 to 0.030. A CPU that did not round would be off by
    // 0.04 and 0.2.
    let (q8_0, fp8) = ((KvType::Q8_0, 0.02), (KvType::Fp8, 0.06));
    // Every model and every type; layers that share keys and values, with both. Each type goes round the pages
    // once: these know nothing of the model.
    let (round, short) = (18, 9);
    let all = [
        ("e_tiny_q8_0", q8_0, round),
        ("e_tiny_q8_0", fp8, short),
        ("d_tiny_q8_0", fp8, round),
        ("m_tiny_q8_0", q8_0, short),
    ];
    each(&all, |(name, (kv, limit), count)| {
        let model = folder.join(format!("{name}.gguf"));
        let tokens = Tensors::read(&folder.join(format!("{name}.golden.safetensors"))).ids("tokens");
        let options = Options { context: Some(128), chunk: Some(4), kv: *kv, ..Options::default() };
        let plan = lowered::plan(&model, &options.without(&["int8"]));
        let feed = Feed { tokens: &tokens[..*count], pieces: vec![4, 1, 3], asked: Asked::All };
        let ours = feed.rows(&mut on_simulator(plan.clone(), &model));
        let expected = feed.rows(&mut on_cpu(plan, &model));
        let mut all = Distance::default();
        for ((at, row), (expected_at, expected)) in ours.iter().zip(&expected) {
            assert_eq!(at, expected_at);
            all = all.and(Distance::of(row, expected));
        }
        let report =
            format!("{name}, {}: {} rows, rms {:.5}, largest {:.5}", kv.name(), ours.len(), all.rms(), all.largest);
        writeln!(std::io::stderr(), "{report}").expect("stderr takes a message");
        if ours.len() == expected.len() && all.rms() <= *limit { Ok(()) } else { Err(report) }
    });
}
