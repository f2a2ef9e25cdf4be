//! What a GPU plan is compiled for where nobody says: as long a context as its memory has room for; if that is short,
//! keys and values in 8 bits, and then fewer sequences.
//!
//! Nothing is estimated. A choice is lowered, and the compiler counts what it takes; without NVRTC that is a matter of
//! milliseconds.

use std::iter::successors;

use gemma4c_codegen::cuda::LowerError;
use gemma4c_models::gemma4::Config;
use gemma4c_plan::cuda::KvType;

use crate::error::Error;
use crate::options::Options;
use crate::pipeline::{Declared, Files};

/// What may be chosen, and is only a wish in the options.
#[derive(Clone, Copy, Debug)]
pub struct Choosable {
    pub context: bool,
    pub kv: bool,
    pub sequences: bool,
}

/// Positions below which a conversation is cut short: before that, other things go.
const COMFORTABLE: u32 = 8192;
/// Positions that are worth having at all.
const SHORTEST: u32 = 1024;

/// The first choice that fits into `options.vram`; without a budget, what the options say.
pub fn fit(files: &Files, options: Options, may: Choosable) -> Result<Options, Error> {
    let [gpu] = &options.gpus[..] else { return Ok(options) };
    if options.vram.is_none() {
        return Ok(options);
    }
    let trained = Config::read(&files.text)?.context;
    // Why the last one does not fit, which asks for least.
    let mut over = None;
    for (sequences, kv, context) in choices(&options, may, trained) {
        let choice = Options { sequences, kv, context: Some(context), ..options.clone() };
        match Declared::new(files, &choice)?.lower(gpu) {
            Ok(_) => return Ok(choice),
            Err(error @ Error::Lowering(LowerError::Budget { .. })) => over = Some(error),
            // This model's heads, or this GPU, cannot have them in 8 bits.
            Err(Error::Lowering(LowerError::Kv { .. })) if kv != options.kv => {}
            Err(error) => return Err(error),
        }
    }
    over.map_or(Ok(options), Err)
}

/// From the best to the least.
fn choices(options: &Options, may: Choosable, trained: u32) -> Vec<(u32, KvType, u32)> {
    let contexts: Vec<u32> = match options.context.filter(|_| !may.context) {
        Some(context) => vec![context],
        None => successors(Some(trained), |context| Some(context / 2))
            .take_while(|context| *context == trained || *context >= SHORTEST)
            .collect(),
    };
    let kvs = if may.kv { vec![options.kv, KvType::Q8_0] } else { vec![options.kv] };
    let sequences: Vec<u32> = successors(Some(options.sequences), |count| Some(count / 2))
        .take_while(|count| *count == options.sequences || (may.sequences && *count > 0))
        .collect();
    let (comfortable, short): (Vec<u32>, Vec<u32>) =
        contexts.iter().partition(|context| **context >= COMFORTABLE.min(contexts[0]));
    let mut all = Vec::new();
    for &sequences in &sequences {
        for &kv in &kvs {
            all.extend(comfortable.iter().map(|context| (sequences, kv, *context)));
        }
    }
    // What is left when all else has gone.
    let (fewest, smallest) = (sequences[sequences.len() - 1], kvs[kvs.len() - 1]);
    all.extend(short.iter().map(|context| (fewest, smallest, *context)));
    all
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::DType;
    use gemma4c_models::synth::{self, Preset};

    use super::*;
    use crate::options::measured_gpu;

    #[test]
    fn contexts_go_before_bits_and_bits_before_sequences() {
        let options = Options { sequences: 2, ..Options::default() };
        let all = Choosable { context: true, kv: true, sequences: true };
        let (f16, q8) = (KvType::F16, KvType::Q8_0);
        let long = [(2, f16), (2, q8), (1, f16), (1, q8)];
        let mut expected: Vec<_> =
            long.iter().flat_map(|(count, kv)| [16384, 8192].map(|context| (*count, *kv, context))).collect();
        expected.extend([4096, 2048, 1024].map(|context| (1, q8, context)));
        assert_eq!(choices(&options, all, 16384), expected);

        let fixed = Choosable { context: false, kv: false, sequences: false };
        let asked = Options { context: Some(777), kv: f16, ..options };
        assert_eq!(choices(&asked, fixed, 16384), [(2, f16, 777)]);
        // A model for short texts has no longer ones.
        let context = Choosable { context: true, ..fixed };
        assert_eq!(choices(&Options::default(), context, 512), [(1, f16, 512)]);
    }

    /// What a choice takes is what the compiler counts, and the less there is, the less is chosen.
    #[test]
    fn what_is_chosen_fits_and_shrinks_with_the_budget() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let preset = Preset::from_name("tiny-dense").expect("a preset");
        let synthetic = synth::Options { layers: Some(2), ..synth::Options::new(preset, DType::Q8_0) };
        synth::write(&synthetic, &path, &|_, _| {}).expect("a model");
        let gpu = measured_gpu();
        let options = |vram| Options { gpus: vec![gpu.clone()], sequences: 4, vram, ..Options::default() };
        let files = Files::open(&path, &options(None)).expect("a model");
        let all = Choosable { context: true, kv: true, sequences: true };
        let taken = |choice: &Options| {
            let lowered = Declared::new(&files, choice).expect("a graph").lower(&gpu).expect("launches");
            lowered.program.memory.device().expect("no overflow")
        };
        let best = fit(&files, options(Some(u64::MAX)), all).expect("a choice");
        let trained = Config::read(&files.text).expect("a config").context;
        assert_eq!((best.context, best.sequences, best.kv), (Some(trained), 4, KvType::F16));
        let (mut budget, mut before, mut seen) = (taken(&best), best, 0);
        let error = loop {
            budget -= budget / 8;
            match fit(&files, options(Some(budget)), all) {
                Ok(choice) => {
                    assert!(taken(&choice) <= budget, "{choice:?}");
                    let rank = |choice: &Options| (choice.sequences, choice.kv == KvType::F16, choice.context);
                    assert!(rank(&choice) <= rank(&before), "{choice:?} after {before:?}");
                    seen += u32::from(rank(&choice) != rank(&before));
                    before = choice;
                }
                Err(error) => break error.to_string(),
            }
        };
        assert!(seen >= 3, "{seen} choices");
        assert!(
            error.starts_with("the plan needs ") && error.contains("bytes of device memory, the budget is "),
            "{error}"
        );
    }
}
