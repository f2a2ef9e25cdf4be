//! Kernels over `#[config]` and `#[view]` structs: they are in the simulator and in the host's compiler what their
//! fields are.

use gemma4c_dsl::harness::{Bound, Case, CaseError, Data};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{FaultKind, LaunchError};
use gemma4c_dsl::{Access, ElementType, Instance, InstanceError, LaunchArguments, ParamKind};

/// How rows are cut.
#[config]
pub struct Cut {
    COLUMNS: u32,
    HALVES: bool,
}

/// Rows of a table, and which of them are meant.
#[view]
pub struct Table<E: Float> {
    /// By number.
    order: Weights<u32>,
    rows: Input<E>,
    sums: InOut<f32>,
    stride: u32,
    factor: f32,
}

/// What a block has for itself.
#[view]
pub struct Scratch<E: Float> {
    row: Shared<E>,
    total: Shared<f32>,
    is_empty: bool,
}

/// Two buffers of a function in a slot.
#[view]
pub struct Offsets {
    of_rows: Input<f32>,
    log: Output<u32>,
    first: u32,
}

#[device]
fn copy_row<const C: Cut, E: Float>(table: Table<E>, scratch: Scratch<E>, row: u32) {
    let from = table.rows.offset(table.order[row] * table.stride);
    for i in (thread_idx()..C.COLUMNS).by(32) {
        scratch.row[i] = from[i];
    }
    if thread_idx() == 0 {
        scratch.total[0u32] = 0.0;
    }
    barrier();
}

/// COLUMNS alone, of whatever config the kernel has it from.
#[device]
fn half_of<const COLUMNS: u32, E: Float>(scratch: Scratch<E>, from: u32) -> f32 {
    let mut sum = 0.0f32;
    for i in from..COLUMNS / 2 + from {
        sum += scratch.row[i].to_f32();
    }
    sum
}

#[device(fills(sum, row))]
fn add_offset(sum: f32, row: u32, offsets: Offsets, scale: f32) -> f32 {
    offsets.log[row] = row + offsets.first;
    sum + offsets.of_rows[row] * scale
}

/// The sum of each row times a factor, of one half or of both.
#[kernel(block = 32, dependent, early(!C.HALVES, table.rows), only_reads(C.HALVES && N > 1, table.sums),
    slots(finish(sum: f32, row: u32) -> f32))]
fn sum_rows<const C: Cut, const N: u32, E: Float>(table: Table<E>, out: Output<f32>) {
    require!(C.COLUMNS % 2 == 0);
    let row_values = shared::<E>(C.COLUMNS);
    let totals = shared::<f32>(N);
    let scratch = Scratch::<E> { row: row_values, total: totals, is_empty: C.COLUMNS == 0 };
    grid_dependency_wait();
    let row = block_idx();
    copy_row(table, scratch, row);
    if thread_idx() == 0 && !scratch.is_empty {
        scratch.total[0u32] += half_of(scratch, 0);
        if C.HALVES {
            scratch.total[0u32] += half_of(scratch, C.COLUMNS / 2);
        }
        if !C.HALVES {
            table.sums[row] = scratch.total[0u32];
        }
        out[row] = finish(scratch.total[0u32] * table.factor, row);
    }
    grid_launch_dependents();
}

fn instance(halves: bool, element: ElementType) -> Instance {
    let finish = vec![add_offset::DEF];
    sum_rows::Chosen { C: Cut { COLUMNS: 8, HALVES: halves }, N: 2, E: element, finish }.build().expect("all is chosen")
}

fn case(instance: Instance, rows: impl Into<Data>, sums: [f32; 3], out: [f32; 3]) -> Case {
    Case::new("three rows", instance)
        .grid([3, 1, 1])
        .buffer("table_order", vec![2u32, 0, 1])
        .buffer("table_rows", rows)
        .scalar("table_stride", 8u32)
        .scalar("table_factor", 2.0f32)
        .buffer("finish_offsets_of_rows", vec![1.0f32, 2.0, 3.0])
        .scalar("finish_offsets_first", 5u32)
        .scalar("finish_scale", 10.0f32)
        .expect("finish_offsets_log", vec![5u32, 6, 7], Bound::Exact)
        .buffer("table_sums", vec![0.0f32; 3])
        .expect("table_sums", sums.to_vec(), Bound::Exact)
        .expect("out", out.to_vec(), Bound::Exact)
}

#[test]
fn structs_mean_their_fields_in_every_executor() {
    let rows: Vec<f32> = (0..24).map(|i| i as f32).collect();
    // Row r sums to 28 + 64 r, its first half to 6 + 32 r.
    let out = [156.0 * 2.0 + 10.0, 28.0 * 2.0 + 20.0, 92.0 * 2.0 + 30.0];
    case(instance(true, ElementType::F32), rows.clone(), [0.0; 3], out).assert();
    let narrow: Vec<BF16> = rows.iter().map(|value| BF16::from_f32(*value)).collect();
    let out = [70.0 * 2.0 + 10.0, 6.0 * 2.0 + 20.0, 38.0 * 2.0 + 30.0];
    case(instance(false, ElementType::BF16), narrow, [70.0, 6.0, 38.0], out).assert();
}

