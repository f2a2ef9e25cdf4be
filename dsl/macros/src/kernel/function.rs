//! What `#[kernel]` and `#[device]` read before the body: the attribute's launch contract and slots, and the function's
//! parameters, compile-time parameters (`const K: u32`, `const S: Shape`) and element-type parameters (`KV: Float`).

use super::errors::Errors;
use super::types::{KernelType, Role, Structs, Types, is_constant_type, is_struct_name};
use proc_macro2::Ident;
use quote::ToTokens;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Expr, FnArg, GenericParam, ItemFn, Pat, ReturnType, Token, Type};

/// `#[kernel(block = 256, min_blocks = 2, cluster = 8, dependent, waits_first, early(K > 1, state), only_reads(!OWN,
/// cache), dynamic_shared, slots(epilogue(value: f32, row: u32) -> f32))]`
#[derive(Default)]
pub struct Attribute {
    pub block: Option<Expr>,
    pub min_blocks: Option<Expr>,
    pub cluster: Option<Expr>,
    pub dependent: bool,
    pub waits_first: bool,
    pub early: Vec<Buffers>,
    pub only_reads: Option<Buffers>,
    pub dynamic_shared: bool,
    pub slots: Vec<Slot>,
}

/// Buffers of which something holds where a condition over compile-time parameters does.
pub struct Buffers {
    pub when: Expr,
    pub params: Vec<Buffer>,
}

/// `state`, or `kv.pages` of a view.
pub struct Buffer {
    pub param: Ident,
    pub field: Option<Ident>,
}

impl Buffer {
    /// As an instance names it.
    pub fn full_name(&self) -> String {
        self.field.as_ref().map_or_else(|| self.param.to_string(), |field| format!("{}_{field}", self.param))
    }
}

impl Parse for Buffer {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let param = input.parse()?;
        let field = if input.parse::<Option<Token![.]>>()?.is_some() { Some(input.parse()?) } else { None };
        Ok(Self { param, field })
    }
}

impl Parse for Buffers {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let content;
        syn::parenthesized!(content in input);
        let when = content.parse()?;
        content.parse::<Token![,]>()?;
        let params = Punctuated::<Buffer, Token![,]>::parse_terminated(&content)?;
        Ok(Self { when, params: params.into_iter().collect() })
    }
}

/// A named place that an instance fills with device functions.
pub struct Slot {
    pub name: Ident,
    pub params: Vec<(Ident, Type)>,
    pub output: Type,
}

