//! Weights that are made of pieces: what holds of them is checked before anybody makes a row.

use crate::support;
use gemma4c_blocks::recipe::{Float, Recipe, Scales};
use gemma4c_plan::{Piece, Plan, PlanError, Span, Weight};

/// A plan whose experts are made of two pieces each, and a vector of one; the file has all that they need.
fn plan() -> Plan {
    let mut plan = support::cpu_plan();
    let vector = weight(&mut plan, "norm.weight");
    let widened = Piece { rows: 1, recipe: Recipe::Widen { from: Float::BF16 }, inputs: vec![span(0, 64)] };
    (vector.file, vector.offset, vector.pieces) = (0, 0, vec![widened]);
    let experts = weight(&mut plan, "up_exps.weight");
    let piece = |at: u64| {
        let recipe = Recipe::Quantise { from: Float::BF16 };
        Piece { rows: 192, recipe, inputs: vec![span(at * 10, 192 * 64)] }
    };
    (experts.file, experts.offset, experts.pieces) = (0, 0, vec![piece(0), piece(1)]);
    plan.model.files[0].bytes += 20_000;
    plan
}

fn weight<'p>(plan: &'p mut Plan, name: &str) -> &'p mut Weight {
    plan.weights.iter_mut().find(|weight| weight.name == name).unwrap()
}

fn span(offset: u64, bytes: u64) -> Span {
    Span { file: 0, offset, bytes }
}

#[test]
fn they_are_written_and_read() {
    let plan = plan();
    assert_eq!(Plan::from_bytes(&plan.to_bytes().unwrap()).unwrap(), plan);
    let spans: Vec<Span> = plan.weights.iter().flat_map(Weight::spans).collect();
    assert_eq!(spans.len(), plan.weights.len() + 1);
}

/// A change to a plan.
type Change = fn(&mut Plan);

#[test]
fn contradictions_are_named() {
    let scales = Scales { float: Float::BF16, rows: 0, columns: 0 };
    assert_eq!(Recipe::Fp8 { scales }.inputs(gemma4c_blocks::DType::F32, 32), None, "scales for nothing");
    let cases: [(&str, Change); 8] = [
        ("is in a file, and made of pieces", |plan| weight(plan, "norm.weight").offset = 8),
        ("piece 0 of norm.weight does not make rows of it", |plan| weight(plan, "norm.weight").pieces[0].rows = 0),
        ("piece 0 of norm.weight does not make rows of it", |plan| {
            weight(plan, "norm.weight").pieces[0].recipe = Recipe::Widen { from: Float::F32 };
        }),
        ("piece 1 of up_exps.weight does not make rows of it", |plan| {
            weight(plan, "up_exps.weight").pieces[1].inputs.clear();
        }),
        ("the pieces of up_exps.weight do not make its rows", |plan| {
            weight(plan, "up_exps.weight").pieces.truncate(1);
        }),
        ("up_exps.weight ends beyond file 0", |plan| {
            weight(plan, "up_exps.weight").pieces[0].inputs[0].offset = u64::MAX - 4;
        }),
        ("norm.weight lies in file 7", |plan| weight(plan, "norm.weight").pieces[0].inputs[0].file = 7),
        ("piece 0 of norm.weight does not make rows of it", |plan| {
            weight(plan, "norm.weight").pieces[0].rows = u64::MAX;
        }),
    ];
    for (expected, change) in cases {
        let mut plan = plan();
        change(&mut plan);
        match plan.to_bytes() {
            Err(PlanError::Invalid(why)) => assert!(why.contains(expected), "{why}, expected {expected}"),
            other => panic!("{expected}: {other:?}"),
        }
    }
}
