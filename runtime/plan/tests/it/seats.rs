//! Weights that are reserved for adapters: what holds of them is checked before anybody fills a seat.

use crate::support;
use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::Recipe;
use gemma4c_plan::embedded::Embedded;
use gemma4c_plan::{Kind, Op, Piece, Plan, PlanError, SeatWeights, Seats, Step, Value, Weight, WeightId};

fn reserved(name: &str, dims: [u64; 3]) -> Weight {
    let zeros = Piece { rows: dims[1] * dims[2], recipe: Recipe::Zeros, inputs: Vec::new() };
    let (dims, bytes, pieces) = (dims.to_vec(), 2 * dims.iter().product::<u64>(), vec![zeros]);
    Weight { name: name.into(), dtype: DType::BF16, dims, file: 0, offset: 0, bytes, pieces }
}

/// A plan with two seats of rank 16 for one matrix.
fn plan() -> Plan {
    let mut plan = support::cpu_plan();
    plan.model.seats = Some(Seats { count: 2, rank: 16 });
    plan.weights.push(reserved("up.weight.seats_a", [32, 16, 2]));
    plan.weights.push(reserved("up.weight.seats_b", [16, 24, 2]));
    plan
}

#[test]
fn they_are_in_a_plan_and_in_no_file() {
    let plan = plan();
    assert_eq!(Plan::from_bytes(&plan.to_bytes().unwrap()).unwrap(), plan);
    assert_eq!(plan.seat_bytes(), [1024, 768]);
    assert_eq!(plan.reserved_bytes(), 2 * (1024 + 768));
    assert!(plan.reserved().all(|(_, weight)| weight.spans().next().is_none()));
    let fits = |sizes: &[usize]| {
        let matrices = sizes.iter().map(|size| vec![0; *size]).collect();
        SeatWeights { pairs: 1, matrices }.fit(&plan.seat_bytes())
    };
    assert!(fits(&[1024, 768]) && !fits(&[1024]) && !fits(&[768, 1024]) && !fits(&[1024, 768, 0]));
}

#[test]
fn a_plan_with_its_weights_has_no_bytes_for_them() {
    let (mut with, mut without) = (plan(), support::cpu_plan());
    Embedded::prepare(&mut with).unwrap();
    Embedded::prepare(&mut without).unwrap();
    assert_eq!(with.embedded, without.embedded);
    let [.., a, b] = &with.weights[..] else { panic!("no weights") };
    assert!(a.is_reserved() && b.is_reserved() && (a.offset, b.offset) == (0, 0));
    let own = with.to_bytes().unwrap();
    let file = (own.len() as u64).next_multiple_of(4096) + with.embedded.as_ref().unwrap().bytes;
    assert_eq!(Plan::from_start(&own, file).unwrap(), with);
}

/// A change to a plan.
type Change = fn(&mut Plan);

#[test]
fn contradictions_are_named() {
    let cases: [(&str, Change); 11] = [
        ("up.weight.seats_a is reserved for adapters, and the plan has no seats", |plan| plan.model.seats = None),
        ("2 seats of rank 16 make no sense", |plan| plan.weights.truncate(plan.weights.len() - 2)),
        ("0 seats of rank 16 make no sense", |plan| plan.model.seats = Some(Seats { count: 0, rank: 16 })),
        ("257 seats of rank 16 make no sense", |plan| plan.model.seats = Some(Seats { count: 257, rank: 16 })),
        ("2 seats of rank 0 make no sense", |plan| plan.model.seats = Some(Seats { count: 2, rank: 0 })),
        ("2 seats of rank 24 make no sense", |plan| plan.model.seats = Some(Seats { count: 2, rank: 24 })),
        ("2 seats of rank 528 make no sense", |plan| plan.model.seats = Some(Seats { count: 2, rank: 528 })),
        ("up.weight.seats_a bf16[32, 16, 2] does not hold 3 seats of rank 16", |plan| {
            plan.model.seats = Some(Seats { count: 3, rank: 16 });
        }),
        ("up.weight.seats_b bf16[16, 24, 2] does not hold 2 seats of rank 32", |plan| {
            plan.model.seats = Some(Seats { count: 2, rank: 32 });
            plan.weights.swap_remove(plan.weights.len() - 2);
        }),
        ("other f16[16, 24, 2] does not hold 2 seats of rank 16", |plan| {
            plan.weights.push(Weight { dtype: DType::F16, ..reserved("other", [16, 24, 2]) });
        }),
        ("up.weight.seats_b is in a file, and made of pieces", |plan| plan.weights.last_mut().unwrap().offset = 64),
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

/// What takes a row's seat reads seats, and no other stack of matrices: it may have fewer.
#[test]
fn steps_by_seat_read_seats() {
    let narrowed = |name: &str| {
        let mut plan = plan();
        let at = plan.weights.iter().position(|weight| weight.name == name).unwrap();
        let dims = plan.weights[at].dims.clone();
        let program = &mut plan.program;
        let reads = |value: &Value| matches!(value.kind, Kind::Floats { .. }) && u64::from(value.width) == dims[0];
        let made = |value: usize| program.steps.iter().any(|step| step.output as usize == value);
        let input = (0..program.values.len()).find(|at| reads(&program.values[*at]) && made(*at)).unwrap();
        let (offset, rows, width) = (program.arena_bytes, program.values[input].rows, dims[1] as u32);
        program.arena_bytes += u64::from(program.max_rows(rows)) * u64::from(width) * 4;
        let output = program.values.len() as u32;
        program.values.push(Value { name: "narrowed".into(), kind: Kind::Floats { offset }, rows, width });
        let op = Op::Narrow { weight: WeightId(at as u32), factor: 1.0 };
        program.steps.push(Step { op, inputs: vec![input as u32], output });
        plan.to_bytes().map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(narrowed("up.weight.seats_a"), Ok(()));
    let why = narrowed("up_exps.weight").unwrap_err();
    assert!(why.contains("step narrowed") && why.contains("does not fit"), "{why}");
}

/// On a GPU they are memory of their own, as large as all of them together.
#[test]
fn a_gpus_program_has_memory_for_them() {
    let with = |bytes: u64, places: Option<u64>| {
        let mut plan = support::plan();
        let plan_with = self::plan();
        plan.model.seats = plan_with.model.seats;
        plan.weights.extend(plan_with.weights.into_iter().filter(Weight::is_reserved));
        let program = &mut plan.cuda.as_mut().unwrap().program;
        (program.memory.seats, program.places.seats) = (bytes, places);
        plan.to_bytes().map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(with(3584, Some(0)), Ok(()));
    for (bytes, places, expected) in [
        (3583, Some(0), "3583 bytes for seats, and their weights are Some(3584)"),
        (3584, None, "places for seats that do not fit the plan's"),
        (3584, Some(8192), "seats takes 24 bytes at 8192 of 8192 in Arena"),
        (3584, Some(4), "seats lies at 4"),
    ] {
        let why = with(bytes, places).expect_err(expected);
        assert!(why.contains(expected), "{why}, expected {expected}");
    }
}
