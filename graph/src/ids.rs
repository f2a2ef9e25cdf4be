//! The numbers that nodes, weights and caches go by: places in the vectors of a graph.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id!(
    /// A node, and its output value.
    NodeId
);
id!(
    /// A stored tensor.
    WeightId
);
id!(
    /// The keys and values of one layer.
    CacheId
);
