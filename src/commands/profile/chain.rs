//! The launches of a phase as they overlap, told by kernels that note when their blocks start, are released and end.

use std::fmt::Write;
use std::str::FromStr;

use anyhow::{Context, Result};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::nvrtc::{Cache, Compiler, Toolchain};
use gemma4c_codegen::stamps;
use gemma4c_plan::Plan;
use gemma4c_runtime::{Chained, Span};

use super::table::{Ceilings, Launched};

/// Puts stamped kernels in the place of a phase's, in every program of the plan.
pub fn stamp(plan: &mut Plan, phase: &str) -> Result<()> {
    let compiler = Compiler { toolchain: Toolchain::find()?, cache: Cache::from_env() };
    for cuda in plan.cuda.iter_mut().chain(&mut plan.others) {
        let (_, phase) = super::find(&cuda.program, phase)?;
        let steps = phase.steps.iter().map(|step| step.launch.kernel);
        let mut kernels: Vec<usize> =
            steps.chain(phase.pick_largest.iter().map(|launch| launch.kernel)).map(|kernel| kernel as usize).collect();
        kernels.sort_unstable();
        kernels.dedup();
        let arch = Arch::from_str(&cuda.program.gpu.architecture).map_err(anyhow::Error::msg)?;
        stamps::stamp(cuda, &kernels, arch, &compiler).context("compiling kernels with stamps")?;
    }
    Ok(())
}

/// Layers that are shown, from the last on.
const LAYERS: u32 = 2;

/// The last layers in Markdown, a launch a line: microseconds since the end of the launch before the first that is
/// shown.
pub fn table(launched: &[Launched], chain: &[Option<Chained>], ceilings: &Ceilings) -> String {
    let layers = launched.iter().filter_map(|launch| launch.layer).max().map_or(0, |last| last + 1);
    let shown = |launch: &Launched| launch.layer.is_none_or(|layer| layer + LAYERS >= layers);
    // Launches of no layer lie at both ends; those before the layers are long over.
    let first = launched.iter().position(|launch| launch.layer.is_some_and(|_| shown(launch))).unwrap_or(0);
    let before = first.checked_sub(1).and_then(|index| chain.get(index)?.as_ref());
    let told = launched.iter().zip(chain).skip(first).filter(|(launch, _)| shown(launch));
    let told: Vec<(&Launched, &Chained)> =
        told.filter_map(|(launch, chained)| Some((launch, chained.as_ref()?))).collect();
    let Some(earliest) = told.first() else {
        return "\nNo launch of the last layers has left its times.\n".into();
    };
    let zero = before.map_or(earliest.1.started.first, |before| before.ended.last);
    let since = |time: u64| (time as f64 - zero as f64) / 1e3;
    let span = |span: Span| format!("{:.1} to {:.1}", since(span.first), since(span.last));
    let mut text = String::from(
        "\nThe last layers as their launches overlap, us: when the first and the last block started, saw that the launch before had ended, and ended; how long its blocks wait for the last of them, on average (uneven); what a launch adds is from the end of the one before to its own.\n\n\
         | layer | kernel | makes | blocks | SMs | started | released | ended | uneven | adds | floor |\n\
         |---:|---|---|---:|---:|---|---|---|---:|---:|---:|\n",
    );
    let mut end = zero;
    for (launch, chained) in told {
        let layer = launch.layer.map_or(String::new(), |layer| layer.to_string());
        let adds = chained.ended.last as f64 - end as f64;
        end = chained.ended.last;
        _ = writeln!(
            text,
            "| {layer} | {} | {} | {} | {} | {} | {} | {} | {:.1} | {:.1} | {:.1} |",
            launch.kernel,
            launch.makes,
            chained.blocks,
            chained.multiprocessors,
            span(chained.started),
            span(chained.released),
            span(chained.ended),
            chained.uneven as f64 / 1e3,
            adds / 1e3,
            ceilings.floor(launch.bytes as f64, launch.flops as f64),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(layer: Option<u32>, makes: &str) -> Launched {
        let (kernel, instance) = ("matvec".to_owned(), "matvec[K = 32]".to_owned());
        Launched { kernel, instance, makes: makes.into(), layer, bytes: 4_400_000, flops: 0, microseconds: 9.0 }
    }

    fn chained(from: u64) -> Option<Chained> {
        let span = |first: u64, last: u64| Span { first: from + first, last: from + last };
        let (started, asked, released, ended) = (span(0, 500), span(100, 600), span(900, 950), span(2000, 3000));
        Some(Chained { started, asked, released, ended, uneven: 300, blocks: 8, multiprocessors: 7 })
    }

    #[test]
    fn the_last_layers_are_shown_from_the_end_of_what_came_before() {
        let launched = [
            launch(None, "embedded"),
            launch(Some(0), "q"),
            launch(Some(1), "q"),
            launch(Some(2), "q"),
            launch(None, "logits"),
        ];
        let chain = [None, chained(10_000), chained(12_200), chained(14_400), chained(16_600)];
        let text = table(&launched, &chain, &Ceilings { gigabytes: 4400.0, teraflops: 790.0 });
        insta::with_settings!({
            snapshot_path => "../../../snapshots/cli",
            prepend_module_to_snapshot => false,
            omit_expression => true,
        }, { insta::assert_snapshot!("profile_chain", text) });
    }

    #[test]
    fn a_phase_without_times_says_so() {
        let text = table(&[launch(Some(0), "q")], &[None], &Ceilings { gigabytes: 1.0, teraflops: 1.0 });
        assert!(text.contains("No launch of the last layers has left its times"));
    }
}