#[test]
fn a_launch_gives_the_fields_and_the_text_puts_them_together() {
    let instance = instance(true, ElementType::F16);
    let names: Vec<_> = instance.params().iter().map(|param| param.name.as_str()).collect();
    let of_slot = ["finish_offsets_of_rows", "finish_offsets_log", "finish_offsets_first", "finish_scale"];
    let of_view = ["table_order", "table_rows", "table_sums", "table_stride", "table_factor", "out"];
    assert_eq!(names, [&of_view[..], &of_slot[..]].concat());
    assert_eq!(instance.params()[1].def.kind, ParamKind::Memory { access: Access::Input, element: "E" });
    assert!(!instance.reads_early("table_rows") && !instance.writes(&instance.params()[2]));
    assert!(instance.writes(&instance.params()[5]) && instance.writes(&instance.params()[7]));
    let text = instance.cuda();
    for part in [
        "constexpr u32 COLUMNS = 8;\nconstexpr bool HALVES = true;\nconstexpr u32 N = 2;\ntypedef F16 E;\n",
        "// Rows of a table, and which of them are meant.\ntemplate <class E>\nstruct Table {\n    // By number.\n    \
         weights<u32> order;\n    const E* rows;\n    f32* sums;\n    u32 stride;\n    f32 factor;\n};\n",
        "template <class E>\n__device__ __forceinline__ void copy_row(Table<E> table, Scratch<E> scratch, u32 row) {\n",
        "    return add_offset(sum, row, {finish_offsets_of_rows, finish_offsets_log, finish_offsets_first}, finish_scale);\n",
        "sum_rows(\n    weights<u32> table_order,\n    const E* table_rows,\n    f32* table_sums,\n    u32 table_stride,\n    \
         f32 table_factor,\n    f32* out FINISH_PARAMS) {\n    \
         Table<E> table = {table_order, table_rows, table_sums, table_stride, table_factor};\n",
        "    auto scratch = Scratch<E>{row_values, totals, COLUMNS == 0};\n",
    ] {
        assert!(text.contains(part), "{part}\nis not in\n{text}");
    }
    let arguments: LaunchArguments<u64> =
        sum_rows::Arguments { table: TableArguments { order: 1, rows: 2, sums: 3, stride: 8, factor: 0.5 }, out: 4 }
            .with_slot(
                sum_rows::slot::finish,
                add_offset::Arguments { offsets: OffsetsArguments { of_rows: 5, log: 6, first: 7 }, scale: 2.0 },
            );
    assert_eq!(arguments.bind(&instance).expect("every parameter has its own").len(), names.len());
}

/// Reads what it may only write.
#[kernel(block = 32)]
fn reads_an_output(offsets: Offsets) {
    offsets.log[thread_idx()] = 1;
    if offsets.log[thread_idx()] == 1 {
        offsets.log[thread_idx()] = offsets.first;
    }
}

#[test]
fn the_role_of_a_field_reaches_the_simulator() {
    let instance = reads_an_output::Chosen {}.build().expect("nothing to choose");
    let fault = Case::new("an output", instance)
        .buffer("offsets_of_rows", vec![0.0f32])
        .scalar("offsets_first", 1u32)
        .expect("offsets_log", vec![1u32; 32], Bound::Exact)
        .check();
    match fault {
        Err(CaseError::Launch { source, .. }) => match *source {
            LaunchError::Fault(fault) => {
                assert_eq!(fault.kind, FaultKind::ReadOfOutput);
                assert!(fault.message.contains("`offsets_log["), "{fault}");
            }
            other => panic!("{other}"),
        },
        other => panic!("the fault was not found: {other:?}"),
    }
}

/// Takes a config that its kernel does not have.
#[kernel(block = 32)]
fn without_the_config<const COLUMNS: u32, E: Float>(table: Table<E>) {
    let row = shared::<E>(COLUMNS);
    let total = shared::<f32>(1);
    let scratch = Scratch::<E> { row, total, is_empty: false };
    copy_row(table, scratch, 0);
}

#[test]
fn a_kernel_has_every_field_of_the_configs_that_it_passes_on() {
    let refused = without_the_config::Chosen { COLUMNS: 8, E: ElementType::F32 }.build();
    let (kernel, function) = ("without_the_config", "copy_row");
    assert_eq!(refused.unwrap_err(), InstanceError::DeviceConstant { kernel, function, name: "HALVES", ty: "bool" });
}