impl Parse for Attribute {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut attribute = Self::default();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            match key.to_string().as_str() {
                "block" => {
                    input.parse::<Token![=]>()?;
                    attribute.block = Some(input.parse()?);
                }
                "min_blocks" => {
                    input.parse::<Token![=]>()?;
                    attribute.min_blocks = Some(input.parse()?);
                }
                "cluster" => {
                    input.parse::<Token![=]>()?;
                    attribute.cluster = Some(input.parse()?);
                }
                "dependent" => attribute.dependent = true,
                "waits_first" => attribute.waits_first = true,
                "early" => attribute.early.push(input.parse()?),
                "only_reads" => attribute.only_reads = Some(input.parse()?),
                "dynamic_shared" => attribute.dynamic_shared = true,
                "slots" => attribute.slots = parse_slots(input)?,
                other => {
                    return Err(syn::Error::new(
                        key.span(),
                        format!(
                            "unknown key `{other}`: #[kernel] takes `block = N`, `min_blocks = N`, `cluster = N`, \
                             `dependent`, `waits_first`, `early(CONDITION, a, …)`, \
                             `only_reads(CONDITION, a, …)`, `dynamic_shared` and \
                             `slots(name(a: T, …) -> T)`"
                        ),
                    ));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(attribute)
    }
}

/// `(name(a: T, …) -> T, …)`
fn parse_slots(input: ParseStream) -> syn::Result<Vec<Slot>> {
    let content;
    syn::parenthesized!(content in input);
    Ok(Punctuated::<Slot, Token![,]>::parse_terminated(&content)?.into_iter().collect())
}

/// `#[device(fills(value, row))]`, `#[device(slots(side(unit: u32) -> U32x4))]`, `#[device(thin)]`,
/// `#[device(thin(other))]`
#[derive(Default)]
pub struct DeviceAttribute {
    /// The parameters that a slot gives.
    pub fills: Option<Vec<Ident>>,
    /// What the caller fills: its arguments stand before the others.
    pub slots: Vec<Slot>,
    /// In a slot it makes the instance thin.
    pub thin: bool,
    /// What stands for it in thin instances.
    pub instead: Option<Ident>,
}

impl Parse for DeviceAttribute {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut attribute = Self::default();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            match key.to_string().as_str() {
                "fills" => {
                    let content;
                    syn::parenthesized!(content in input);
                    let names = Punctuated::<Ident, Token![,]>::parse_terminated(&content)?;
                    attribute.fills = Some(names.into_iter().collect());
                }
                "slots" => attribute.slots = parse_slots(input)?,
                "thin" if input.peek(syn::token::Paren) => {
                    let content;
                    syn::parenthesized!(content in input);
                    attribute.instead = Some(content.parse()?);
                }
                "thin" => attribute.thin = true,
                other => {
                    return Err(syn::Error::new(
                        key.span(),
                        format!(
                            "unknown key `{other}`: #[device] takes `fills(a, b)`, the parameters that a slot gives, \
                             `slots(name(a: T, …) -> T)`, which the caller fills, `thin`, for what fills a \
                             slot with units of 8 bytes, and `thin(other)`, what stands for it then"
                        ),
                    ));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(attribute)
    }
}

impl Parse for Slot {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let name = input.parse()?;
        let content;
        syn::parenthesized!(content in input);
        let mut params = Vec::new();
        while !content.is_empty() {
            let param: Ident = content.parse()?;
            content.parse::<Token![:]>()?;
            params.push((param, content.parse()?));
            if !content.is_empty() {
                content.parse::<Token![,]>()?;
            }
        }
        input.parse::<Token![->]>()?;
        Ok(Self { name, params, output: input.parse()? })
    }
}

pub struct Param {
    pub name: Ident,
    pub rust: Type,
    pub ty: KernelType,
    /// The body may change it.
    pub mutable: bool,
}

pub struct Constant {
    pub name: Ident,
    pub rust: Type,
    pub ty: String,
}

/// `const S: AttentionShape`: a `#[config]` struct.
pub struct ConfigParam {
    pub name: Ident,
    pub ty: Ident,
}

/// A function as read: everything but its body.
pub struct Function<'a> {
    pub item: &'a ItemFn,
    pub params: Vec<Param>,
    pub configs: Vec<ConfigParam>,
    pub constants: Vec<Constant>,
    /// Element-type parameters, by name.
    pub types: Vec<String>,
    pub output: KernelType,
}

