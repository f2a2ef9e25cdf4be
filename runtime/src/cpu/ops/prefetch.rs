//! Software prefetch of weights.
//!
//! The hardware prefetcher fetches ahead, but not far, and not past the end of a page. With the decoding of each cache
//! line in between, the processor would wait for a third of the time.

/// How far ahead, in bytes: several times what memory delivers during its latency.
const AHEAD: usize = 4096;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches the bytes [`AHEAD`] of these. They may belong to another strip, or lie outside the tensor.
#[inline(always)]
pub fn fetch_ahead(bytes: &[u8]) {
    for line in bytes.chunks(LINE) {
        fetch(line.as_ptr().wrapping_add(AHEAD));
    }
}

#[inline(always)]
#[cfg(target_arch = "x86_64")]
fn fetch(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: it is a hint, which changes no value, and is ignored for an address that cannot be read.
    #[allow(unsafe_code)]
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
}

#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
fn fetch(_address: *const u8) {}
