//! Prompts that are longer than the pages of a window: a chunk's keys and values go through a stage, and the last of
//! them to the pages. Whatever the chunks, the rows after the prompt have the same bits.

use crate::common::lowered::{self, Options};
use crate::common::{Place, random_tokens};
use crate::simulated::{Distance, Feed, each, on_cpu, on_simulator};
use gemma4c_runtime::Asked;

/// Tokens of the prompt, and those behind it that are fed as if they had been generated.
const PROMPT: usize = 400;
const DECODED: usize = 2;

/// The plan's largest chunk: more rows than a window's pages have, which hold it and 256 rows besides.
const CHUNK: u32 = 390;

#[test]
fn chunks_longer_than_the_pages_of_a_window_leave_the_same_bits() {
    let place = Place::new();
    // Layers of their own keys; layers that read those of others, for the asked row alone or for all rows.
    let jobs = [
        ("tiny-dense -q q8_0 --layers 2", &[][..]),
        ("tiny-e -q q8_0 --layers 3", &[][..]),
        ("tiny-e -q q8_0 --layers 3", &["dead-rows"][..]),
    ];
    for (at, (synth, _)) in jobs.iter().enumerate() {
        place.ok(&format!("synth {synth} -o {at}.gguf"));
    }
    let jobs: Vec<_> = jobs.into_iter().enumerate().collect();
    each(&jobs, |(at, (synth, without))| {
        let model = place.path(&format!("{at}.gguf"));
        let options = Options { context: Some(480), chunk: Some(CHUNK), ..Options::default() };
        let plan = lowered::plan(&model, &options.without(without));
        let program = &plan.cuda.as_ref().expect("a GPU plan").program;
        assert!(program.kv_layout.caches.iter().any(|cache| cache.window == Some(32)));
        assert!((program.kv_layout.sliding.kept() as usize) < PROMPT, "pages are used again");
        let tokens = random_tokens(7, PROMPT + DECODED, plan.model.vocab_size);
        let rows = |pieces: &[usize], session: &mut gemma4c_runtime::Session| {
            let feed = Feed { tokens: &tokens, pieces: pieces.to_vec(), asked: Asked::Last };
            let mut rows = feed.rows(session);
            rows.retain(|(at, _)| *at + 1 >= PROMPT);
            assert_eq!(rows.len(), 1 + DECODED);
            rows
        };
        let expected = rows(&[PROMPT], &mut on_cpu(plan.clone(), &model));
        let mut whole = None;
        // Where a pass is switched off, what it leaves is compared with the CPU alone.
        let ways = [&[3, 380, 17][..], &[PROMPT]];
        for pieces in if without.is_empty() { &ways[..] } else { &ways[..1] } {
            let ours = rows(pieces, &mut on_simulator(plan.clone(), &model));
            let distance = ours
                .iter()
                .zip(&expected)
                .fold(Distance::default(), |all, (ours, expected)| all.and(Distance::of(&ours.1, &expected.1)));
            let (rms, largest) = (distance.rms(), distance.largest);
            if rms > 0.15 || largest > 1.0 {
                return Err(format!("{synth} without {without:?} in {pieces:?}: rms {rms:.5}, largest {largest:.5}"));
            }
            if whole.get_or_insert_with(|| ours.clone()) != &ours {
                return Err(format!("{synth} without {without:?}: in {pieces:?} the bits are others"));
            }
        }
        Ok(())
    });
}
