//! Cases of the repack: every plane of every type, rows that leave a block's threads over.

use gemma4c_blocks::DType;
use gemma4c_dsl::ElementType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};

use crate::kernels::matvec::formats::types_with_kernels;
use crate::kernels::planes::Repacked;
use crate::kernels::repack::{BLOCK_THREADS, repacks};

pub fn cases() -> Vec<Case> {
    let shape = |dtype: DType| match dtype.layout().len {
        256 => [(1, 256), (3, 768)],
        len => [(1, len.max(32)), (5, 704)],
    };
    types_with_kernels().flat_map(|dtype| shape(dtype).map(|(rows, k)| matrix(dtype, rows, k))).flatten().collect()
}

/// One case for each plane of a random matrix.
fn matrix(dtype: DType, rows: usize, k: usize) -> Vec<Case> {
    let layout = dtype.layout();
    let blocks = Random::new((rows * k) as u64 + dtype as u64).bytes(rows * k / layout.len * layout.bytes);
    let repacked = Repacked::from_blocks(dtype, rows, k, &blocks).expect("whole rows");
    let launches = repacks(dtype).expect("every type of the table has its kernels");
    let case = |repack: crate::kernels::repack::Repack| {
        let count = repack.count(rows as u64, k as u64);
        let plane = repack.plane;
        let bytes = repacked.plane(plane.name).expect("a plane of the type");
        let element = match repack.instance.params()[1].def.kind {
            gemma4c_dsl::ParamKind::Memory { element, .. } => ElementType::named(element),
            _ => None,
        };
        let expected = Data::new(
            element.expect("`out` is memory"),
            // The padding is nobody's to write.
            bytes[..rows * k / plane.per * plane.bytes].to_vec(),
        );
        Case::new(format!("{dtype} {}, {rows} x {k}", plane.name), repack.instance)
            .grid([(count as u32).div_ceil(BLOCK_THREADS), 1, 1])
            .buffer("blocks", blocks.clone())
            .scalar("count", count as u32)
            .expect("out", expected, Bound::Exact)
    };
    launches.into_iter().map(case).collect()
}
