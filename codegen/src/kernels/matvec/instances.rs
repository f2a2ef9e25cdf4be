//! The products of the five models, and the types they come in: which instances there are.
//!
//! A product's number of outputs is a launch parameter, but decides how the product is spread over a GPU. Many come out the
//! same; each instance is listed once, under the first product that needs it.

use std::collections::BTreeSet;

use gemma4c_blocks::DType;
use gemma4c_dsl::Instance;

use super::formats::format;
use super::{Product, Prologue, slots};
use crate::kernels::shapes::{E4B, Heads, MODELS, Model, VOCABULARY};
use crate::measured::H200;

/// What a matrix does in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Queries, keys and values as one matrix; without those that the layer does not have.
    Qkv,
    /// Queries and keys, where values are of another type.
    Qk,
    /// Those values.
    V,
    AttentionOut,
    GateUp,
    Down,
    PerLayerGate,
    PerLayerProjection,
    /// Of the embedding, for all layers at once.
    PerLayerModel,
    Head,
}

/// Types of the common files: any matrix may have them.
const COMMON: [DType; 4] = [DType::Q8_0, DType::Q4_0, DType::Q4K, DType::Q6K];

/// Whether plans use matrices of that type in that role. Types that are rare are listed for one model, in the roles that take
/// most of its time.
fn is_used(dtype: DType, role: Role, model: &Model) -> bool {
    let common = COMMON.contains(&dtype);
    match role {
        // Files of 4 bits keep some layers' values at 6.
        Role::Qk => dtype == DType::Q4K,
        Role::V => dtype == DType::Q6K,
        // Most files leave the two small ones in f32, and the projection for all layers as it was trained.
        Role::PerLayerGate | Role::PerLayerProjection => {
            common || matches!(dtype, DType::F32 | DType::Q5K | DType::BF16)
        }
        Role::PerLayerModel => matches!(dtype, DType::BF16 | DType::F16 | DType::Q4_0),
        // What does not divide by 256 falls back to a type of shorter blocks.
        Role::Down if model.hidden.iter().any(|hidden| hidden % 256 != 0) => {
            common || matches!(dtype, DType::Q5_0 | DType::Q5_1 | DType::IQ4NL)
        }
        Role::GateUp | Role::Down => common || std::ptr::eq(model, &E4B),
        Role::Qkv | Role::AttentionOut | Role::Head => common || (dtype == DType::BF16 && std::ptr::eq(model, &E4B)),
    }
}

/// A model's products in one type, each with its role and its name.
fn products(model: &Model, dtype: DType) -> Vec<(Role, String, Product)> {
    let width = model.width;
    let product = |outputs, k, prologue| Product::new(dtype, outputs, k, prologue);
    let made_before = if format(dtype).integer { Prologue::Int8 } else { Prologue::Plain };
    let mut all = Vec::new();
    for (kind, Heads { kv, dim, values_are_keys }) in model.kinds() {
        let (q, kv) = (model.q_heads * dim, kv * dim);
        let mut input = |role, name, outputs| {
            // The layer before ends here.
            let branches = model.experts.is_some();
            let product = Product { scaled: true, branches, ..product(outputs, width, Prologue::ResidualNorm) };
            all.push((role, format!("{name}, {kind}"), product));
        };
        if values_are_keys {
            input(Role::Qkv, "q and k", q + kv);
        } else {
            input(Role::Qkv, "q, k and v", q + 2 * kv);
            input(Role::Qk, "q and k", q + kv);
            input(Role::V, "v", kv);
        }
        if model.shares_kv {
            input(Role::Qkv, "q", q);
        }
        all.push((Role::AttentionOut, format!("attention out, {kind}"), product(width, q, Prologue::Plain)));
    }
    for &hidden in model.hidden {
        let gate_up = Product { geglu: true, ..product(hidden, width, Prologue::ResidualNorm) };
        all.push((Role::GateUp, format!("gate and up of {hidden}"), gate_up));
        all.push((Role::Down, format!("down of {hidden}"), product(width, hidden, made_before)));
    }
    if let Some(dim) = model.per_layer {
        let epilogue = vec![slots::then_gelu::DEF, slots::then_times::DEF];
        let gate = Product { epilogue, ..product(dim, width, Prologue::Residual) };
        let of_all_layers = product(dim * model.layers, width, Prologue::Plain);
        all.push((Role::PerLayerGate, "per-layer gate".to_owned(), gate));
        all.push((Role::PerLayerProjection, "per-layer projection".to_owned(), product(width, dim, Prologue::Plain)));
        all.push((Role::PerLayerModel, "projection for all layers".to_owned(), of_all_layers));
    }
    let stream = product(VOCABULARY, width, Prologue::ResidualNorm);
    let branches = model.experts.is_some();
    let head = Product { scaled: true, branches, epilogue: vec![slots::then_softcap::DEF], ..stream };
    all.push((Role::Head, "head".to_owned(), head));
    all
}

/// The instances that plans of the five models use, and the plain kernel in every type.
pub fn instances() -> Vec<(String, Instance)> {
    let (mut named, mut seen) = (Vec::new(), BTreeSet::new());
    for dtype in DType::ALL {
        for model in MODELS {
            for (role, name, product) in products(model, dtype) {
                // Rows are whole blocks.
                if dtype.row_bytes(u64::from(product.k)).is_none() || !is_used(dtype, role, model) {
                    continue;
                }
                let instance = product.instance(product.shape_on(Some(&H200))).expect("shapes fit the kernel");
                if seen.insert(instance.to_string()) {
                    named.push((format!("{dtype}, {} {name}", model.name), instance));
                }
            }
        }
        let plain = Product::new(dtype, 256, 2560, Prologue::Plain).plain_instance();
        named.push((format!("{dtype}, plain"), plain.expect("shapes fit the kernel")));
    }
    named
}
