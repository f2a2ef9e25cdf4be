//! The module that stands beside a kernel or a device function under its name: the definition, and structs with a field
//! for everything that an instance chooses and for every argument that a launch gives. A forgotten or misspelt one is
//! an error of rustc.
//!
//! Of the code around it the module needs the definition, and the structs that the function's head names.

use super::function::{Function, Param, Slot};
use super::types::{KernelType, outside};
use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, format_ident, quote};

/// The static that holds the definition, beside the function.
pub fn definition(function: &Ident) -> Ident {
    format_ident!("__{}_definition", function)
}

pub fn of_kernel(function: &Function, slots: &[Slot], refused: bool) -> TokenStream {
    let chosen = chosen(function, slots);
    // A refused parameter would be refused again in rustc's words.
    let arguments = if refused { TokenStream::new() } else { arguments(function, &function.params, true) };
    let keys = slot_keys(function, slots);
    let about = "The kernel's definition: what it takes, how it is launched, its CUDA text and its Rust meaning.";
    module(function, &quote!(::gemma4c_dsl::KernelDef), about, quote!(#chosen #arguments #keys))
}

/// `own`: the first of the parameters that are arguments when the function fills a slot, if it can fill one. A struct
/// among them is a view if the function says what a slot gives (`fills`); otherwise it may be a slot's value.
pub fn of_device(function: &Function, own: Option<usize>, fills: bool) -> TokenStream {
    let own = own.and_then(|first| function.params.get(first..)).unwrap_or_default();
    let launched = own.iter().all(|param| match &param.ty {
        ty if ty.is_struct() => fills,
        KernelType::Value(value) => matches!(value.as_str(), "u32" | "i32" | "u64" | "f32"),
        _ => true,
    });
    let arguments = if own.is_empty() || !launched { TokenStream::new() } else { arguments(function, own, false) };
    let items = quote! {
        #[doc(hidden)]
        pub fn callee() -> ::gemma4c_dsl::Callee {
            ::gemma4c_dsl::Callee::Device(DEF)
        }

        #arguments
    };
    module(function, &quote!(::gemma4c_dsl::DeviceDef), "The device function's definition.", items)
}

fn module(function: &Function, ty: &TokenStream, about: &str, items: TokenStream) -> TokenStream {
    let (vis, name) = (&function.item.vis, &function.item.sig.ident);
    let definition = definition(name);
    quote! {
        #[doc(hidden)]
        #[allow(dead_code, non_snake_case, non_upper_case_globals, clippy::module_inception, clippy::allow_attributes)]
        #vis mod #name {
            #[doc = #about]
            pub const DEF: &'static #ty = &super::#definition;

            #items
        }
    }
}

/// What an instance chooses.
fn chosen(function: &Function, slots: &[Slot]) -> TokenStream {
    let constants: Vec<_> = function.constants.iter().map(|constant| &constant.name).collect();
    let configs: Vec<_> = function.configs.iter().map(|config| &config.name).collect();
    let config_types = function.configs.iter().map(|config| &config.ty);
    let constant_types = function.constants.iter().map(|constant| &constant.rust);
    let constant_names = constants.iter().map(ToString::to_string);
    let types: Vec<_> = function.types.iter().map(|name| format_ident!("{name}")).collect();
    let type_names = &function.types;
    let slot_fields = slots.iter().map(|slot| {
        let name = &slot.name;
        match is_chain(slot) {
            true => quote!(pub #name: ::std::vec::Vec<&'static ::gemma4c_dsl::DeviceDef>),
            false => quote!(pub #name: &'static ::gemma4c_dsl::DeviceDef),
        }
    });
    let filled = slots.iter().map(|slot| {
        let (name, spelled) = (&slot.name, slot.name.to_string());
        match is_chain(slot) {
            true => quote!(.slot(#spelled, &self.#name)),
            false => quote!(.slot(#spelled, &[self.#name])),
        }
    });
    quote! {
        /// The compile-time parameters, the element types and the functions in the slots of an instance. A slot that
        /// may stay empty, or chain several functions, takes a list; any other one function.
        #[derive(Clone, Debug)]
        pub struct Chosen {
            #(pub #configs: super::#config_types,)*
            #(pub #constants: #constant_types,)*
            #(pub #types: ::gemma4c_dsl::ElementType,)*
            #(#slot_fields,)*
        }

        impl Chosen {
            pub fn build(self) -> ::core::result::Result<::gemma4c_dsl::Instance, ::gemma4c_dsl::InstanceError> {
                let builder = ::gemma4c_dsl::Instance::of(DEF);
                #(let builder = ::gemma4c_dsl::Config::choose(self.#configs, builder);)*
                builder
                    #(.constant(#constant_names, self.#constants))*
                    #(.element(#type_names, self.#types))*
                    #(#filled)*
                    .build()
            }
        }
    }
}

/// The slot maps its first value to another of the same type.
fn is_chain(slot: &Slot) -> bool {
    let output = slot.output.to_token_stream().to_string();
    slot.params.first().is_some_and(|(_, ty)| ty.to_token_stream().to_string() == output)
}

/// A struct with a field for every parameter, and how it becomes a list in launch order. Generic over what stands for
/// memory, if there is any memory.
fn arguments(function: &Function, params: &[Param], of_kernel: bool) -> TokenStream {
    let names: Vec<_> = params.iter().map(|param| &param.name).collect();
    let has_memory = params.iter().any(|param| matches!(param.ty, KernelType::Memory { .. }) || param.ty.is_struct());
    let generics = has_memory.then(|| quote!(<M>));
    let types = params.iter().map(|param| match &param.ty {
        KernelType::Memory { .. } => quote!(M),
        ty if ty.is_struct() => {
            let view = outside(&param.rust, &function.types);
            quote!(<super::#view as ::gemma4c_dsl::View>::Arguments<M>)
        }
        _ => param.rust.to_token_stream(),
    });
    let values = params.iter().map(|param| {
        let name = &param.name;
        match &param.ty {
            KernelType::Memory { .. } => quote!(values.push(::gemma4c_dsl::ArgumentValue::Memory(given.#name));),
            ty if ty.is_struct() => quote!(::gemma4c_dsl::ViewArguments::append_to(given.#name, &mut values);),
            _ => quote!(values.push(given.#name.into());),
        }
    });
    let (about, whole, with_slot) = match of_kernel {
        true => (
            "The arguments of a launch, less those of the functions in its slots.",
            quote!(LaunchArguments),
            quote! {
                impl #generics Arguments #generics {
                    /// Adds the arguments of the function that fills a slot.
                    pub fn with_slot<__Memory>(
                        self,
                        slot: ::gemma4c_dsl::SlotKey,
                        filled: impl ::core::convert::Into<::gemma4c_dsl::Filled<__Memory>>,
                    ) -> ::gemma4c_dsl::LaunchArguments<__Memory>
                    where
                        ::gemma4c_dsl::LaunchArguments<__Memory>: ::core::convert::From<Self>,
                    {
                        ::gemma4c_dsl::LaunchArguments::from(self).with_slot(slot, filled)
                    }
                }
            },
        ),
        false => ("The arguments of a launch that the function takes when it fills a slot.", quote!(Filled), quote!()),
    };
    quote! {
        #[doc = #about]
        #[derive(Clone, Debug)]
        pub struct Arguments #generics {
            #(pub #names: #types,)*
        }

        #with_slot

        impl<M> ::core::convert::From<Arguments #generics> for ::gemma4c_dsl::#whole<M> {
            fn from(given: Arguments #generics) -> Self {
                let mut values = ::std::vec::Vec::new();
                #(#values)*
                Self::new(DEF, values)
            }
        }
    }
}

/// `matvec::slot::side`: what a slot's arguments are given under.
fn slot_keys(function: &Function, slots: &[Slot]) -> TokenStream {
    if slots.is_empty() {
        return TokenStream::new();
    }
    let kernel = function.item.sig.ident.to_string();
    let keys = slots.iter().map(|slot| {
        let (name, spelled) = (&slot.name, slot.name.to_string());
        quote!(pub const #name: ::gemma4c_dsl::SlotKey = ::gemma4c_dsl::SlotKey { kernel: #kernel, slot: #spelled };)
    });
    quote! {
        /// The kernel's slots, to give arguments to what fills them.
        pub mod slot {
            #(#keys)*
        }
    }
}
