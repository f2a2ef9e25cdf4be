//! Programmatic dependent launch: a kernel that is launched `dependent` starts while its predecessor still runs.

use super::rows::intrinsic;
use crate::sim::FaultKind;
use crate::sim::thread::{Cause, Stop, StopScope, Thread};

intrinsic! {
    /// Waits until the predecessor's writes are visible. Every thread of a `dependent` kernel executes it, before it
    /// touches anything but weights and what its head says that it reads `early`.
    Grid fn grid_dependency_wait() {
        let thread = Thread::current();
        let link = &thread.launch().link;
        let what = || "its predecessor in the stream to end".to_string();
        let happened = || link.predecessor_is_complete();
        thread.wait_until(Cause::Predecessor, "grid_dependency_wait", thread.line(), what, happened);
        link.has_waited();
        thread.waited.set(true);
    }
    cuda "
#if __CUDA_ARCH__ >= 900
    asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");
#endif
"
}

intrinsic! {
    /// Lets the successor start. It still waits for this whole grid before it reads what this grid writes.
    Grid fn grid_launch_dependents() {
        let thread = Thread::current();
        let link = &thread.launch().link;
        if thread.launch().instance.def.launch.waits_first && !thread.waited.get() {
            let message = "lets its successor start before it has waited, which `waits_first` denies".to_string();
            thread.raise(FaultKind::MissingDependencyWait, thread.line(), message);
        }
        if !thread.block().released.replace(true) {
            link.releases(thread.waited.get());
        }
        if link.pauses {
            thread.suspend(Stop { scope: StopScope::Pause, operation: "grid_launch_dependents", line: thread.line() });
        }
    }
    cuda "
#if __CUDA_ARCH__ >= 900
    asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");
#endif
"
}

intrinsic! {
    /// What was asked for before this is asked for before what follows. Compilers move loads, of weights above all,
    /// past waits and barriers, to where they are used; that is a way to memory too late.
    Thread fn order_loads() {}
    cuda "
#if __CUDA_ARCH__ >= 900
    // ptxas moves no load past this instruction, executed or not. It is not: there is no GPU without SMs.
    u32 sms;
    asm(\"mov.u32 %0, %%nsmid;\" : \"=r\"(sms));
    if (sms == 0) asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");
#endif
"
}
