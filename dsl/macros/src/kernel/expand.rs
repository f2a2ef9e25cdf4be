//! From the read function to the items that stay: the function (instrumented), its definition as a static, and a module
//! of the same name ([`modules`]), so that `use kernels::matvec;` brings the function, `matvec::DEF` and
//! `matvec::Arguments`.

use super::errors::Errors;
use super::function::{Attribute, Buffer, DeviceAttribute, Function, Slot};
use super::heads::{KernelPart, device_text, documentation, kernel_text, launch_bounds};
use super::instrument::instrument;
use super::modules;
use super::printer::{Body, Printer};
use super::rows::{
    buffers_row, callee_rows, constant_bindings, constant_rows, head_param, param_rows, shared_rows, slot_rows,
    text_row,
};
use super::types::{KernelType, Role, Structs, Types, is_struct_name};
use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{FnArg, GenericParam, Ident, ItemFn, Pat};

/// `#[kernel(…)]`.
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let (item, errors) = match read(item.clone()) {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    let attribute = syn::parse2::<Attribute>(attribute).unwrap_or_else(|error| {
        errors.push(error);
        Attribute { block: Some(syn::parse_quote!(32)), ..Attribute::default() }
    });
    let structs = Structs::default();
    let function = Function::read(&item, &structs, &errors);
    function.check_kernel(&errors);
    check_slots(&attribute.slots, &function, &structs, &errors);
    let block = attribute.block.clone().unwrap_or_else(|| {
        errors.refuse(&item.sig.ident, "the block size is missing: write `#[kernel(block = 256)]`");
        syn::parse_quote!(32)
    });
    if let (Some(cluster), false) = (&attribute.cluster, attribute.dynamic_shared) {
        errors.refuse(
            cluster,
            "a cluster's blocks share dynamic shared memory alone: write `cluster = N, dynamic_shared`",
        );
    }
    check_buffers(&attribute, &function, &errors);
    let mut printer = Printer::new(&function, &attribute.slots, true, &structs, &errors);
    printer.dynamic_shared = attribute.dynamic_shared;
    printer.body(&item.block, false);
    let bounds = launch_bounds(&mut printer, &block, &attribute);
    let body = printer.finish();
    let text = kernel_text(&function, &attribute, &bounds, &body);
    let items = kernel_items(&function, &attribute, &block, &body, &text, errors.any());
    finish(items, errors)
}

