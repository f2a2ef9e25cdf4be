//! How long each launch of a run takes, and how long the run takes as a whole.
//!
//! Two measurements, because neither is enough. Replayed as usual, launches overlap, so none has a time of its own.
//! Serialised, with an event between each two, each has a time, but their sum is more than the whole. Both are CUDA
//! graphs, so the host is in neither. Stamped kernels tell of the first what the second cannot: when their blocks
//! started, waited and ended.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use gemma4c_plan::cuda::{PhaseKind, RECORD_WORDS, Range, Region};

use super::backend::Queued;
use super::stamps::{self, Chained};
use super::{CudaBackend, CudaError, Event, Graph};
use crate::RuntimeError;
use crate::backend::{Backend, Run};

/// Microseconds of a run.
#[derive(Clone, Debug)]
pub struct Profile {
    /// As it is replayed: the median.
    pub whole: f64,
    /// Each launch, after the one before it has ended: steps first, then the pick.
    pub launches: Vec<f64>,
    /// The same launches as their blocks saw them when the run was last replayed as usual; `None` for those whose
    /// kernels are not stamped, or keep no times so far back.
    pub chain: Vec<Option<Chained>>,
}

/// Replays that do not count.
const WARM_UP: usize = 3;

/// Back-to-back replays of decode in one measurement, as in generation. A prefill chunk is measured alone.
const IN_A_ROW: usize = 8;

impl CudaBackend {
    /// Measures a run as it would go now, with what lies in memory; the loop's state is afterwards as it was.
    pub fn profile(&mut self, run: Run, repeat: usize) -> Result<Profile, RuntimeError> {
        // What a pick changes: the records of the rows it picks for. A drafter's choice changes its own.
        let phase = self.program().phase(run.phase).ok_or(RuntimeError::NoSuchRun(run))?;
        let (program, kind, rows) = (self.program(), phase.kind, phase.rows as u64);
        let drafter = program.drafter.as_ref().filter(|_| run.phase == program.drafter_phase());
        let (offset, records) = match (drafter, kind) {
            (Some(drafter), _) => (drafter.places.record, 2),
            (None, PhaseKind::Decode) => (program.places.rows, rows),
            (None, PhaseKind::Prefill | PhaseKind::Tower) => (program.places.asked, 1),
        };
        let state = Range { region: Region::Arena, offset, bytes: records * RECORD_WORDS as u64 * 4 };
        let mut words = vec![0; state.bytes as usize];
        self.read(state, &mut words)?;
        let repeat = repeat.max(1);
        let mut whole = Vec::with_capacity(repeat);
        for i in 0..WARM_UP + repeat {
            self.write(state, &words)?;
            let time = self.time_whole(run)?;
            if i >= WARM_UP {
                whole.push(time);
            }
        }
        let chain = self.chain(run)?;
        let (graph, events) = self.build_apart(run)?;
        let mut launches = vec![Vec::with_capacity(repeat); events.len().saturating_sub(1)];
        for i in 0..WARM_UP + repeat {
            self.write(state, &words)?;
            replay(&graph)?;
            self.wait()?;
            if i >= WARM_UP {
                for (times, two) in launches.iter_mut().zip(events.windows(2)) {
                    times.push(f64::from(two[1].since(&two[0])?) * 1000.0);
                }
            }
        }
        self.write(state, &words)?;
        self.wait()?;
        Ok(Profile { whole: middle(whole), launches: launches.into_iter().map(middle).collect(), chain })
    }

    /// What stamped kernels have left of the last replay: the last launches of a kernel are the last of those that the
    /// run has of it.
    fn chain(&mut self, run: Run) -> Result<Vec<Option<Chained>>, RuntimeError> {
        self.wait()?;
        let launches = self.launches(run)?;
        let mut left: HashMap<u32, Vec<Chained>> = HashMap::new();
        for Queued { launch, .. } in &launches {
            if let Entry::Vacant(place) = left.entry(launch.kernel) {
                let words = stamps::read(&self.functions[launch.kernel as usize])?;
                place.insert(words.map_or(Vec::new(), |words| stamps::launches(&words)));
            }
        }
        let mut chain: Vec<_> = launches
            .iter()
            .rev()
            .map(|Queued { launch, .. }| {
                let found = left.get_mut(&launch.kernel)?.pop();
                found.filter(|found| found.blocks == launch.grid.iter().product::<u32>())
            })
            .collect();
        chain.reverse();
        Ok(chain)
    }

    fn time_whole(&mut self, run: Run) -> Result<f64, RuntimeError> {
        let device = self.device.clone();
        let decodes = self.program().phase(run.phase).is_some_and(|phase| phase.kind == PhaseKind::Decode);
        let count = if decodes { IN_A_ROW } else { 1 };
        let graph = self.graph(run).ok_or(RuntimeError::NoSuchRun(run))?;
        let all = device.time(|| (0..count).try_for_each(|_| replay(graph)))?;
        Ok(f64::from(all) * 1000.0 / count as f64)
    }

    /// The run with full dependencies (no PDL) and an event before, between and after its launches.
    fn build_apart(&self, run: Run) -> Result<(Graph, Vec<Event>), RuntimeError> {
        let launches = self.launches(run)?;
        let events = (0..=launches.len()).map(|_| self.device.event(true)).collect::<Result<Vec<_>, CudaError>>()?;
        let mut graph = self.device.graph()?;
        let mut last = graph.event(&events[0], &[])?;
        for (Queued { launch, .. }, event) in launches.iter().zip(&events[1..]) {
            let ran = self.add(&mut graph, launch, false, &[last])?;
            last = graph.event(event, &[ran])?;
        }
        Ok((graph.finish()?, events))
    }
}

#[allow(unsafe_code)]
fn replay(graph: &Graph) -> Result<(), CudaError> {
    // SAFETY: the graph was made of the backend's own launches, and the backend outlives it here.
    unsafe { graph.replay() }
}

/// The interquartile mean: event timestamps are coarse, so a median would only be one tick or the next.
fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let cut = times.len() / 4;
    let middle = &times[cut..times.len() - cut];
    middle.iter().sum::<f64>() / middle.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::middle;

    #[test]
    fn outliers_do_not_count() {
        assert_eq!(middle(vec![100.0, 2.0, 4.0, 0.0]), 3.0);
        assert_eq!(middle(vec![5.0]), 5.0);
        assert_eq!(middle(vec![1.0, 2.0]), 1.5);
    }
}
