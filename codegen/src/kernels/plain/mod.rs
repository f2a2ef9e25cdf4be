//! Every operation of a graph on its own, plainly, in f32, for any number of rows: what a plan is made of where nothing is
//! fused, and what fused kernels are held against in a whole model.
//!
//! Weights are read as they lie in the file ([`super::values`]), and nothing is rounded to int8 or bf16 on the way. Operations
//! that have such a kernel already are not here: the gather, the norm (`norm::plain`, a group a row) and attention
//! (`attention::plain`).
//!
//! The kernels start before their predecessor ends, as everything in the chain of a token does. They compute every row of the
//! grid; rows beyond those in use hold numbers that nobody reads. Where a row's input is a place in memory (an expert, a
//! position of the cache), rows beyond `state[1]` are left alone.

pub mod experts;
pub mod map;
pub mod product;
pub mod rope;
pub mod rows;

use gemma4c_dsl::{ElementType, Instance, InstanceError};

use super::shapes::MODELS;

pub fn instances() -> Vec<(String, Instance)> {
    build_instances().expect("every choice is a block")
}

fn build_instances() -> Result<Vec<(String, Instance)>, InstanceError> {
    let mut named = map::instances()?;
    let any = |label: &str, instance| (label.to_owned(), instance);
    named.push(any("any width", rows::take()?));
    named.push(any("any heads", rope::rotation()?));
    for cache in [ElementType::F16, ElementType::BF16, ElementType::F32] {
        named.push((format!("{} cache", cache.name().to_lowercase()), rows::store(cache)?));
    }
    for experts in MODELS.iter().filter_map(|model| model.experts) {
        let label = format!("{} of {}", experts.top, experts.count);
        named.push((label, experts::choice(experts.count, experts.top)?));
    }
    named.push(any("any experts", experts::sum(false)?));
    named.push(any("any experts, scaled", experts::sum(true)?));
    for dtype in gemma4c_blocks::DType::ALL {
        named.push((dtype.to_string(), product::instance(dtype)?));
        named.push((dtype.to_string(), experts::product(dtype)?));
    }
    Ok(named)
}
