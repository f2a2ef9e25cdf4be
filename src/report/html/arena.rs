//! The arena over time: which step writes a range, and which is the last to read it.
//!
//! A GPU plan says which ranges a launch is given, not which of them it writes; that stands in the kernel's own text,
//! where what is only read is `const`.

use std::fmt::Write;

use gemma4c_plan::cuda::{Argument, Range, Region};
use gemma4c_plan::{Kind, Plan};

use super::{Hues, escape};
use crate::output;
use crate::report::facts::{Facts, PhaseFacts, StepFacts};
use crate::report::fold::layer_of;

/// A range from its first writer to its last reader.
#[derive(Clone, Debug, PartialEq)]
struct Life {
    offset: u64,
    bytes: u64,
    first: usize,
    last: usize,
    what: String,
    hue: usize,
}

/// What a kernel does with a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Number,
}

/// The parameters of the kernel of that name, in order, as its text declares them.
fn accesses(source: &str, name: &str) -> Vec<Access> {
    let Some((_, from)) = source.split_once("__global__").and_then(|(_, rest)| rest.split_once(&format!("{name}(")))
    else {
        return Vec::new();
    };
    let text = from.split_once(')').map_or(from, |(parameters, _)| parameters);
    // What a slot adds stands in a macro of its own: `f32 epsilon KEEP_PARAMS`.
    let mut whole = String::new();
    for word in text.split_whitespace() {
        let defined = format!("#define {word} ");
        match word.ends_with("_PARAMS").then(|| source.lines().find_map(|line| line.strip_prefix(defined.as_str()))) {
            None => whole = whole + word + " ",
            Some(extra) => whole += extra.unwrap_or(""),
        }
    }
    let access = |parameter: &str| match parameter.trim() {
        p if p.starts_with("weights<") || p.contains("tiles<") || (p.starts_with("const ") && p.contains('*')) => {
            Access::Read
        }
        p if p.contains('*') => Access::Write,
        _ => Access::Number,
    };
    whole.split(',').filter(|parameter| !parameter.trim().is_empty()).map(access).collect()
}

/// The ranges of the arena that a launch reads, and those it writes.
fn ranges(facts: &Facts<'_>, step: &StepFacts<'_>) -> (Vec<Range>, Vec<Range>) {
    let code = &facts.cuda.code[step.step.launch.kernel as usize];
    let accesses = accesses(&code.source, &step.kernel.name);
    let arguments = &step.step.launch.arguments;
    let is_parsed = accesses.len() == arguments.len();
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for (at, argument) in arguments.iter().enumerate() {
        let Argument::Memory(range) = argument else { continue };
        if range.region != Region::Arena || range.bytes == 0 {
            continue;
        }
        let is_output = step.step.outputs.iter().any(|output| output.place.offset == range.offset);
        let writes_it = if is_parsed { accesses[at] == Access::Write } else { is_output };
        if writes_it { writes.push(*range) } else { reads.push(*range) }
    }
    (reads, writes)
}

fn overlap(life: &Life, range: &Range) -> bool {
    life.offset < range.offset + range.bytes && range.offset < life.offset + life.bytes
}

/// The lives of all values from byte `base` on.
fn lives(facts: &Facts<'_>, phase: &PhaseFacts<'_>, hues: &Hues, base: u64) -> Vec<Life> {
    let mut done: Vec<Life> = Vec::new();
    let mut live: Vec<Life> = Vec::new();
    for (at, step) in phase.steps.iter().enumerate() {
        let (reads, mut writes) = ranges(facts, step);
        for life in live.iter_mut().filter(|life| reads.iter().any(|range| overlap(life, range))) {
            life.last = at;
        }
        writes.retain(|range| range.offset >= base);
        writes.sort_by_key(|range| range.offset);
        for range in writes {
            let (ended, going) = live.into_iter().partition(|life| overlap(life, &range) && life.first < at);
            done.extend::<Vec<Life>>(ended);
            live = going;
            let inside = |o: &&gemma4c_plan::cuda::StepOutput| {
                (o.place.offset..o.place.offset + o.place.bytes.max(1)).contains(&range.offset)
            };
            let what = step.step.outputs.iter().find(inside).map_or(format!("scratch of {}", step.kernel.name), |o| {
                phase.meaning.values[o.value as usize].name.clone()
            });
            // Codes, scales and sums of a value are neighbours, and one thing to a reader.
            match live.last_mut() {
                Some(last) if last.first == at && last.what == what && last.offset + last.bytes == range.offset => {
                    last.bytes += range.bytes;
                }
                _ => live.push(Life {
                    offset: range.offset,
                    bytes: range.bytes,
                    first: at,
                    last: at,
                    what,
                    hue: hues.of(step),
                }),
            }
        }
    }
    done.extend(live);
    done
}

const WIDTH: f64 = 1100.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 64.0;

/// The arena over the launches of a phase.
pub fn of_phase(facts: &Facts<'_>, phase: &PhaseFacts<'_>, hues: &Hues) -> String {
    let places = &facts.program().places;
    let logits_end = places.logits + facts.plan.model.vocab_size as u64 * 4;
    let outputs = phase.steps.iter().flat_map(|step| &step.step.outputs).map(|output| output.place.offset);
    let base = outputs.filter(|offset| *offset >= logits_end).min().unwrap_or(logits_end);
    let layers: Vec<Option<u32>> = phase.steps.iter().map(|step| step.layer).collect();
    let lives = lives(facts, phase, hues, base);
    let note = format!(
        "A box is a value, from the launch that writes it to the last that reads it; small values are drawn larger than they \
         are. The first {}, not drawn, are fixed places: tokens, state, the ring of picked tokens, logits, counters, and the \
         pick's scratch.",
        output::bytes(base)
    );
    let label = format!("The arena over the launches of {}", phase.phase.name);
    picture(&lives, base, &layers, "launches", &label) + &format!("<p class=\"note\">{note}</p>")
}

