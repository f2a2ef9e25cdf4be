//! `gemma4c kernels --check`: every case on one executor.

use std::time::{Duration, Instant};

use anyhow::Result;
use gemma4c_dsl::harness::{Case, Executor, Host, Simulator};
use gemma4c_dsl::sim::Order;

use super::Selection;
use super::gpu::Gpu;
use crate::commands::Outcome;
use crate::output::print;

/// Who runs the cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Where {
    /// The Rust function in the simulator, in three orders, every access checked.
    Sim,
    /// The CUDA text, compiled by this machine's C++ compiler.
    Host,
    /// The CUDA text, compiled by NVRTC, on the first GPU.
    Cuda,
}

/// What one family's cases came to.
#[derive(Default)]
struct Tally {
    cases: usize,
    passed: usize,
    time: Duration,
}

impl Tally {
    fn print(&self, name: &str) -> Result<()> {
        print(&format!("{name:16} {:>6} {:>7} {:>8.1}\n", self.cases, self.passed, self.time.as_secs_f64()))
    }
}

pub fn run(selection: &Selection, place: Where) -> Result<Outcome> {
    let mut families: Vec<(&str, Vec<Case>)> = selection
        .families
        .iter()
        .map(|(family, kernels)| {
            let cases = (family.cases)().into_iter().filter(|case| kernels.contains(&case.instance.def));
            (family.name, cases.collect())
        })
        .collect();
    match place {
        Where::Sim => {
            let orders = Order::ALL.map(Simulator);
            let executors: Vec<&dyn Executor> = orders.iter().map(|order| order as &dyn Executor).collect();
            check(&families, &executors, || false)
        }
        Where::Host => check(&families, &[&Host], || false),
        Where::Cuda => {
            let gpu = Gpu::open()?;
            eprintln!("{gpu}");
            for (name, cases) in &mut families {
                let all = cases.len();
                cases.retain(|case| gpu.can_run(&case.instance));
                if cases.len() < all {
                    eprintln!("{name}: {} cases left out, which need another architecture", all - cases.len());
                }
            }
            gpu.compile_ahead(families.iter().flat_map(|(_, cases)| cases).map(|case| &case.instance))?;
            check(&families, &[&gpu], || gpu.is_lost())
        }
    }
}

fn check(families: &[(&str, Vec<Case>)], executors: &[&dyn Executor], is_lost: impl Fn() -> bool) -> Result<Outcome> {
    print(&format!("{:16} {:>6} {:>7} {:>8}\n", "family", "cases", "passed", "seconds"))?;
    let mut all = Tally::default();
    for (name, cases) in families {
        let started = Instant::now();
        let mut tally = Tally { cases: cases.len(), ..Tally::default() };
        for case in cases {
            match executors.iter().try_for_each(|executor| case.check_on(*executor)) {
                Ok(()) => tally.passed += 1,
                Err(error) => {
                    eprintln!("FAILED: {error}");
                    // An access outside of all memory ends the context: whatever ran now would fail for this case's
                    // fault.
                    anyhow::ensure!(!is_lost(), "the GPU accepts no more work after case `{}`", case.name);
                }
            }
        }
        tally.time = started.elapsed();
        tally.print(name)?;
        all = Tally { cases: all.cases + tally.cases, passed: all.passed + tally.passed, time: all.time + tally.time };
    }
    all.print("all")?;
    Ok(if all.passed == all.cases { Outcome::Done } else { Outcome::CheckFailed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gemma4c_codegen::cases::probe;
    use gemma4c_dsl::harness::{CaseError, Data};

    /// The simulator, with one bit wrong.
    struct Liar;

    impl Executor for Liar {
        fn name(&self) -> String {
            "liar".into()
        }

        fn run(&self, case: &Case) -> Result<Vec<Option<Data>>, CaseError> {
            let flip = |data: Data| {
                let mut bytes = data.bytes().to_vec();
                bytes[0] ^= 1;
                Data::new(data.ty(), bytes)
            };
            Ok(Simulator(Order::Forward).run(case)?.into_iter().map(|data| data.map(flip)).collect())
        }
    }

    #[test]
    fn a_wrong_bit_fails_the_check_and_a_lost_gpu_ends_it() {
        let families = [("probe", probe::cases())];
        let forward = Simulator(Order::Forward);
        assert!(matches!(check(&families, &[&forward], || true), Ok(Outcome::Done)));
        assert!(matches!(check(&families, &[&forward, &Liar], || false), Ok(Outcome::CheckFailed)));
        let lost = check(&families, &[&Liar], || true).err().map(|error| error.to_string());
        assert!(lost.is_some_and(|error| error.contains(&families[0].1[0].name)));
    }
}