impl<'a> Function<'a> {
    pub fn read(item: &'a ItemFn, structs: &Structs, errors: &Errors) -> Self {
        let signature = &item.sig;
        refuse_modifiers(item, errors);
        let (mut constants, mut configs) = (Vec::new(), Vec::new());
        let mut types = Vec::new();
        for parameter in &signature.generics.params {
            match parameter {
                GenericParam::Const(constant) => match constant.ty.to_token_stream().to_string().as_str() {
                    ty if is_constant_type(ty) => constants.push(Constant {
                        name: constant.ident.clone(),
                        rust: constant.ty.clone(),
                        ty: ty.to_string(),
                    }),
                    ty if is_struct_name(ty) => {
                        let ty = Ident::new(ty, constant.ty.span());
                        configs.push(ConfigParam { name: constant.ident.clone(), ty });
                    }
                    _ => errors.refuse(
                        &constant.ty,
                        "a compile-time parameter is `u32`, `i32`, `f32`, `bool` or a `#[config]` struct of these",
                    ),
                },
                GenericParam::Type(ty) => {
                    if ty.bounds.to_token_stream().to_string() != "Float" {
                        errors.refuse(ty, "an element-type parameter is bound by `Float` alone (f32, F16 or BF16)");
                    }
                    types.push(ty.ident.to_string());
                }
                GenericParam::Lifetime(lifetime) => {
                    errors.refuse(lifetime, "lifetimes are not needed: memory handles carry none");
                }
            }
        }
        if let Some(clause) = &signature.generics.where_clause {
            errors.refuse(clause, "`where` is refused: write `KV: Float` in the parameter list");
        }
        let reader = Types { parameters: &types, structs, errors };
        let mut params = Vec::new();
        for input in &signature.inputs {
            match input {
                FnArg::Typed(typed) => match &*typed.pat {
                    Pat::Ident(name) if name.by_ref.is_none() && name.subpat.is_none() => {
                        if let Some(ty) = reader.read(&typed.ty) {
                            let mutable = name.mutability.is_some() || matches!(ty, KernelType::Reference { .. });
                            params.push(Param { name: name.ident.clone(), rust: (*typed.ty).clone(), ty, mutable });
                        }
                    }
                    pattern => errors.refuse(pattern, "a parameter is a plain name"),
                },
                FnArg::Receiver(receiver) => errors.refuse(receiver, "a kernel is a free function: no `self`"),
            }
        }
        let output = match &signature.output {
            ReturnType::Default => KernelType::Unit,
            ReturnType::Type(_, ty) => reader.read(ty).unwrap_or(KernelType::Unit),
        };
        Self { item, params, configs, constants, types, output }
    }

    /// The number of the first parameter that a launch gives when the function fills a slot: the one after those it
    /// says a slot gives, or the first memory handle.
    pub fn first_own_argument(&self, attribute: &DeviceAttribute, errors: &Errors) -> usize {
        let first_handle = self.params.iter().position(|param| matches!(param.ty, KernelType::Memory { .. }));
        let first_handle = first_handle.unwrap_or(self.params.len());
        let Some(fills) = &attribute.fills else { return first_handle };
        if let (Some(slot), Some(name)) = (attribute.slots.first(), fills.first()) {
            errors.refuse(name, format!("a function with a slot of its own, `{}`, cannot fill one", slot.name));
        }
        for (at, name) in fills.iter().enumerate() {
            if at >= first_handle || self.params[at].name != *name {
                errors.refuse(name, "`fills` names the first parameters in order, and a slot gives values, not memory");
            }
        }
        fills.len()
    }

    /// The rules that only a kernel has.
    pub fn check_kernel(&self, errors: &Errors) {
        if self.output != KernelType::Unit {
            errors.refuse(&self.item.sig.output, "a kernel returns nothing: write into an `Output<T>` parameter");
        }
        for param in &self.params {
            match &param.ty {
                KernelType::Value(value) if matches!(value.as_str(), "u32" | "i32" | "u64" | "f32") => {}
                KernelType::Memory { role: Role::Shared, .. } => errors.refuse(
                    &param.rust,
                    "shared memory is declared in the body: `let tile = shared::<f32>(N);`",
                ),
                KernelType::Memory { .. } => {}
                // A view: that a launch can give it is for rustc to check.
                ty if ty.is_struct() => {}
                _ => errors.refuse(
                    &param.rust,
                    "a kernel's parameter is `Weights<T>`, `Input<T>`, `Tiles<T>`, `Output<T>`, `InOut<T>`, a scalar u32, i32, u64, f32, or a `#[view]` struct of these",
                ),
            }
        }
    }
}

fn refuse_modifiers(item: &ItemFn, errors: &Errors) {
    let signature = &item.sig;
    if let Some(token) = &signature.asyncness {
        errors.refuse(token, "`async` is refused: a GPU thread runs to its end");
    }
    if let Some(token) = &signature.constness {
        errors.refuse(token, "`const fn` is refused: remove `const`");
    }
    if let Some(token) = &signature.abi {
        errors.refuse(token, "an ABI is refused: the macro chooses it");
    }
    if let Some(token) = &signature.variadic {
        errors.refuse(token, "variadic parameters are refused");
    }
}
