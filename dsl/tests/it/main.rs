//! The tests of the kernel language, in one binary: what it means, what it prints, what it finds and what it refuses.

mod arguments;
mod bulk;
mod chain;
mod cluster;
mod faults;
mod intrinsics;
mod language;
mod matvec;
mod narrow;
mod parts;
mod parts_of_a_block;
mod reference;
mod refusals;
mod structs;
mod tensor;
mod thin;
mod tiles;
mod warpgroup;
