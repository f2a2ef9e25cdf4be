//! `#[config]`: a plain struct of compile-time parameters in, the same struct out, and how an instance has its fields.
//! The CUDA text knows the fields alone.

use super::errors::Errors;
use super::registers::{expand_struct, named_fields};
use super::types::is_constant_type;
use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::ItemStruct;

pub fn config(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand_struct("config", attribute, item, items)
}

fn items(item: &ItemStruct, errors: &Errors) -> TokenStream {
    if !item.generics.params.is_empty() {
        errors.refuse(&item.generics, "a config has no parameters");
    }
    let named = named_fields(item, "a config has named fields: `struct Tile { ROWS: u32, PADDED: bool }`", errors);
    for (name, field) in &named {
        let spelled = name.to_string();
        if spelled != spelled.to_uppercase() {
            errors.refuse(
                name,
                format!("a config's field is a constant of the text: write `{}`", spelled.to_uppercase()),
            );
        }
        if !is_constant_type(&field.ty.to_token_stream().to_string()) {
            errors.refuse(&field.ty, "a compile-time parameter is `u32`, `i32`, `f32` or `bool`");
        }
    }
    if errors.any() {
        return quote!(#item);
    }
    let name = &item.ident;
    let fields: Vec<_> = named.iter().map(|(name, _)| name).collect();
    let spelled: Vec<_> = fields.iter().map(ToString::to_string).collect();
    let types = named.iter().map(|(_, field)| field.ty.to_token_stream().to_string());
    let (count, numbers) = (fields.len(), 0..fields.len());
    quote! {
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(non_snake_case)]
        #item

        impl ::gemma4c_dsl::Config for #name {
            const CONSTANTS: &'static [::gemma4c_dsl::ConstantDef] =
                &[#(::gemma4c_dsl::ConstantDef { name: #spelled, ty: #types }),*];

            fn choose(self, builder: ::gemma4c_dsl::InstanceBuilder) -> ::gemma4c_dsl::InstanceBuilder {
                builder #(.constant(#spelled, self.#fields))*
            }

            fn of_values(values: &::gemma4c_dsl::Values) -> Self {
                Self { #(#fields: values.constant(#spelled)),* }
            }

            #[inline]
            fn of_launch() -> Self {
                static NAMES: ::gemma4c_dsl::sim::ConstantNames = ::gemma4c_dsl::sim::ConstantNames::new(&[#(#spelled),*]);
                let values = ::gemma4c_dsl::sim::constants::<#count>(&NAMES);
                Self { #(#fields: ::gemma4c_dsl::sim::constant(values[#numbers], #spelled)),* }
            }
        }
    }
}
