//! Every kernel of a plan with its text. What all texts begin with is shown once.

use std::fmt::Write;

use gemma4c_plan::cuda::{LoadPart, PhaseKind};

use super::cuda_text::coloured;
use super::escape;
use crate::output;
use crate::report::facts::{Facts, PhaseFacts};

pub fn section(facts: &Facts<'_>) -> String {
    let program = facts.program();
    let sources: Vec<&str> = facts.cuda.code.iter().map(|code| code.source.as_str()).collect();
    let common = common_start(&sources);
    let lines = sources.first().map_or(0, |source| source[..common].lines().count());
    let mut out =
        "<p>As they were compiled. <code>gemma4c inspect PLAN.bin --cuda DIR</code> writes them as files.</p>"
            .to_owned();
    if common > 0 {
        let _ = write!(
            out,
            "<details class=\"source\"><summary><code>prelude</code><span>{lines} lines that every kernel begins with</span></summary><pre>{}</pre></details>",
            coloured(&sources[0][..common])
        );
    }
    let mut order: Vec<usize> = (0..program.kernels.len()).collect();
    order.sort_by(|a, b| facts.labels[*a].cmp(&facts.labels[*b]));
    for at in order {
        let (kernel, code) = (&program.kernels[at], &facts.cuda.code[at]);
        let shared =
            if kernel.shared > 0 { format!(", {} shared", output::bytes(kernel.shared as u64)) } else { String::new() };
        let size = output::bytes(code.image.0.len() as u64);
        let image = format!("{} {size}", escape(&program.gpu.architecture));
        let _ = write!(
            out,
            "<details class=\"source\" id=\"k-{label}\"><summary><code>{label}</code><span>{} threads{shared}</span><span>{}</span><span>{}</span></summary>\
             <p class=\"instance\">{}</p><pre>{}</pre></details>",
            kernel.block,
            used(facts, at),
            image,
            escape(&kernel.instance),
            coloured(&code.source[common..]),
            label = escape(&facts.labels[at]),
        );
    }
    out
}

/// `decode 42×, every prefill 24×`.
fn used(facts: &Facts<'_>, kernel: usize) -> String {
    let program = facts.program();
    let times =
        |phase: &PhaseFacts<'_>| phase.steps.iter().filter(|step| step.step.launch.kernel as usize == kernel).count();
    let mut places: Vec<String> = Vec::new();
    let is_prefill = |phase: &&PhaseFacts<'_>| phase.phase.kind == PhaseKind::Prefill;
    let prefill: Vec<&PhaseFacts<'_>> = facts.phases.iter().filter(is_prefill).collect();
    let same = prefill.len() > 1 && prefill.iter().all(|phase| times(phase) == times(prefill[0]));
    let named = facts.phases.iter().filter(|phase| !(same && is_prefill(phase)));
    for phase in named.filter(|phase| times(phase) > 0) {
        places.push(format!("{} {}×", escape(&phase.phase.name), times(phase)));
    }
    if same && times(prefill[0]) > 0 {
        places.push(format!("every prefill {}×", times(prefill[0])));
    }
    let mut picks = program.phases.iter().flat_map(|phase| phase.pick_largest.iter().chain(&phase.pick_sampled));
    if picks.any(|launch| launch.kernel as usize == kernel) {
        places.push("picks a token".into());
    }
    let mut parts = program.loads.iter().flat_map(|load| &load.parts);
    if parts.any(|part| matches!(part, LoadPart::Kernel { kernel: loads, .. } if *loads as usize == kernel)) {
        places.push("loads weights".into());
    }
    places.join(", ")
}

/// Bytes of the whole lines that all texts begin with.
fn common_start(texts: &[&str]) -> usize {
    let [first, rest @ ..] = texts else { return 0 };
    if rest.is_empty() {
        return 0;
    }
    let mut end = 0;
    for line in first.split_inclusive('\n') {
        let next = end + line.len();
        if !rest.iter().all(|text| text.get(end..next) == Some(line)) {
            break;
        }
        end = next;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::common_start;

    #[test]
    fn only_whole_lines_are_common() {
        assert_eq!(common_start(&["a\nb\nc\n", "a\nb\nd\n"]), 4);
        assert_eq!(common_start(&["a\nbé", "a\nbb"]), 2);
        assert_eq!(common_start(&["a\n", "a\n"]), 2);
        assert_eq!((common_start(&["a\n"]), common_start(&[]), common_start(&["a", ""])), (0, 0, 0));
    }
}