/// `#[device]`.
pub fn device(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let (item, errors) = match read(item.clone()) {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    let attribute = syn::parse2::<DeviceAttribute>(attribute).unwrap_or_else(|error| {
        errors.push(error);
        DeviceAttribute::default()
    });
    let structs = Structs::default();
    let function = Function::read(&item, &structs, &errors);
    check_slots(&attribute.slots, &function, &structs, &errors);
    for param in &function.params {
        if matches!(param.ty, KernelType::Memory { role: Role::Tiles, .. }) {
            errors.refuse(&param.rust, "tiles are a kernel's own parameter: a device function takes what was brought");
        }
    }
    let own = function.first_own_argument(&attribute, &errors);
    let mut printer = Printer::new(&function, &attribute.slots, false, &structs, &errors);
    printer.body(&item.block, function.output != KernelType::Unit);
    let body = printer.finish();
    let text = device_text(&function, &attribute.slots, &body);
    let items = device_items(&function, &attribute, own, &body, &text, errors.any());
    finish(items, errors)
}

fn read(item: TokenStream) -> Result<(ItemFn, Errors), TokenStream> {
    match syn::parse2::<ItemFn>(item.clone()) {
        Ok(function) => Ok((function, Errors::default())),
        Err(error) => {
            let error = error.to_compile_error();
            Err(quote!(#item #error))
        }
    }
}

/// The items, and the refusals after them: the function and its definition are always there, so that the editor keeps
/// working. What would only repeat a refusal in rustc's words is left out of a refused definition.
fn finish(items: TokenStream, errors: Errors) -> TokenStream {
    let errors = errors.into_compile_errors();
    quote!(#items #errors)
}

fn check_slots(slots: &[Slot], function: &Function, structs: &Structs, errors: &Errors) {
    let types = Types { parameters: &function.types, structs, errors };
    for slot in slots {
        for (_, ty) in &slot.params {
            types.value(ty);
        }
        // The simulator passes a slot's result as 16 bytes.
        if types.value(&slot.output).is_some_and(|output| !KernelType::Value(output).is_plain()) {
            errors.refuse(&slot.output, "a slot gives a number or a vector: take a struct apart, or pass it in");
        }
    }
}

/// What slots are in the Rust function: a kernel's are closures that ask the instance, a device function's are
/// parameters.
enum Slots<'a> {
    Closures(&'a [Slot]),
    Parameters(&'a [Slot]),
}

/// The author's function: compile-time parameters become variables that the running instance fills, writable handles
/// become `mut`, slots become functions to call.
fn rust_function(function: &Function, slots: Slots<'_>, instead: Option<&Ident>) -> TokenStream {
    let constants = &function.constants;
    let ItemFn { attrs, vis, sig, block, .. } = &instrumented(function);
    let mut sig = sig.clone();
    let type_params = sig.generics.params.iter().filter(|p| !matches!(p, GenericParam::Const(_))).cloned().collect();
    sig.generics.params = type_params;
    if sig.generics.params.is_empty() {
        sig.generics.lt_token = None;
        sig.generics.gt_token = None;
    }
    for input in &mut sig.inputs {
        if let FnArg::Typed(typed) = input
            && let Pat::Ident(name) = &mut *typed.pat
            && is_writable(&typed.ty)
        {
            name.mutability.get_or_insert_with(|| syn::Token![mut](name.ident.span()));
        }
    }
    let names = constants.iter().map(|constant| constant.name.to_string());
    let count = constants.len();
    let values = (count > 0).then(|| {
        quote! {
            static __NAMES: ::gemma4c_dsl::sim::ConstantNames = ::gemma4c_dsl::sim::ConstantNames::new(&[#(#names),*]);
            let __values = ::gemma4c_dsl::sim::constants::<#count>(&__NAMES);
        }
    });
    let configs = function.configs.iter().map(|config| {
        let (name, ty) = (&config.name, &config.ty);
        quote!(let #name: #ty = <#ty as ::gemma4c_dsl::Config>::of_launch();)
    });
    let bindings = constants.iter().enumerate().map(|(index, constant)| {
        let (name, ty, text) = (&constant.name, &constant.rust, constant.name.to_string());
        quote!(let #name: #ty = ::gemma4c_dsl::sim::constant(__values[#index], #text);)
    });
    let (closures, parameters) = match slots {
        Slots::Closures(slots) => (slots, [].as_slice()),
        Slots::Parameters(slots) => ([].as_slice(), slots),
    };
    for (number, Slot { name, params, output }) in parameters.iter().enumerate() {
        let types = params.iter().map(|(_, ty)| ty);
        sig.inputs.insert(number, syn::parse_quote!(#name: impl ::core::marker::Copy + Fn(#(#types),*) -> #output));
    }
    let closures = closures.iter().enumerate().map(|(number, slot)| {
        let (name, output) = (&slot.name, &slot.output);
        let names: Vec<_> = slot.params.iter().map(|(name, _)| name).collect();
        let types: Vec<_> = slot.params.iter().map(|(_, ty)| ty).collect();
        quote! {
            let #name = |#(#names: #types),*| -> #output {
                let mut __words = ::gemma4c_dsl::sim::Words::default();
                #(::gemma4c_dsl::sim::Value::put(#names, &mut __words);)*
                ::gemma4c_dsl::sim::slot(#number, __words)
            };
        }
    });
    let in_thin = instead.map(|other| {
        let slots = parameters.iter().map(|slot| &slot.name);
        let names = slots.chain(function.params.iter().map(|param| &param.name));
        quote!(if ::gemma4c_dsl::sim::is_thin() { return #other(#(#names),*); })
    });
    let statements = &block.stmts;
    quote! {
        #(#attrs)*
        // The language is smaller than Rust: advice to write what it does not have would mislead.
        #[allow(non_snake_case, unused_variables, unused_mut, clippy::style, clippy::complexity, clippy::erasing_op)]
        #vis #sig {
            #in_thin
            #(#configs)*
            #values
            #(#bindings)*
            #(#closures)*
            #(#statements)*
        }
    }
}

fn is_writable(ty: &syn::Type) -> bool {
    let syn::Type::Path(path) = ty else { return false };
    path.path.segments.last().is_some_and(|s| {
        // Of a struct the handles in it may be.
        let handle = matches!(s.ident.to_string().as_str(), "Weights" | "Input" | "Tiles" | "Regs");
        s.ident == "Output"
            || s.ident == "InOut"
            || s.ident == "Shared"
            || !handle && is_struct_name(&s.ident.to_string())
    })
}

fn instrumented(function: &Function) -> ItemFn {
    let mut item = function.item.clone();
    instrument(&mut item.block, &function.types);
    item
}

/// Calls the function with arguments taken by position, for every choice of its element types.
fn dispatch(function: &Function, name: &Ident) -> TokenStream {
    let arguments = function.params.iter().map(|_| quote!(__in_order.next()));
    let arguments = quote!(#(#arguments),*);
    let mut choices: Vec<Vec<Ident>> = vec![Vec::new()];
    for _ in &function.types {
        choices = choices
            .into_iter()
            .flat_map(|chosen| {
                ["f32", "F16", "BF16"].map(|ty| {
                    let mut chosen = chosen.clone();
                    chosen.push(Ident::new(ty, Span::call_site()));
                    chosen
                })
            })
            .collect();
    }
    if function.types.is_empty() {
        return quote!(#name(#arguments));
    }
    let names = &function.types;
    let arms = choices.iter().map(|chosen| {
        let spelled = chosen.iter().map(ToString::to_string);
        quote!([#(#spelled),*] => #name::<#(::gemma4c_dsl::elements::#chosen),*>(#arguments),)
    });
    quote! {
        match [#(__arguments.element_type(#names)),*] {
            #(#arms)*
            other => ::gemma4c_dsl::sim::refuse_types(&other),
        }
    }
}

/// Buffers of which the head says something are parameters, or fields of views.
fn check_buffers(attribute: &Attribute, function: &Function, errors: &Errors) {
    for Buffer { param: name, field } in attribute.early.iter().chain(&attribute.only_reads).flat_map(|b| &b.params) {
        match function.params.iter().find(|param| param.name == *name) {
            None => errors.refuse(name, "no such parameter"),
            Some(param) if param.ty.is_struct() && field.is_none() => {
                errors.refuse(name, format!("a view: name the buffer in it, `{name}.FIELD`"));
            }
            Some(param) if !param.ty.is_struct() && field.is_some() => {
                errors.refuse(name, "this parameter has no fields")
            }
            Some(_) => {}
        }
    }
    for buffer in attribute.early.iter().filter(|_| !attribute.dependent).flat_map(|early| &early.params) {
        errors.refuse(&buffer.param, "only a `dependent` kernel reads something before it waits");
    }
}

/// Refusals of fields that a view does not have.
fn field_checks(attribute: &Attribute, definition: &Ident) -> TokenStream {
    let named = attribute.early.iter().chain(&attribute.only_reads).flat_map(|buffers| &buffers.params);
    let checks = named.filter_map(|Buffer { param, field }| {
        let field = field.as_ref()?;
        let (span, param, spelled) = (field.span(), param.to_string(), field.to_string());
        Some(quote_spanned! {span=>
            const _: () = ::gemma4c_dsl::structs::names_a_field(#definition.params, #param, #spelled);
        })
    });
    checks.collect()
}

fn kernel_items(
    function: &Function,
    attribute: &Attribute,
    block: &syn::Expr,
    body: &Body,
    text: &[KernelPart<'_>],
    refused: bool,
) -> TokenStream {
    let name = &function.item.sig.ident;
    let spelled = name.to_string();
    let definition = modules::definition(name);
    let module = modules::of_kernel(function, &attribute.slots, refused);
    let rust = rust_function(function, Slots::Closures(&attribute.slots), None);
    let (params, constants, slots) = (param_rows(function), constant_rows(function), slot_rows(&attribute.slots));
    let (text, checks) = (text_row(text, function), field_checks(attribute, &definition));
    let (shared, callees, bindings) =
        (shared_rows(function, body), callee_rows(body, refused), constant_bindings(function));
    let (types, doc, source) = (
        &function.types,
        documentation(&function.item.attrs).join("\n"),
        source_text(function.item, &function.item.attrs),
    );
    let (dependent, waits_first, dynamic) = (attribute.dependent, attribute.waits_first, attribute.dynamic_shared);
    let early = attribute.early.iter().map(|buffers| buffers_row(buffers, &bindings));
    let only_reads = attribute.only_reads.iter().map(|buffers| buffers_row(buffers, &bindings));
    let cluster = match &attribute.cluster {
        Some(blocks) => quote! {{
            #[allow(non_snake_case, unused_variables, clippy::unnecessary_cast)]
            fn cluster(__values: &::gemma4c_dsl::Values) -> u32 { #bindings (#blocks) as u32 }
            Some(cluster)
        }},
        None => quote!(None),
    };
    let call = if refused { TokenStream::new() } else { dispatch(function, name) };
    quote! {
        #rust

        #[doc(hidden)]
        #[allow(non_upper_case_globals)]
        static #definition: ::gemma4c_dsl::KernelDef = ::gemma4c_dsl::KernelDef {
            name: #spelled,
            doc: #doc,
            params: #params,
            constants: #constants,
            types: &[#(#types),*],
            slots: #slots,
            shared: #shared,
            launch: ::gemma4c_dsl::LaunchContract {
                block: {
                    #[allow(non_snake_case, unused_variables, clippy::unnecessary_cast)]
                    fn block(__values: &::gemma4c_dsl::Values) -> u32 { #bindings (#block) as u32 }
                    block
                },
                cluster: #cluster,
                dependent: #dependent,
                waits_first: #waits_first,
                early: &[#(#early),*],
                only_reads: &[#(#only_reads),*],
                dynamic_shared: #dynamic,
            },
            callees: #callees,
            cuda: #text,
            rust: #source,
            run: {
                fn run(__arguments: &::gemma4c_dsl::sim::Arguments<'_>) {
                    let __in_order = __arguments.in_order();
                    #call
                }
                run
            },
        };

        #checks

        #module
    }
}

/// `own`: the number of the first parameter that is not a slot's value but an argument of the launch.
fn device_items(
    function: &Function,
    attribute: &DeviceAttribute,
    own: usize,
    body: &Body,
    text: &str,
    refused: bool,
) -> TokenStream {
    let name = &function.item.sig.ident;
    let spelled = name.to_string();
    let definition = modules::definition(name);
    let rust = rust_function(function, Slots::Parameters(&attribute.slots), attribute.instead.as_ref());
    let (params, constants, callees) = (param_rows(function), constant_rows(function), callee_rows(body, refused));
    let (doc, source) =
        (documentation(&function.item.attrs).join("\n"), source_text(function.item, &function.item.attrs));
    let output = match &function.output {
        KernelType::Value(value) => value.as_str(),
        _ => "void",
    };
    let fills_slots = !refused
        && function.types.is_empty()
        && attribute.slots.is_empty()
        && function.output.is_plain()
        && function.params.iter().all(|p| match p.ty {
            KernelType::Value(_) => true,
            // A launch has no shared memory to give, and tiles are a kernel's own.
            KernelType::Memory { role, .. } => !matches!(role, Role::Shared | Role::Tiles),
            _ => false,
        });
    let call = if fills_slots {
        let arguments = function.params.iter().map(|_| quote!(__arguments.next()));
        let head = function.params.iter().filter(|param| param.ty.is_struct()).map(|param| head_param(param, function));
        quote! {
            if ::gemma4c_dsl::structs::fits_slots(&[#(#head),*]) { Some({
                fn call(__arguments: &::gemma4c_dsl::sim::SlotArguments<'_>) -> ::gemma4c_dsl::sim::Word4 {
                    ::gemma4c_dsl::sim::Word4::from_value(#name(#(#arguments),*))
                }
                call
            }) } else { None }
        }
    } else {
        quote!(None)
    };
    let thin = attribute.thin;
    let instead = match &attribute.instead {
        Some(other) => quote!(Some(#other::callee)),
        None => quote!(None),
    };
    let module = modules::of_device(function, fills_slots.then_some(own), attribute.fills.is_some());
    quote! {
        #rust

        #[doc(hidden)]
        #[allow(non_upper_case_globals)]
        static #definition: ::gemma4c_dsl::DeviceDef = ::gemma4c_dsl::DeviceDef {
            name: #spelled,
            doc: #doc,
            params: #params,
            output: #output,
            constants: #constants,
            thin: #thin,
            instead: #instead,
            callees: #callees,
            cuda: #text,
            rust: #source,
            call: #call,
        };

        #module
    }
}

/// The item as its author wrote it, with comments; its tokens where the file cannot be read.
pub fn source_text(item: &impl ToTokens, attributes: &[syn::Attribute]) -> String {
    let first = attributes.first().map_or_else(
        || item.to_token_stream().into_iter().next().map_or_else(Span::call_site, |token| token.span()),
        |attribute| attribute.pound_token.span,
    );
    let start = match Span::call_site().start().line {
        // The attribute of the macro itself stands above the item, or between its other attributes.
        line if line > 0 => line.min(first.start().line),
        _ => first.start().line,
    };
    let end = item.to_token_stream().into_iter().last().map_or(start, |token| token.span().end().line);
    let text = first.local_file().and_then(|path| std::fs::read_to_string(path).ok()).and_then(|text| {
        let lines: Vec<_> = text.lines().skip(start.checked_sub(1)?).take(end + 1 - start).collect();
        (!lines.is_empty()).then(|| lines.join("\n") + "\n")
    });
    text.unwrap_or_else(|| item.to_token_stream().to_string())
}
