//! Programmatic dependent launch: a kernel that is launched `dependent` starts while its predecessor still runs.

use super::intrinsic;
use crate::sim::thread::Thread;

intrinsic! {
    /// Waits until the predecessor's writes are visible. Every thread of a `dependent` kernel executes it, before it touches
    /// anything but weights.
    Grid fn grid_dependency_wait() { Thread::current().waited.set(true); }
    cuda "
#if __CUDA_ARCH__ >= 900
    asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");
#endif
"
}

intrinsic! {
    /// Lets the successor start. It still waits for this whole grid before it reads what this grid writes.
    Grid fn grid_launch_dependents() {}
    cuda "
#if __CUDA_ARCH__ >= 900
    asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");
#endif
"
}
