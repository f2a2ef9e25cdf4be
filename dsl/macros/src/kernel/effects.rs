//! Calls with effects, which C++ may evaluate in another order than Rust when two of them stand in one expression.

use syn::visit::Visit;
use syn::{BinOp, Expr, ExprCall};

/// Two operands or arguments of this expression each have an effect.
pub fn unordered(expr: &Expr) -> bool {
    let parts: Vec<&Expr> = match expr {
        // `&&` and `||` have an order, in both languages.
        Expr::Binary(binary) if matches!(binary.op, BinOp::And(_) | BinOp::Or(_)) => return false,
        Expr::Binary(binary) => vec![&binary.left, &binary.right],
        Expr::Call(call) => call.args.iter().collect(),
        Expr::MethodCall(call) => std::iter::once(&*call.receiver).chain(&call.args).collect(),
        Expr::Index(index) => vec![&index.expr, &index.index],
        _ => return false,
    };
    parts.into_iter().filter(|part| has_effect(part)).count() > 1
}

/// Intrinsics that take a word of any type: a bare literal would be an `int` in C++, whatever Rust infers.
pub fn takes_any_word(name: &str) -> bool {
    matches!(name, "shfl_xor" | "shfl_idx" | "warp_sum" | "warp_max" | "block_sum" | "block_max")
}

fn has_effect(expr: &Expr) -> bool {
    struct Finder(bool);
    impl<'ast> Visit<'ast> for Finder {
        fn visit_expr_call(&mut self, call: &'ast ExprCall) {
            let atomic = matches!(&*call.func, Expr::Path(path) if path.path.segments.last().is_some_and(|segment| {
                segment.ident.to_string().starts_with("atomic_") || segment.ident.to_string().starts_with("last_block")
            }));
            let writes = call.args.iter().any(|a| matches!(a, Expr::Reference(r) if r.mutability.is_some()));
            self.0 |= atomic || writes;
            syn::visit::visit_expr_call(self, call);
        }
    }
    let mut finder = Finder(false);
    finder.visit_expr(expr);
    finder.0
}
