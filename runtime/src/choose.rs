//! Which of a plan's programs runs on the GPU that is there.
//!
//! 1. Its code must run there: machine code `sm_90a` on 9.0 alone, `sm_89` on 8.9 and the later 8.x, PTX `compute_80`
//!    on all from 8.0 on. And no kernel may want more shared memory than a block can have there.
//! 2. Of those, code for exactly this GPU's version is before code that merely runs there, of which the newest counts,
//!    and PTX comes last.
//! 3. Of programs with the same code, the one for the most SMs that are not more than there are: its launches fill the
//!    GPU in one wave. Where all are for more, the one for the fewest.

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::CudaProgram;

use crate::RuntimeError;
use crate::machine::Gpu;

/// The index of the program among [`Plan::programs`]. `named` is the key of the one that somebody wants; it must run
/// there too.
pub fn choose(plan: &Plan, gpu: &Gpu, named: Option<&str>) -> Result<usize, RuntimeError> {
    let wanted: Vec<(usize, &CudaProgram)> = programs(plan, named)?;
    let fitting = wanted.iter().filter_map(|(i, program)| Some((rank(program, gpu)?, *i)));
    fitting.max_by_key(|(rank, i)| (*rank, usize::MAX - i)).map(|(_, i)| i).ok_or_else(|| RuntimeError::Architecture {
        gpu: gpu.to_string(),
        expected: listed(wanted.iter().map(|(_, program)| *program)),
    })
}

/// The program that is wanted by name, or the first: where no GPU decides.
pub fn named(plan: &Plan, key: Option<&str>) -> Result<usize, RuntimeError> {
    let wanted = programs(plan, key)?;
    wanted.first().map(|(i, _)| *i).ok_or(RuntimeError::NoProgram)
}

fn programs<'a>(plan: &'a Plan, named: Option<&str>) -> Result<Vec<(usize, &'a CudaProgram)>, RuntimeError> {
    let all = || plan.programs().map(|cuda| &cuda.program);
    if all().next().is_none() {
        return Err(RuntimeError::NoProgram);
    }
    let wanted: Vec<_> =
        all().enumerate().filter(|(_, program)| named.is_none_or(|key| program.gpu.key == key)).collect();
    match (wanted.is_empty(), named) {
        (true, Some(key)) => {
            let keys: Vec<&str> = all().map(|program| program.gpu.key.as_str()).collect();
            Err(RuntimeError::NoSuchProgram { key: key.to_owned(), known: keys.join(", ") })
        }
        _ => Ok(wanted),
    }
}

/// What fits best is the largest; `None` where it does not run.
fn rank(program: &CudaProgram, gpu: &Gpu) -> Option<(u32, bool, i64)> {
    let code = code_rank(&program.gpu.architecture, gpu.compute_capability)?;
    let fits = program.kernels.iter().all(|kernel| kernel.shared <= gpu.shared_bytes_per_block);
    let shaped_for = i64::from(program.gpu.multiprocessors);
    let is_one_wave = shaped_for <= i64::from(gpu.multiprocessors);
    fits.then_some((code, is_one_wave, if is_one_wave { shaped_for } else { -shaped_for }))
}

/// Machine code for exactly this version, machine code of the same generation by its version, PTX by its version.
fn code_rank(architecture: &str, (major, minor): (u32, u32)) -> Option<u32> {
    const PTX: u32 = 0;
    const MACHINE_CODE: u32 = 10_000;
    let number = |digits: &str| digits.parse::<u32>().ok();
    if let Some(digits) = architecture.strip_prefix("compute_") {
        return number(digits).filter(|version| *version <= major * 10 + minor).map(|version| PTX + version);
    }
    let digits = architecture.strip_prefix("sm_")?;
    if digits == format!("{major}{minor}a") {
        return Some(u32::MAX);
    }
    let runs = |version: &u32| version / 10 == major && version % 10 <= minor;
    number(digits).filter(runs).map(|version| MACHINE_CODE + version)
}

