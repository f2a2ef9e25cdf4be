//! The Rust side of a body: the same statements, with the refusals that need types handed to rustc.
//!
//! The macro sees no types, so it cannot refuse `u8 + u8`. It wraps operands in identity functions whose bounds rustc
//! checks: `semantics::arithmetic(a) + b` compiles for 32- and 64-bit integers and f32 alone, and the bound's own
//! diagnostic says what to write. An element's compound assignment is written out (`a[i] += v` as a read and a write),
//! because the simulator must see both; `let` bindings of shared arrays get their number.

use super::arrays::call_of;
use super::literals;
use super::types::outside;
use quote::{ToTokens, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{BinOp, Block, Expr, Local, Pat, UnOp};

/// Rewrites a body in place.
pub fn instrument(block: &mut Block, types: &[String]) {
    let mut rewriter = Rewriter { shared: 0, types };
    rewriter.visit_block_mut(block);
}

struct Rewriter<'a> {
    shared: usize,
    /// The function's element types.
    types: &'a [String],
}

impl VisitMut for Rewriter<'_> {
    fn visit_local_mut(&mut self, local: &mut Local) {
        let is_shared = local.init.as_ref().is_some_and(|init| call_of(&init.expr, "shared").is_some());
        if is_shared {
            // The handle is indexed mutably, whether or not the author wrote `mut`.
            if let Pat::Ident(name) = &mut local.pat {
                name.mutability.get_or_insert_with(|| syn::Token![mut](name.ident.span()));
            }
            if let Some(Expr::Call(call)) = local.init.as_mut().map(|init| &mut *init.expr) {
                let number = self.shared;
                self.shared += 1;
                if let Expr::Path(path) = &mut *call.func {
                    let arguments = path.path.segments[0].arguments.clone();
                    let span = path.span();
                    let function: syn::Path = syn::parse_quote_spanned!(span=> ::gemma4c_dsl::sim::shared);
                    path.path = function;
                    if let Some(last) = path.path.segments.last_mut() {
                        last.arguments = arguments;
                    }
                }
                for argument in &mut call.args {
                    self.visit_expr_mut(argument);
                }
                call.args.insert(0, syn::parse_quote!(#number));
            }
            return;
        }
        // A view is written through, whether or not the author wrote `mut`.
        if let (Pat::Ident(name), Some(Expr::Struct(_))) = (&mut local.pat, local.init.as_ref().map(|init| &*init.expr))
        {
            name.mutability.get_or_insert_with(|| syn::Token![mut](name.ident.span()));
        }
        visit_mut::visit_local_mut(self, local);
    }

    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        if let Expr::Binary(binary) = expr
            && let Some(op) = plain(&binary.op)
            && let Expr::Index(index) = &*binary.left
        {
            let (span, base, at, value) = (binary.span(), &index.expr, &index.index, &binary.right);
            let written_out = quote_spanned! {span=> {
                let __value = #value;
                let __at = #at;
                #base[__at] = #base[__at] #op __value;
            }};
            if let Ok(block) = syn::parse2(written_out) {
                *expr = block;
            }
        }
        visit_mut::visit_expr_mut(self, expr);
        match expr {
            Expr::Struct(literal) if literal.rest.is_none() => {
                let span = literal.path.span();
                let path =
                    syn::Type::Path(syn::TypePath { attrs: Vec::new(), qself: None, path: literal.path.clone() });
                // An item does not see the function's type parameters.
                let name = outside(&path, self.types);
                let fields = literal.fields.iter().map(|field| field.member.to_token_stream().to_string());
                let checked = quote_spanned! {span=> {
                    // An item, which is evaluated whether or not anything calls the function.
                    const _: () = ::gemma4c_dsl::structs::in_order(
                        <#name as ::gemma4c_dsl::Struct>::DEF.fields,
                        &[#(#fields),*],
                    );
                    #literal
                }};
                if let Ok(block) = syn::parse2(checked) {
                    *expr = block;
                }
            }
            Expr::ForLoop(each) => each.attrs.clear(),
            Expr::While(each) => each.attrs.clear(),
            Expr::Binary(binary) => {
                let Some(bound) = bound(&binary.op) else { return };
                let assigns = super::expressions::operator(&binary.op).is_none();
                let operand =
                    if assigns || literals::is_bare(&binary.left) { &mut binary.right } else { &mut binary.left };
                if !literals::is_bare(operand) {
                    wrap(operand, bound);
                }
            }
            Expr::Unary(unary) => match unary.op {
                UnOp::Not(_) => wrap(&mut unary.expr, "boolean"),
                UnOp::Neg(_) if !literals::is_bare(&unary.expr) => wrap(&mut unary.expr, "arithmetic"),
                _ => {}
            },
            Expr::Cast(cast) if !literals::is_bare(&cast.expr) => {
                let to_float = cast.ty.to_token_stream().to_string() == "f32";
                wrap(&mut cast.expr, if to_float { "to_float" } else { "to_integer" });
            }
            _ => {}
        }
    }
}

fn wrap(expr: &mut Expr, bound: &str) {
    let span = expr.span();
    let bound = proc_macro2::Ident::new(bound, span);
    let inner = match &*expr {
        Expr::Paren(paren) => (*paren.expr).clone(),
        other => other.clone(),
    };
    if let Ok(wrapped) = syn::parse2(quote_spanned!(span=> ::gemma4c_dsl::semantics::#bound(#inner))) {
        *expr = wrapped;
    }
}

/// The bound that an operator puts on its operands.
fn bound(op: &BinOp) -> Option<&'static str> {
    match op {
        BinOp::Add(_) | BinOp::Sub(_) | BinOp::Mul(_) | BinOp::Div(_) => Some("arithmetic"),
        BinOp::AddAssign(_) | BinOp::SubAssign(_) | BinOp::MulAssign(_) | BinOp::DivAssign(_) => Some("arithmetic"),
        BinOp::Rem(_) | BinOp::BitAnd(_) | BinOp::BitOr(_) | BinOp::BitXor(_) => Some("bits"),
        BinOp::RemAssign(_) | BinOp::BitAndAssign(_) | BinOp::BitOrAssign(_) | BinOp::BitXorAssign(_) => Some("bits"),
        BinOp::Shl(_) | BinOp::Shr(_) => Some("bits"),
        _ => None,
    }
}

/// `+` for `+=`.
fn plain(op: &BinOp) -> Option<proc_macro2::TokenStream> {
    let span = op.span();
    Some(match op {
        BinOp::AddAssign(_) => quote_spanned!(span=> +),
        BinOp::SubAssign(_) => quote_spanned!(span=> -),
        BinOp::MulAssign(_) => quote_spanned!(span=> *),
        BinOp::DivAssign(_) => quote_spanned!(span=> /),
        BinOp::RemAssign(_) => quote_spanned!(span=> %),
        BinOp::BitXorAssign(_) => quote_spanned!(span=> ^),
        BinOp::BitAndAssign(_) => quote_spanned!(span=> &),
        BinOp::BitOrAssign(_) => quote_spanned!(span=> |),
        BinOp::ShlAssign(_) => quote_spanned!(span=> <<),
        BinOp::ShrAssign(_) => quote_spanned!(span=> >>),
        _ => return None,
    })
}