/// The arena over the steps of a CPU plan; `hue` colours the value of a step.
pub fn of_steps(plan: &Plan, hue: impl Fn(usize) -> usize) -> String {
    let program = &plan.program;
    let mut last_read: Vec<Option<usize>> = vec![None; program.values.len()];
    for (at, step) in program.steps.iter().enumerate() {
        step.inputs.iter().for_each(|input| last_read[*input as usize] = Some(at));
    }
    let mut lives = Vec::new();
    for (at, step) in program.steps.iter().enumerate() {
        let value = &program.values[step.output as usize];
        let Kind::Floats { offset } = value.kind else { continue };
        let bytes = (program.max_rows(value.rows) as u64 * 4).saturating_mul(value.width as u64);
        let last = last_read[step.output as usize].unwrap_or(at);
        lives.push(Life { offset, bytes, first: at, last, what: value.name.clone(), hue: hue(at) });
    }
    let layers: Vec<Option<u32>> =
        program.steps.iter().map(|step| layer_of(&program.values[step.output as usize].name)).collect();
    let note = "A box is a value at the largest chunk, from the step that writes it to the last that reads it; small values \
                are drawn larger than they are.";
    picture(&lives, 0, &layers, "steps", "The arena over the steps") + &format!("<p class=\"note\">{note}</p>")
}

/// Boxes from `base` on: across, the steps, of which `layers` has each one's; down, the bytes.
fn picture(lives: &[Life], base: u64, layers: &[Option<u32>], steps_are: &str, label: &str) -> String {
    // Bytes are drawn small beside logits and scratch, so heights grow slower than sizes: piece by piece between all
    // the borders there are.
    let mut borders: Vec<u64> =
        lives.iter().flat_map(|life| [life.offset, life.offset + life.bytes]).chain([base]).collect();
    borders.sort_unstable();
    borders.dedup();
    let piece = |pair: &[u64]| ((pair[1] - pair[0]) as f64).powf(0.3);
    let whole: f64 = borders.windows(2).map(piece).sum::<f64>().max(1e-9);
    let mut heights = vec![0.0];
    for pair in borders.windows(2) {
        heights.push(heights[heights.len() - 1] + piece(pair) / whole * HEIGHT);
    }
    let y = |offset: u64| heights[borders.binary_search(&offset).unwrap_or(0)];
    let steps = layers.len().max(1) as f64;
    let x = |step: f64| LEFT + step / steps * (WIDTH - LEFT);
    let mut out = format!(
        "<div class=\"scroll\"><svg class=\"arena\" viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" aria-label=\"{}\">\
         <rect class=\"ground\" x=\"{LEFT}\" y=\"0\" width=\"{:.0}\" height=\"{HEIGHT}\"/>",
        HEIGHT + 46.0,
        escape(label),
        WIDTH - LEFT
    );
    for life in lives {
        let (top, end) = (y(life.offset), y(life.offset + life.bytes));
        let _ = write!(
            out,
            "<rect class=\"h{}\" x=\"{:.2}\" y=\"{top:.2}\" width=\"{:.2}\" height=\"{:.2}\"><title>{}: {}, {steps_are} {} to {}</title></rect>",
            life.hue,
            x(life.first as f64),
            x(life.last as f64 + 1.0) - x(life.first as f64),
            (end - top).max(0.4),
            escape(&life.what),
            output::bytes(life.bytes),
            life.first,
            life.last
        );
    }
    let text = |x: f64, y: f64, class: &str, text: &str| {
        format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>")
    };
    let end = borders.last().copied().unwrap_or(base);
    out += &text(LEFT - 6.0, 10.0, "axis end", &output::bytes(base));
    out += &text(LEFT - 6.0, HEIGHT, "axis end", &output::bytes(end));
    let mut last = None;
    let count = layers.iter().flatten().max().map_or(0, |last| last + 1);
    let every = count.div_ceil(24).max(1);
    for (at, step_layer) in layers.iter().enumerate() {
        if *step_layer != last {
            last = *step_layer;
            if let Some(layer) = step_layer.filter(|layer| layer % every == 0) {
                let _ = write!(out, "<path class=\"tick\" d=\"M{0:.1} {HEIGHT}v5\"/>", x(at as f64));
                out += &text(x(at as f64), HEIGHT + 17.0, "axis", &layer.to_string());
            }
        }
    }
    out += &text(LEFT, HEIGHT + 36.0, "axis start", &format!("{steps_are} in order, by layer →"));
    out + "</svg></div>"
}

#[cfg(test)]
mod tests {
    use super::{Access, accesses};

    #[test]
    fn a_kernels_text_says_what_it_writes() {
        let source = "\
            #define KEEP_PARAMS , u32* codes, f32* scales\n#define SIDE_PARAMS\n\
            extern \"C\" __global__ void __launch_bounds__(THREADS) step(\n    const f32* q,\n    weights<f32> w,\n    KV* cache,\n    \
            f32 epsilon SIDE_PARAMS KEEP_PARAMS) {\n    other(1);\n}\n";
        use Access::{Number, Read, Write};
        assert_eq!(accesses(source, "step"), [Read, Read, Write, Number, Write, Write]);
        assert_eq!(accesses(source, "another"), []);
        assert_eq!(accesses("__global__ void none() {}", "none"), []);
    }
}
