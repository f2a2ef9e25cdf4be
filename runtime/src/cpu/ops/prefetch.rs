//! Asks for weights before they are needed.
//!
//! A processor that streams through memory fetches ahead on its own, but not far, and not past the end of a page. Where each line is
//! also decoded that leaves it waiting for a third of the time.

/// How far ahead, in bytes: several times what memory delivers while a request is on its way.
const AHEAD: usize = 4096;

/// Bytes that are fetched together.
const LINE: usize = 64;

/// Fetches the bytes that lie [`AHEAD`] of these, which may be another strip's, or nobody's.
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
