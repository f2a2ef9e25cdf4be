//! Reports on plans and models, for people and for programs: texts, JSON, a page, and the difference of two plans.
//!
//! Everything here is derived from a plan or a model file and from nothing else, so that what is shown is what will
//! run. [`facts`] is the one place where a plan is counted; the others only phrase what it found.

pub mod adapter;
pub mod cpu;
pub mod diff;
pub mod facts;
pub mod file;
pub mod fold;
pub mod html;
pub mod json;
pub mod labels;
pub mod model;
pub mod text;
pub mod units;
pub mod weights;
