//! The rows of a definition: what `DEF` says of parameters, constants, shared memory and slots, as constant expressions.
//! With structs in the head rustc puts the rows together, for the fields are its to know.

use super::function::{Buffer, Buffers, Function, Param, Slot};
use super::heads::KernelPart;
use super::printer::Body;
use super::types::{KernelType, Role, outside, type_arguments};
use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};

/// Variables for the compile-time parameters, inside a closure over the instance's values.
pub fn constant_bindings(function: &Function) -> TokenStream {
    let configs = function.configs.iter().map(|config| {
        let (name, ty) = (&config.name, &config.ty);
        quote!(let #name: #ty = <#ty as ::gemma4c_dsl::Config>::of_values(__values);)
    });
    let constants = function.constants.iter().map(|constant| {
        let (name, ty, text) = (&constant.name, &constant.rust, constant.name.to_string());
        quote!(let #name: #ty = __values.constant(#text);)
    });
    configs.chain(constants).collect()
}

/// A parameter or a field that is no struct.
pub fn param_row(name: &str, ty: &KernelType) -> TokenStream {
    let kind = match ty {
        KernelType::Memory { role, element } => {
            let access = format_ident!(
                "{}",
                match role {
                    Role::Weights => "Weights",
                    Role::Input => "Input",
                    Role::Tiles => "Tiles",
                    Role::Output => "Output",
                    Role::InOut => "InOut",
                    Role::Shared => "Shared",
                }
            );
            quote!(::gemma4c_dsl::ParamKind::Memory { access: ::gemma4c_dsl::Access::#access, element: #element })
        }
        KernelType::Value(value) => quote!(::gemma4c_dsl::ParamKind::Scalar(#value)),
        // Registers and references: parameters that only a device function called from code may have.
        _ => quote!(::gemma4c_dsl::ParamKind::Local),
    };
    quote!(::gemma4c_dsl::ParamDef { name: #name, view: "", kind: #kind })
}

/// A parameter of a head with structs: which of them are views, rustc knows.
pub fn head_param(param: &Param, function: &Function) -> TokenStream {
    let name = param.name.to_string();
    if !param.ty.is_struct() {
        let row = param_row(&name, &param.ty);
        return quote!(::gemma4c_dsl::structs::HeadParam::Plain(#row));
    }
    let types = type_arguments(&param.rust).into_iter().map(|ty| ty.to_token_stream().to_string());
    let def = struct_def(param, function);
    quote!(::gemma4c_dsl::structs::HeadParam::Struct { name: #name, def: #def, types: &[#(#types),*] })
}

fn struct_def(param: &Param, function: &Function) -> TokenStream {
    let ty = outside(&param.rust, &function.types);
    quote!(<#ty as ::gemma4c_dsl::Struct>::DEF)
}

fn has_structs(function: &Function) -> bool {
    function.params.iter().any(|param| param.ty.is_struct())
}

pub fn param_rows(function: &Function) -> TokenStream {
    if !has_structs(function) {
        let rows = function.params.iter().map(|param| param_row(&param.name.to_string(), &param.ty));
        return quote!(&[#(#rows),*]);
    }
    let head = function.params.iter().map(|param| head_param(param, function));
    quote! {{
        const HEAD: &[::gemma4c_dsl::structs::HeadParam] = &[#(#head),*];
        const ALL: [::gemma4c_dsl::ParamDef; ::gemma4c_dsl::structs::count_params(HEAD)] =
            ::gemma4c_dsl::structs::all_params(HEAD);
        &ALL
    }}
}

pub fn constant_rows(function: &Function) -> TokenStream {
    let rows = function.constants.iter().map(|constant| {
        let (name, ty) = (constant.name.to_string(), &constant.ty);
        quote!(::gemma4c_dsl::ConstantDef { name: #name, ty: #ty })
    });
    if function.configs.is_empty() {
        return quote!(&[#(#rows),*]);
    }
    let configs = function.configs.iter().map(|config| &config.ty);
    quote! {{
        const GROUPS: &[&[::gemma4c_dsl::ConstantDef]] =
            &[#(<#configs as ::gemma4c_dsl::Config>::CONSTANTS,)* &[#(#rows),*]];
        const ALL: [::gemma4c_dsl::ConstantDef; ::gemma4c_dsl::structs::count_constants(GROUPS)] =
            ::gemma4c_dsl::structs::all_constants(GROUPS);
        &ALL
    }}
}

/// A kernel's text as a constant.
pub fn text_row(parts: &[KernelPart<'_>], function: &Function) -> TokenStream {
    if let [KernelPart::Text(text)] = parts {
        return quote!(#text);
    }
    let parts = parts.iter().map(|part| match part {
        KernelPart::Text(text) => quote!(::gemma4c_dsl::structs::TextPart::Text(#text)),
        KernelPart::Params(param) => {
            let param = head_param(param, function);
            quote!(::gemma4c_dsl::structs::TextPart::Params(#param))
        }
        KernelPart::Fields(param) => {
            let (name, def) = (param.name.to_string(), struct_def(param, function));
            quote!(::gemma4c_dsl::structs::TextPart::Fields(#name, #def))
        }
    });
    quote! {{
        const PARTS: &[::gemma4c_dsl::structs::TextPart] = &[#(#parts),*];
        const LEN: usize = ::gemma4c_dsl::structs::Text::<0>::of(PARTS).len;
        static TEXT: ::gemma4c_dsl::structs::Text<LEN> = ::gemma4c_dsl::structs::Text::of(PARTS);
        TEXT.as_str()
    }}
}

pub fn callee_rows(body: &Body, refused: bool) -> TokenStream {
    let (callees, structs) = if refused { (&[][..], &[][..]) } else { (&body.callees[..], &body.structs[..]) };
    quote!(&[#(#callees::callee,)* #(<#structs as ::gemma4c_dsl::Struct>::callee,)*])
}

pub fn shared_rows(function: &Function, body: &Body) -> TokenStream {
    let constants = &body.constants;
    let bindings = constant_bindings(function);
    let rows = body.shared.iter().map(|array| {
        let (name, element, len) = (&array.name, &array.element, &array.len);
        quote! {
            ::gemma4c_dsl::SharedDef {
                name: #name,
                element: #element,
                len: {
                    #[allow(non_snake_case, unused_variables, dead_code, clippy::unnecessary_cast)]
                    fn len(__values: &::gemma4c_dsl::Values) -> u32 {
                        #(#constants)*
                        #bindings
                        (#len) as u32
                    }
                    len
                },
            }
        }
    });
    quote!(&[#(#rows),*])
}

pub fn slot_rows(slots: &[Slot]) -> TokenStream {
    let rows = slots.iter().map(|slot| {
        let (name, output) = (slot.name.to_string(), slot.output.to_token_stream().to_string());
        let params = slot.params.iter().map(|(name, ty)| {
            let (name, ty) = (name.to_string(), ty.to_token_stream().to_string());
            quote!((#name, #ty))
        });
        quote!(::gemma4c_dsl::SlotDef { name: #name, params: &[#(#params),*], output: #output })
    });
    quote!(&[#(#rows),*])
}

/// The definition's value for something that the head says of buffers.
pub fn buffers_row(Buffers { when, params }: &Buffers, bindings: &TokenStream) -> TokenStream {
    let names = params.iter().map(Buffer::full_name);
    quote! {{
        #[allow(non_snake_case, unused_variables)]
        fn when(__values: &::gemma4c_dsl::Values) -> bool { #bindings #when }
        ::gemma4c_dsl::Buffers { when, params: &[#(#names),*] }
    }}
}
