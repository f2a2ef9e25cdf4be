//! `#[view]`: a plain struct of memory handles and numbers in, the same struct and its C++ text out, and what the host
//! gives for it.

use super::errors::Errors;
use super::expand::source_text;
use super::heads::documentation;
use super::registers::{comments, expand_struct, named_fields};
use super::rows::param_row;
use super::types::{KernelType, Role, Structs, Types};
use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, format_ident, quote};
use syn::{GenericParam, ItemStruct, Type};

pub fn view(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand_struct("view", attribute, item, items)
}

struct ViewField<'a> {
    name: &'a Ident,
    rust: &'a Type,
    ty: KernelType,
}

impl ViewField<'_> {
    fn is_memory(&self) -> bool {
        matches!(self.ty, KernelType::Memory { .. })
    }

    /// A launch has no shared memory to give, and of numbers only these.
    fn is_launched(&self) -> bool {
        match &self.ty {
            KernelType::Memory { role, .. } => *role != Role::Shared,
            KernelType::Value(value) => matches!(value.as_str(), "u32" | "i32" | "u64" | "f32"),
            _ => false,
        }
    }
}

fn items(item: &ItemStruct, errors: &Errors) -> TokenStream {
    let types = element_types(item, errors);
    let structs = Structs::default();
    let reader = Types { parameters: &types, structs: &structs, errors };
    let rule = "a view has named fields: `struct KvView<KV: Float> { k: Input<KV>, capacity: u32 }`";
    let mut fields = Vec::new();
    for (name, field) in named_fields(item, rule, errors) {
        match reader.read(&field.ty) {
            Some(KernelType::Memory { role: Role::Tiles, .. }) => {
                errors.refuse(&field.ty, "tiles are a kernel's own parameter: they cannot be part of a view");
            }
            Some(ty @ (KernelType::Memory { .. } | KernelType::Value(_))) => {
                fields.push((ViewField { name, rust: &field.ty, ty }, &field.attrs));
            }
            Some(_) => {
                errors.refuse(&field.ty, "a view's field is a memory handle or a value: registers pass on their own")
            }
            None => {}
        }
    }
    if errors.any() {
        return quote!(#item);
    }
    let template = if types.is_empty() {
        String::new()
    } else {
        format!("template <{}>\n", types.iter().map(|ty| format!("class {ty}")).collect::<Vec<_>>().join(", "))
    };
    let mut text = format!("{}{template}struct {} {{\n", comments(&item.attrs, ""), item.ident);
    for (field, attributes) in &fields {
        text += &comments(attributes, "    ");
        text += &format!("    {};\n", field.ty.declare(&field.name.to_string()));
    }
    text += "};\n";
    let fields: Vec<_> = fields.into_iter().map(|(field, _)| field).collect();
    let is_launched = fields.iter().all(ViewField::is_launched);
    let definition = definition(item, &fields, &types, &structs, is_launched, &text);
    let launched = if is_launched { launched(item, &fields) } else { local(item) };
    quote! {
        #[derive(Clone, Copy)]
        #item
        #definition
        #launched
    }
}

fn element_types(item: &ItemStruct, errors: &Errors) -> Vec<String> {
    let mut types = Vec::new();
    for parameter in &item.generics.params {
        match parameter {
            GenericParam::Type(ty) if ty.bounds.to_token_stream().to_string() == "Float" => {
                types.push(ty.ident.to_string())
            }
            other => errors.refuse(other, "a view's parameters are element types: `KV: Float`"),
        }
    }
    types
}

fn definition(
    item: &ItemStruct,
    fields: &[ViewField<'_>],
    types: &[String],
    structs: &Structs,
    is_launched: bool,
    text: &str,
) -> TokenStream {
    let (name, spelled) = (&item.ident, item.ident.to_string());
    let (generics, arguments, _) = item.generics.split_for_impl();
    let rows = fields.iter().map(|field| param_row(&field.name.to_string(), &field.ty));
    let (doc, source) = (documentation(&item.attrs).join("\n"), source_text(item, &item.attrs));
    let kind = format_ident!("{}", if is_launched { "Launched" } else { "Local" });
    let nested = structs.types();
    quote! {
        impl #generics ::gemma4c_dsl::Struct for #name #arguments {
            const DEF: &'static ::gemma4c_dsl::StructDef = {
                static DEF: ::gemma4c_dsl::StructDef = ::gemma4c_dsl::StructDef {
                    name: #spelled,
                    doc: #doc,
                    fields: &[#(#rows),*],
                    types: &[#(#types),*],
                    kind: ::gemma4c_dsl::StructKind::#kind,
                    callees: &[#(<#nested as ::gemma4c_dsl::Struct>::callee),*],
                    cuda: #text,
                    rust: #source,
                };
                &DEF
            };
        }
    }
}

/// How a launch gives a view, and the struct that the host fills: `KvViewArguments`.
fn launched(item: &ItemStruct, fields: &[ViewField<'_>]) -> TokenStream {
    let (vis, name) = (&item.vis, &item.ident);
    let (generics, arguments, _) = item.generics.split_for_impl();
    let names: Vec<_> = fields.iter().map(|field| field.name).collect();
    let host = format_ident!("{name}Arguments");
    let about = format!("What the host gives for a [`{name}`].");
    let memory = fields.iter().any(ViewField::is_memory).then(|| quote!(<M>));
    let host_types = fields.iter().map(|field| {
        let rust = field.rust;
        if field.is_memory() { quote!(M) } else { quote!(#rust) }
    });
    let values = fields.iter().map(|field| {
        let name = field.name;
        if field.is_memory() {
            quote!(::gemma4c_dsl::ArgumentValue::Memory(self.#name))
        } else {
            quote!(self.#name.into())
        }
    });
    quote! {
        impl #generics ::gemma4c_dsl::sim::FromArgument for #name #arguments {
            fn from_argument(arguments: &::gemma4c_dsl::sim::InOrder<'_>) -> Self {
                Self { #(#names: arguments.next()),* }
            }
        }

        impl #generics ::gemma4c_dsl::sim::FromSlot for #name #arguments {
            fn from_slot(arguments: &::gemma4c_dsl::sim::SlotArguments<'_>) -> Self {
                Self { #(#names: arguments.next()),* }
            }
        }

        impl #generics ::gemma4c_dsl::View for #name #arguments {
            type Arguments<M> = #host #memory;
        }

        #[doc = #about]
        #[derive(Clone, Copy, Debug)]
        #vis struct #host #memory {
            #(pub #names: #host_types,)*
        }

        impl<M> ::gemma4c_dsl::ViewArguments<M> for #host #memory {
            fn append_to(self, arguments: &mut ::std::vec::Vec<::gemma4c_dsl::ArgumentValue<M>>) {
                arguments.extend([#(#values),*]);
            }
        }
    }
}

/// A view that a kernel makes for its device functions.
fn local(item: &ItemStruct) -> TokenStream {
    let name = &item.ident;
    let (generics, arguments, _) = item.generics.split_for_impl();
    quote! {
        impl #generics ::gemma4c_dsl::sim::FromSlot for #name #arguments {
            fn from_slot(_: &::gemma4c_dsl::sim::SlotArguments<'_>) -> Self {
                ::gemma4c_dsl::sim::not_in_a_slot()
            }
        }
    }
}
