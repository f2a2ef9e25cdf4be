//! The orders in which a simulated launch can run.

/// The order in which threads and blocks get their turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Forward,
    Reverse,
    /// A new shuffle for every turn, from this state.
    Seeded(u64),
}

impl Order {
    /// The three orders every case runs under.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Reverse, Self::Seeded(0x9e37_79b9_7f4a_7c15)];

    pub(crate) fn arrange(&mut self, sequence: &mut [usize]) {
        match self {
            Self::Forward => sequence.sort_unstable(),
            Self::Reverse => sequence.sort_unstable_by(|a, b| b.cmp(a)),
            Self::Seeded(state) => {
                for last in (1..sequence.len()).rev() {
                    // splitmix64
                    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                    let mut z = *state;
                    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                    sequence.swap(last, ((z ^ (z >> 31)) % (last as u64 + 1)) as usize);
                }
            }
        }
    }
}
