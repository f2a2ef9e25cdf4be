//! `#[dataflow]`: names the nodes of a graph after the bindings of the function that builds it.
//!
//! Purely cosmetic. Around every `let name = expr;` it asks the builder where construction stands, evaluates the
//! expression, and hands the builder the name and the line; at the end it prefixes all these names with the function's
//! own. Of the builder it uses only the methods `mark`, `bind` and `scope`. A value that is returned without a binding
//! is named after the function.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Expr, ExprClosure, FnArg, Ident, Item, ItemFn, Local, Pat, ReturnType, Type};

/// Expands the attribute on one function.
pub(crate) fn expand(attribute: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    if !attribute.is_empty() {
        return Err(syn::Error::new(attribute.span(), "#[dataflow] takes no arguments: write it bare"));
    }
    let mut function: ItemFn = syn::parse2(item)?;
    let builder = builder_of(&function)?;
    let mut body = function.block.as_ref().clone();
    NameBindings { builder: &builder }.visit_block_mut(&mut body);
    let name = function.sig.ident.to_string();
    let line = function.sig.ident.span().start().line as u32;
    let output = match &function.sig.output {
        ReturnType::Default => quote!(()),
        ReturnType::Type(_, ty) => quote!(#ty),
    };
    // A closure, so that `?` and `return` in the body leave the body and not the naming after it.
    function.block = syn::parse_quote!({
        let __mark = #builder.mark();
        #[allow(clippy::redundant_closure_call)]
        let __result = (|| -> #output #body)();
        #builder.bind(__mark, "out", #line);
        #builder.scope(__mark, #name);
        __result
    });
    Ok(quote!(#function))
}

/// The first parameter whose type ends in `Builder`.
fn builder_of(function: &ItemFn) -> syn::Result<Ident> {
    let is_builder = |ty: &Type| {
        let Type::Reference(reference) = ty else { return false };
        let Type::Path(path) = reference.elem.as_ref() else { return false };
        reference.mutability.is_some() && path.path.segments.last().is_some_and(|s| s.ident == "Builder")
    };
    let found = function.sig.inputs.iter().find_map(|arg| match arg {
        FnArg::Typed(arg) if is_builder(&arg.ty) => match arg.pat.as_ref() {
            Pat::Ident(pat) => Some(pat.ident.clone()),
            _ => None,
        },
        _ => None,
    });
    let missing = "#[dataflow] needs the builder to name nodes in: add a parameter `g: &mut Builder`";
    found.ok_or_else(|| syn::Error::new(function.sig.ident.span(), missing))
}

struct NameBindings<'a> {
    builder: &'a Ident,
}

impl VisitMut for NameBindings<'_> {
    fn visit_local_mut(&mut self, local: &mut Local) {
        visit_mut::visit_local_mut(self, local);
        let name = match &local.pat {
            Pat::Ident(pat) => pat.ident.to_string(),
            Pat::Type(typed) => match typed.pat.as_ref() {
                Pat::Ident(pat) => pat.ident.to_string(),
                _ => return,
            },
            _ => return,
        };
        if let Some(init) = &mut local.init {
            let (g, expr, line) = (self.builder, &init.expr, local.let_token.span.start().line as u32);
            let (mark, value) = (format_ident!("__mark_{name}"), format_ident!("__value_{name}"));
            *init.expr = syn::parse_quote!({
                let #mark = #g.mark();
                let #value = #expr;
                #g.bind(#mark, #name, #line);
                #value
            });
        }
    }

    // A closure may run when the builder is borrowed elsewhere, and an item is a function of its own.
    fn visit_expr_closure_mut(&mut self, _: &mut ExprClosure) {}
    fn visit_item_mut(&mut self, _: &mut Item) {}
    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        if !matches!(expr, Expr::Async(_)) {
            visit_mut::visit_expr_mut(self, expr);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(item: TokenStream) -> String {
        expand(TokenStream::new(), item).unwrap_err().to_string()
    }

    #[test]
    fn bindings_get_marks_and_the_function_a_scope() {
        let item = quote! { fn attention(g: &mut Builder, h: Value) -> Value { let q = g.matmul(w, h); g.add(h, q) } };
        let text = expand(TokenStream::new(), item).unwrap().to_string();
        assert!(text.contains("__mark_q , \"q\""), "{text}");
        assert!(text.contains("g . scope (__mark , \"attention\")"), "{text}");
    }

    #[test]
    fn destructuring_and_closures_are_left_alone() {
        let item = quote! { fn f(g: &mut Builder) { let (a, b) = two(g); let c = || { let d = 1; d }; } };
        let text = expand(TokenStream::new(), item).unwrap().to_string();
        assert!(!text.contains("__mark_a") && !text.contains("__mark_d") && text.contains("__mark_c"), "{text}");
    }

    #[test]
    fn a_function_without_a_builder_is_refused_with_advice() {
        assert!(error(quote! { fn f(x: u32) {} }).contains("add a parameter `g: &mut Builder`"));
        assert!(error(quote! { fn f(g: &Builder) {} }).contains("&mut Builder"));
    }
}