fn listed<'a>(programs: impl Iterator<Item = &'a CudaProgram>) -> String {
    programs.map(|program| program.gpu.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support;

    /// A plan with a program for each of these architectures and numbers of SMs.
    fn plan_for(gpus: &[(&str, u32)]) -> Plan {
        let mut plan = support::plan();
        let original = plan.cuda.take().unwrap();
        for (architecture, multiprocessors) in gpus {
            let mut cuda = original.clone();
            cuda.program.gpu.key = format!("{architecture}-{multiprocessors}");
            cuda.program.gpu.name = "A GPU".into();
            cuda.program.gpu.architecture = architecture.to_string();
            cuda.program.gpu.multiprocessors = *multiprocessors;
            plan.others.push(cuda);
        }
        plan.cuda = Some(plan.others.remove(0));
        plan
    }

    fn gpu(compute_capability: (u32, u32), multiprocessors: u32) -> Gpu {
        Gpu { compute_capability, multiprocessors, ..Gpu::unknown("Some GPU") }
    }

    /// The key of the program that is taken.
    fn taken(gpus: &[(&str, u32)], gpu: &Gpu) -> Result<String, RuntimeError> {
        let mut plan = plan_for(gpus);
        plan.choose(choose(&plan, gpu, None)?);
        assert!(plan.others.is_empty());
        Ok(plan.cuda.unwrap().program.gpu.key)
    }

    #[test]
    fn a_gpu_takes_the_code_that_is_nearest_to_it() {
        let all = [("sm_80", 108), ("sm_89", 128), ("sm_90a", 132), ("sm_120a", 170), ("compute_80", 108)];
        for (version, expected) in [
            ((8, 0), "sm_80-108"),
            ((8, 6), "sm_80-108"),
            ((8, 9), "sm_89-128"),
            ((9, 0), "sm_90a-132"),
            ((10, 0), "compute_80-108"),
            ((12, 0), "sm_120a-170"),
            ((12, 1), "compute_80-108"),
        ] {
            assert_eq!(taken(&all, &gpu(version, 132)).unwrap(), expected, "{version:?}");
        }
        assert_eq!(taken(&[("sm_90", 1), ("sm_90a", 1)], &gpu((9, 0), 1)).unwrap(), "sm_90a-1");
        assert_eq!(taken(&[("sm_90", 1)], &gpu((9, 0), 1)).unwrap(), "sm_90-1");
    }

    #[test]
    fn of_one_architecture_the_most_sms_that_are_there_decide() {
        let three = [("sm_90a", 132), ("sm_90a", 112), ("sm_90a", 128)];
        for (there, expected) in [(132, 132), (140, 132), (131, 128), (128, 128), (120, 112), (60, 112)] {
            let key = taken(&three, &gpu((9, 0), there)).unwrap();
            assert_eq!(key, format!("sm_90a-{expected}"), "{there} SMs");
        }
        let plan = plan_for(&three);
        assert_eq!(choose(&plan, &gpu((9, 0), 132), Some("sm_90a-112")).unwrap(), 1);
        assert_eq!(named(&plan, Some("sm_90a-128")).unwrap(), 2);
        assert_eq!(named(&plan, None).unwrap(), 0);
        let error = choose(&plan, &gpu((9, 0), 132), Some("h200")).unwrap_err().to_string();
        assert_eq!(error, "the plan has no program for `h200`; it has sm_90a-132, sm_90a-112, sm_90a-128");
    }

    #[test]
    fn a_block_that_wants_more_shared_memory_than_there_is_does_not_run() {
        let mut plan = plan_for(&[("sm_80", 108), ("compute_80", 108)]);
        let small = Gpu { shared_bytes_per_block: 99 << 10, ..gpu((8, 6), 82) };
        assert_eq!(choose(&plan, &small, None).unwrap(), 0);
        plan.cuda.as_mut().unwrap().program.kernels[0].shared = 160 << 10;
        assert_eq!(choose(&plan, &small, None).unwrap(), 1);
        assert_eq!(choose(&plan, &gpu((8, 0), 108), None).unwrap(), 0);
    }

    #[test]
    fn code_for_another_gpu_is_refused_by_name() {
        for (architecture, version) in
            [("sm_89", (9, 0)), ("sm_90a", (9, 1)), ("sm_89", (8, 6)), ("sm_x", (9, 0)), ("compute_80", (7, 5))]
        {
            let error = taken(&[(architecture, 100)], &gpu(version, 100)).unwrap_err();
            assert!(matches!(error, RuntimeError::Architecture { .. }), "{architecture} {version:?}");
        }
        assert_eq!(
            taken(&[("sm_80", 108), ("sm_89", 128)], &gpu((9, 0), 132)).unwrap_err().to_string(),
            "Some GPU (sm_90, 132 SMs, 227 KiB of shared memory a block) runs none of the plan's programs, which are for \
             A GPU (sm_80, 108 SMs), A GPU (sm_89, 128 SMs): compile it again for this GPU, or with --arch compute_80"
        );
        let cpu = support::cpu_plan();
        assert!(matches!(choose(&cpu, &gpu((9, 0), 132), None), Err(RuntimeError::NoProgram)));
    }
}
