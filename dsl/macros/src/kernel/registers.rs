//! `#[registers]`: a plain struct of value types in, the same struct and its C++ text out.

use super::errors::Errors;
use super::expand::source_text;
use super::heads::documentation;
use super::rows::param_row;
use super::types::{KernelType, Structs, Types};
use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Field, Fields, Ident, ItemStruct};

pub fn registers(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand_struct("registers", attribute, item, items)
}

/// What the attributes of structs share: the item that is read, and the refusals behind what comes of it.
pub fn expand_struct(
    name: &str,
    attribute: TokenStream,
    item: TokenStream,
    items: impl FnOnce(&ItemStruct, &Errors) -> TokenStream,
) -> TokenStream {
    let errors = Errors::default();
    let parsed = match syn::parse2::<ItemStruct>(item.clone()) {
        Ok(parsed) => parsed,
        Err(error) => {
            let error = error.to_compile_error();
            return quote!(#item #error);
        }
    };
    if !attribute.is_empty() {
        errors.refuse(&attribute, format!("#[{name}] takes no arguments"));
    }
    let items = items(&parsed, &errors);
    let errors = errors.into_compile_errors();
    quote!(#items #errors)
}

/// The fields of a struct that must have named ones.
pub fn named_fields<'a>(item: &'a ItemStruct, rule: &str, errors: &Errors) -> Vec<(&'a Ident, &'a Field)> {
    match &item.fields {
        Fields::Named(named) if !named.named.is_empty() => {
            named.named.iter().filter_map(|field| Some((field.ident.as_ref()?, field))).collect()
        }
        _ => {
            errors.refuse(&item.ident, rule);
            Vec::new()
        }
    }
}

fn items(item: &ItemStruct, errors: &Errors) -> TokenStream {
    if !item.generics.params.is_empty() {
        errors.refuse(&item.generics, "a struct of registers has no parameters");
    }
    let rule = "a struct of registers has named fields: `struct Unit { codes: U32x4, side: u32 }`";
    let named = named_fields(item, rule, errors);
    let structs = Structs::default();
    let types = Types { parameters: &[], structs: &structs, errors };
    let mut text = comments(&item.attrs, "");
    text += &format!("struct {} {{\n", item.ident);
    let mut rows = Vec::new();
    for (name, field) in &named {
        let Some(ty) = types.value(&field.ty) else { continue };
        rows.push(param_row(&name.to_string(), &KernelType::Value(ty.clone())));
        text += &comments(&field.attrs, "    ");
        text += &format!("    {ty} {name};\n");
    }
    text += "};\n";
    let name = &item.ident;
    if errors.any() {
        return quote!(#item);
    }
    let (spelled, source) = (name.to_string(), source_text(item, &item.attrs));
    let doc = documentation(&item.attrs).join("\n");
    let fields: Vec<_> = named.iter().map(|(name, _)| name).collect();
    let field_types: Vec<_> = named.iter().map(|(_, field)| &field.ty).collect();
    let nested = structs.types();
    quote! {
        #[derive(Clone, Copy, Debug, PartialEq)]
        #item

        impl #name {
            /// All fields zero.
            #[allow(dead_code)]
            pub const ZERO: Self = <Self as ::gemma4c_dsl::sim::Value>::ZERO;
        }

        impl ::gemma4c_dsl::sim::Value for #name {
            const ZERO: Self = Self { #(#fields: <#field_types as ::gemma4c_dsl::sim::Value>::ZERO),* };
            const WORDS: usize = 0 #(+ <#field_types as ::gemma4c_dsl::sim::Value>::WORDS)*;

            fn put(self, words: &mut ::gemma4c_dsl::sim::Words) {
                #(::gemma4c_dsl::sim::Value::put(self.#fields, words);)*
            }

            fn take(words: &mut &[::gemma4c_dsl::sim::Word4]) -> Self {
                #(let #fields = ::gemma4c_dsl::sim::Value::take(words);)*
                Self { #(#fields),* }
            }
        }

        impl ::gemma4c_dsl::Registers for #name {}

        impl ::gemma4c_dsl::Struct for #name {
            const DEF: &'static ::gemma4c_dsl::StructDef = {
                static DEF: ::gemma4c_dsl::StructDef = ::gemma4c_dsl::StructDef {
                    name: #spelled,
                    doc: #doc,
                    fields: &[#(#rows),*],
                    types: &[],
                    kind: ::gemma4c_dsl::StructKind::Registers,
                    callees: &[#(<#nested as ::gemma4c_dsl::Struct>::callee),*],
                    cuda: #text,
                    rust: #source,
                };
                &DEF
            };
        }
    }
}

pub fn comments(attributes: &[Attribute], indent: &str) -> String {
    documentation(attributes).iter().map(|line| format!("{indent}// {line}").trim_end().to_string() + "\n").collect()
}
