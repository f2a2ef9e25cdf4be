//! Number literals. Rust infers a bare literal's type from its use, C++ from its digits; the rules here keep the two
//! the same.

use syn::{BinOp, Expr, Lit, LitFloat, LitInt};

/// An integer literal in CUDA spelling, or why it is refused.
pub fn integer(literal: &LitInt) -> Result<String, String> {
    let value: u128 = literal.base10_parse().map_err(|e| e.to_string())?;
    let text = literal.token().to_string();
    let digits = text.trim_end_matches(literal.suffix()).replace('_', "");
    if digits.starts_with("0o") {
        return Err("octal literals are refused: write decimal, 0x… or 0b…".into());
    }
    Ok(match literal.suffix() {
        "u32" => format!("{digits}u"),
        "i32" => digits,
        "u64" => format!("{digits}ull"),
        "i64" => format!("{digits}ll"),
        "f32" => format!("{digits}.0f"),
        small @ ("u8" | "i8" | "u16" | "i16") => format!("({small}){digits}"),
        // A bare literal takes the other operand's type in Rust. In C++ `int` and `unsigned` do so too.
        "" if value <= i32::MAX as u128 => digits,
        "" if value <= u32::MAX as u128 => format!("{digits}u"),
        "" => format!("{digits}ull"),
        other => return Err(format!("literal of type `{other}`: use u32, i32, u64, i64 or f32")),
    })
}

/// A float literal in CUDA spelling, or why it is refused.
pub fn float(literal: &LitFloat) -> Result<String, String> {
    if !matches!(literal.suffix(), "" | "f32") {
        return Err("a kernel computes in f32: write the literal without a suffix or with `f32`".into());
    }
    let text = literal.token().to_string();
    let digits = text.trim_end_matches("f32").trim_end_matches('_').replace('_', "");
    Ok(match () {
        () if digits.ends_with('.') => format!("{digits}0f"),
        () if digits.contains(['.', 'e', 'E']) => format!("{digits}f"),
        () => format!("{digits}.0f"),
    })
}

/// Nothing in the expression says its type: Rust would infer it from later uses, which the printed `auto` cannot.
pub fn is_bare(expr: &Expr) -> bool {
    match expr {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(int) => int.suffix().is_empty(),
            Lit::Float(float) => float.suffix().is_empty(),
            _ => false,
        },
        Expr::Paren(inner) => is_bare(&inner.expr),
        Expr::Group(inner) => is_bare(&inner.expr),
        Expr::Unary(unary) => is_bare(&unary.expr),
        Expr::Binary(binary) => match binary.op {
            BinOp::Shl(_) | BinOp::Shr(_) => is_bare(&binary.left),
            BinOp::And(_) | BinOp::Or(_) | BinOp::Eq(_) | BinOp::Ne(_) => false,
            BinOp::Lt(_) | BinOp::Le(_) | BinOp::Gt(_) | BinOp::Ge(_) => false,
            _ => is_bare(&binary.left) && is_bare(&binary.right),
        },
        Expr::If(branch) => {
            let tail = |block: &syn::Block| matches!(block.stmts.last(), Some(syn::Stmt::Expr(e, None)) if is_bare(e));
            tail(&branch.then_branch)
                && branch.else_branch.as_ref().is_some_and(|(_, other)| match &**other {
                    Expr::Block(block) => tail(&block.block),
                    other => is_bare(other),
                })
        }
        _ => false,
    }
}

/// Zero, as a literal or a vector's `ZERO`: register arrays of it print as `= {}`.
pub fn is_zero(expr: &Expr) -> bool {
    match expr {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(int) => int.base10_digits() == "0",
            // -0.0 is a unary expression, so a literal that parses to zero is +0.0.
            Lit::Float(float) => float.base10_parse::<f64>().is_ok_and(|v| v == 0.0),
            _ => false,
        },
        Expr::Path(path) => path.path.segments.last().is_some_and(|s| s.ident == "ZERO"),
        _ => false,
    }
}
