//! Gives freed memory back to the system when a server has nothing to do.
//!
//! glibc keeps what was freed between blocks that are still in use, and asks for more in every thread's own arena: a
//! storm of requests would leave a server as large as it was at its peak. `malloc_trim` returns every whole page that
//! is free, in all arenas.

use std::sync::Arc;
use std::time::Duration;

use crate::hand::Hand;

/// How long a server must have had nothing to do.
const QUIET: Duration = Duration::from_secs(1);

/// Returns memory each time the server has come to rest.
pub async fn give_back_at_rest(hand: Arc<Hand>) {
    loop {
        hand.has_come_to_rest().await;
        tokio::time::sleep(QUIET).await;
        if hand.requests() == 0 {
            _ = tokio::task::spawn_blocking(give_back).await;
        }
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
fn give_back() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: glibc's own function, which takes its locks itself and touches free memory alone.
    unsafe { malloc_trim(0) };
}

/// Other allocators give back by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_back() {}
