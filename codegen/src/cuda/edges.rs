//! Which steps of a phase wait for which.
//!
//! What a step must wait for follows from the memory that steps read and write (`gemma4c_plan::hazards`). In decode that is the step before
//! it, always. In prefill a few steps could run beside their predecessor, most of them those that sort rows by expert. They wait for it
//! all the same: a launch of prefill fills the GPU, so that two at once only take turns, and a fork and a join have full edges where the chain
//! has programmatic ones. A chain covers every need: a step runs after its predecessor has ended, which had waited likewise. The
//! reader of a plan does not take that on trust.

use gemma4c_plan::cuda::CudaStep;

/// Gives every step its edges.
pub fn connect(steps: &mut [CudaStep]) {
    for (at, step) in steps.iter_mut().enumerate() {
        step.after = at.checked_sub(1).map(|before| before as u32).into_iter().collect();
    }
}
