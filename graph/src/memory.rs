//! One arena for many values: lifetimes in, offsets out.
//!
//! First fit, largest value first, ties in the order given: simple, deterministic, and within a few per cent of the
//! densest moment on every model we have. The result is checked by [`overlap`], which shares no code with the search.

/// A value's lifetime in steps (first and last, inclusive) and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    pub first: usize,
    pub last: usize,
    pub bytes: u64,
}

/// Where each value lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    pub offsets: Vec<u64>,
    pub bytes: u64,
}

/// Every offset is a multiple of this: a cache line, and more than any vector load needs.
pub const ALIGNMENT: u64 = 256;

/// Gives each value a place.
pub fn place(lifetimes: &[Lifetime]) -> Arena {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(lifetimes[i].bytes), i));
    let mut offsets = vec![0u64; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for i in order {
        let life = lifetimes[i];
        let alive_together = |&&j: &&usize| lifetimes[j].first <= life.last && life.first <= lifetimes[j].last;
        let mut taken: Vec<(u64, u64)> =
            placed.iter().filter(alive_together).map(|&j| (offsets[j], offsets[j] + lifetimes[j].bytes)).collect();
        taken.sort_unstable();
        let mut offset = 0u64;
        for (start, end) in taken {
            if offset + life.bytes <= start {
                break;
            }
            offset = offset.max(end.next_multiple_of(ALIGNMENT));
        }
        offsets[i] = offset;
        total = total.max(offset + life.bytes);
        placed.push(i);
    }
    Arena { offsets, bytes: total.next_multiple_of(ALIGNMENT) }
}

/// The first two values that are alive together and share a byte, or lie outside the arena (then both are the same).
pub fn overlap(lifetimes: &[Lifetime], arena: &Arena) -> Option<(usize, usize)> {
    for (i, a) in lifetimes.iter().enumerate() {
        let (a_start, a_end) = (arena.offsets[i], arena.offsets[i] + a.bytes);
        if a_end > arena.bytes {
            return Some((i, i));
        }
        for (j, b) in lifetimes.iter().enumerate().skip(i + 1) {
            let (b_start, b_end) = (arena.offsets[j], arena.offsets[j] + b.bytes);
            let together_in_time = a.first.max(b.first) <= a.last.min(b.last);
            let together_in_space = a_start.max(b_start) < a_end.min(b_end);
            if together_in_time && together_in_space {
                return Some((i, j));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(first: usize, last: usize, bytes: u64) -> Lifetime {
        Lifetime { first, last, bytes }
    }

    #[test]
    fn values_that_never_meet_share_a_place() {
        let lives = [life(0, 1, 1000), life(1, 2, 1000), life(2, 3, 1000), life(3, 4, 1000)];
        let arena = place(&lives);
        assert_eq!(overlap(&lives, &arena), None);
        assert_eq!(arena.bytes, 2048);
    }

    #[test]
    fn the_checker_sees_an_overlap_and_an_overrun() {
        let lives = [life(0, 1, 100), life(1, 2, 100)];
        assert_eq!(overlap(&lives, &Arena { offsets: vec![0, 99], bytes: 256 }), Some((0, 1)));
        assert_eq!(overlap(&lives, &Arena { offsets: vec![0, 200], bytes: 256 }), Some((1, 1)));
    }

    #[test]
    fn a_thousand_random_lifetimes_never_overlap() {
        let mut state = 1u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..1000 {
            let lives: Vec<Lifetime> = (0..next(40) + 1)
                .map(|_| {
                    let first = next(30) as usize;
                    life(first, first + next(8) as usize, next(5000))
                })
                .collect();
            let arena = place(&lives);
            assert_eq!(overlap(&lives, &arena), None, "{lives:?}");
        }
    }
}
