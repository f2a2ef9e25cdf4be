//! Kernels of the types whose units have 8 bytes, with tables or without, as NVRTC compiles them: no type's text but
//! theirs has the other meaning of `weights<U32x4>`, so nothing else shows that it compiles.

use crate::support;
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::kernels::gemm::Gemm;
use gemma4c_codegen::kernels::matvec::formats::{format, types_with_kernels};
use gemma4c_codegen::kernels::matvec::{Product as OneRow, Prologue};
use gemma4c_codegen::kernels::moe::Activations;
use gemma4c_codegen::kernels::moe::gate_up::GateUp;
use gemma4c_codegen::kernels::product::warpgroups::{Source, WgmmaProduct};
use gemma4c_codegen::kernels::product::widen;
use gemma4c_codegen::kernels::rows::{Product, Shape, SumOrder};
use gemma4c_codegen::kernels::{gather, source};
use gemma4c_codegen::nvrtc::Options;
use gemma4c_codegen::target::Target;
use gemma4c_dsl::{ElementType, Instance};

fn thin_types() -> impl Iterator<Item = DType> {
    types_with_kernels().filter(|dtype| format(*dtype).side.thin)
}

/// Products of a real model with weights of that type, one of each family.
fn products(dtype: DType, target: &Target) -> Vec<Instance> {
    let (outputs, k) = (2560, 10240);
    let gated = OneRow { geglu: true, ..OneRow::new(dtype, k, outputs, Prologue::ResidualNorm) };
    let down = OneRow::new(dtype, outputs, k, Prologue::Plain);
    let rows = |rows| {
        let product = Product::new(gated.clone(), rows, SumOrder::Matvec);
        let shape = product.choose(target).0;
        assert!(matches!(shape, Shape::Tiles(_)), "{dtype}: {shape:?}");
        product.instance(shape).unwrap()
    };
    let gemm = Gemm {
        dtype,
        operands: ElementType::BF16,
        outputs,
        k,
        geglu: false,
        pairs: 0,
        out: ElementType::F32,
        epilogue: Vec::new(),
    };
    let cluster = if target.arch.has_tma() { 8 } else { 1 };
    let experts = GateUp {
        dtype,
        hidden: 704,
        k: 2816,
        top: 8,
        from: Activations::F32,
        dense: 2112,
        prefetch_record: false,
        multiprocessors: target.multiprocessors,
    };
    let mut all = vec![
        gated.instance(gated.shape(target)).unwrap(),
        down.instance(down.shape(target)).unwrap(),
        rows(8),
        rows(32),
        gemm.instance(gemm.shape(4, cluster, target)).unwrap(),
        gemm.instance(gemm.shape(64, cluster, target)).unwrap(),
        experts.instance().unwrap(),
        widen::instance(dtype).unwrap(),
        gather::instance(dtype).unwrap(),
    ];
    if target.arch.has_wgmma() {
        let (out, epilogue) = (ElementType::F32, Vec::new());
        let source = Source::Planes(dtype);
        let prefill = WgmmaProduct { out, geglu: false, pairs: 0, epilogue, source, part_columns: 0, ragged: false };
        all.extend([32, 512].map(|rows| prefill.instance(prefill.choose(rows, outputs, k, target).unwrap()).unwrap()));
    }
    all
}

#[test]
fn products_compile_without_spills() {
    let Some(toolchain) = support::toolchain() else { return };
    for dtype in thin_types() {
        // All types for the GPU with most of its own kernels, and each for another.
        let other = [Arch::Sm80, Arch::Sm89, Arch::Sm120a][dtype as usize % 3];
        for arch in [Arch::Sm90a, other] {
            let target = Target::of_arch(arch);
            for instance in products(dtype, &target) {
                let dynamic = if instance.def.launch.dynamic_shared { instance.shared_bytes() as u32 } else { 0 };
                let cubin = toolchain.compile(&source(&instance), arch, Options::default()).unwrap();
                let resources = cubin.resources;
                println!("{dtype} {arch} {}: {resources:?}, {dynamic} bytes dynamic", instance.def.name);
                assert!(!resources.spills(), "{arch}, {instance}: {resources:?}");
                let all = resources.shared_bytes + dynamic;
                assert!(all <= target.shared_bytes_per_block, "{arch}, {instance}: {all} bytes");
            }
        }
    }
}
