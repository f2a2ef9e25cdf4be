//! Kernels that note when their blocks start, are released by the launch before, and end.
//!
//! Launches of a chain overlap, so a time of their own says little of them; what counts is who waits for whom, on the GPU's one clock. The text of a kernel becomes
//! that of a stamped one by an object in its first line, which notes the start, and whose destructor notes the end whichever way a thread leaves. Nothing else of the text changes, so that what
//! is timed is what a plan runs: some 5 % slower, and with the same results. Where the times lie is [`gemma4c_plan::stamps`]'s.

use gemma4c_plan::cuda::{Cuda, Image};
use gemma4c_plan::stamps::{ASKED, BLOCKS, END, LAUNCHES, PLACE, RELEASED, START, SYMBOL, WORDS};

use crate::arch::Arch;
use crate::nvrtc::{Compiler, Job, NvrtcError, Options, Source};

const WAIT: &str = "grid_dependency_wait();";

/// The stamped text; `None` of a kernel that waits for no predecessor.
pub fn stamped(source: &Source) -> Option<Source> {
    let text = &source.text;
    let head = text.find("extern \"C\" __global__")?;
    let body = head + text[head..].find(") {\n")? + ") {\n".len();
    let waits = text[body..].contains(WAIT);
    let noted = text[body..]
        .replace(WAIT, "{ stamp.asked = stamp.now(); grid_dependency_wait(); stamp.released = stamp.now(); }");
    let stamped = || format!("{}{}    BlockStamp stamp;\n{noted}", declarations(), &text[..body]);
    waits.then(|| Source { name: source.name.clone(), text: stamped() })
}

/// Lane 0 of every warp counts its own launches, so that no two write the same counter; that of the first warp leaves all times but the end, which is the latest of all warps.
fn declarations() -> String {
    format!(
        r#"extern "C" __device__ unsigned long long {SYMBOL}[{BLOCKS} * {LAUNCHES} * {WORDS}];
__device__ unsigned stamp_counts[{BLOCKS} * 32];
struct BlockStamp {{
    unsigned long long start, asked = 0, released = 0;
    unsigned block, count = 0;
    bool counts;
    __device__ __forceinline__ static unsigned long long now() {{
        unsigned long long time;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time) :: "memory");
        return time;
    }}
    __device__ __forceinline__ BlockStamp() {{
        start = now();
        block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        counts = threadIdx.x % 32 == 0 && block < {BLOCKS};
        if (counts) count = *(volatile unsigned*)&stamp_counts[block * 32 + threadIdx.x / 32];
    }}
    __device__ __forceinline__ ~BlockStamp() {{
        if (!counts) return;
        unsigned long long* words = {SYMBOL} + (block * {LAUNCHES} + count % {LAUNCHES}) * {WORDS};
        if (threadIdx.x == 0) {{
            unsigned sm;
            asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
            words[{START}] = start;
            words[{ASKED}] = asked;
            words[{RELEASED}] = released;
            words[{PLACE}] = (unsigned long long)(gridDim.x * gridDim.y * gridDim.z) << 32 | sm;
        }}
        atomicMax(words + {END}, now());
        stamp_counts[block * 32 + threadIdx.x / 32] = count + 1;
    }}
}};
"#
    )
}

/// Puts stamped code in the place of some kernels' code.
pub fn stamp(cuda: &mut Cuda, kernels: &[usize], arch: Arch, compiler: &Compiler) -> Result<(), NvrtcError> {
    let of_plan = |kernel: usize| Source {
        name: cuda.program.kernels[kernel].name.clone(),
        text: cuda.code[kernel].source.clone(),
    };
    let stamped: Vec<(usize, Source)> =
        kernels.iter().filter_map(|kernel| Some((*kernel, stamped(&of_plan(*kernel))?))).collect();
    let jobs: Vec<Job<'_>> =
        stamped.iter().map(|(_, source)| Job { source, arch, options: Options::default() }).collect();
    let compiled = compiler.compile_all(&jobs);
    for ((kernel, source), compiled) in stamped.iter().zip(compiled) {
        let code = &mut cuda.code[*kernel];
        code.image = Image(compiled?.cubin.bytes);
        code.source = source.text.clone();
    }
    Ok(())
}
