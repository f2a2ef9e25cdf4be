//! Adapters that requests choose: each has a name for clients, and a seat of its model's plan.
//!
//! A request names one in `model`, and gets the answer that it would get if the adapter were the server's only one.
//! Adapters are named when the server is started or loaded over HTTP, where that is switched on; what a client may name
//! is below folders that whoever started the server has opened for that.
//!
//! What an adapter is, and whether it fits, is somebody else's: here are names, seats, and who sits where.

mod asked;
mod folders;
mod loading;
mod name;
mod registry;
pub mod routes;

pub use asked::Asked;
pub use folders::Folders;
pub use name::check_name;
pub use registry::{Adapters, Listed, Named, SeatingError, Sitting};
