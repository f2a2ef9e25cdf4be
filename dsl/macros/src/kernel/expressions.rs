//! Expressions: each is printed together with its C++ precedence, and a parent puts parentheses where C++ would read
//! another tree than Rust did (`a & b == c`), or where a person would have to think (`a << 2 | b`).

use super::effects;
use super::literals;
use super::methods;
use super::printer::Printer;
use super::scope::joined;
use super::types::{KernelType, is_struct_name};
use quote::ToTokens;
use syn::{BinOp, Block, Expr, ExprIf, GenericArgument, Lit, Member, PathArguments, Stmt, UnOp};

/// C++ precedence levels, loosest first.
pub mod level {
    pub const TERNARY: u8 = 3;
    pub const OR: u8 = 4;
    pub const AND: u8 = 5;
    pub const BIT_OR: u8 = 6;
    pub const BIT_XOR: u8 = 7;
    pub const BIT_AND: u8 = 8;
    pub const EQUALITY: u8 = 9;
    pub const RELATION: u8 = 10;
    pub const SHIFT: u8 = 11;
    pub const SUM: u8 = 12;
    pub const PRODUCT: u8 = 13;
    pub const UNARY: u8 = 15;
    pub const PRIMARY: u8 = 16;
}
use level::*;

/// A printed expression and how tightly it binds.
pub struct Printed {
    pub text: String,
    pub level: u8,
}

impl Printed {
    fn primary(text: impl Into<String>) -> Self {
        Self { text: text.into(), level: PRIMARY }
    }

    /// The text, in parentheses if it binds looser than `level`.
    fn at(self, level: u8) -> String {
        if self.level < level { format!("({})", self.text) } else { self.text }
    }
}

impl Printer<'_> {
    pub fn expression(&mut self, expr: &Expr) -> String {
        self.printed(expr).text
    }

    fn at(&mut self, expr: &Expr, level: u8) -> String {
        self.printed(expr).at(level)
    }

    fn refused(&self, expr: &Expr, message: &str) -> Printed {
        self.errors.refuse(expr, message);
        Printed::primary("")
    }

    fn printed(&mut self, expr: &Expr) -> Printed {
        if effects::unordered(expr) {
            return self
                .refused(expr, "C++ may evaluate these two effects in either order: give the first its own `let`");
        }
        match expr {
            Expr::Paren(inner) => self.printed(&inner.expr),
            Expr::Group(inner) => self.printed(&inner.expr),
            Expr::Lit(literal) => self.literal(expr, &literal.lit),
            Expr::Path(path) => self.path(expr, &path.path),
            Expr::Binary(binary) => self.binary(expr, &binary.left, &binary.op, &binary.right),
            Expr::Unary(unary) => self.unary(expr, &unary.op, &unary.expr),
            Expr::Cast(cast) => {
                let Some(ty) = self.types().value(&cast.ty) else { return Printed::primary("") };
                if !matches!(ty.as_str(), "u8" | "i8" | "u16" | "i16" | "u32" | "i32" | "u64" | "i64" | "f32") {
                    return self.refused(expr, "`as` goes to integers and f32: write `F16::from_f32(x)`, `x != 0` …");
                }
                Printed { text: format!("({ty}){}", self.at(&cast.expr, UNARY)), level: UNARY }
            }
            Expr::Index(index) => {
                let base = self.at(&index.expr, PRIMARY);
                let at = self.expression(&index.index);
                Printed::primary(format!("{base}[{at}]"))
            }
            Expr::Field(field) => match &field.member {
                // A config's field is a constant of the text, under its own name.
                Member::Named(name) if self.is_config(&field.base) => match self.scopes.find(&name.to_string()) {
                    None => Printed::primary(name.to_string()),
                    Some(_) => self.refused(
                        expr,
                        &format!(
                            "this function has a `{name}` of its own, which the text could not tell from the config's"
                        ),
                    ),
                },
                Member::Named(name) => {
                    let base = self.at(&field.base, PRIMARY);
                    Printed::primary(format!("{base}.{name}"))
                }
                Member::Unnamed(_) => self.refused(expr, "tuples are refused: use a vector's `.x`, `.y`, `.z`, `.w`"),
            },
            Expr::Call(call) => self.call(expr, &call.func, call.args.iter()),
            Expr::MethodCall(call) => self.method(call),
            Expr::If(branch) => self.ternary(expr, branch),
            Expr::Struct(literal) => self.struct_literal(expr, literal),
            // An argument of a device function: C++ takes the reference by itself.
            Expr::Reference(reference) => match (&*reference.expr, self.argument) {
                (Expr::Path(_), true) => self.printed(&reference.expr),
                _ => {
                    self.refused(expr, "`&` is refused except as `&mut name` or `&name` in a call of a device function")
                }
            },
            _ => self.refused(expr, refusal(expr)),
        }
    }

    fn is_config(&self, base: &Expr) -> bool {
        matches!(base, Expr::Path(path) if path.path.get_ident().is_some_and(|name| {
            self.scopes.find(&name.to_string()).is_some_and(|binding| binding.ty == Some(KernelType::Config))
        }))
    }

    /// `Unit { codes, side: words }`, `Scratch::<KV> { keys }`: C++ takes the fields by position, and rustc checks that
    /// these are declared so.
    fn struct_literal(&mut self, expr: &Expr, literal: &syn::ExprStruct) -> Printed {
        const RULE: &str = "a struct literal is `Name { field: value, … }` of a `#[registers]` or `#[view]` struct, all fields written out; \
                            a vector is f32x4(a, b, c, d)";
        let name = &literal.path.segments[0].ident;
        if literal.path.segments.len() != 1 || !is_struct_name(&name.to_string()) {
            return self.refused(expr, RULE);
        }
        if literal.rest.is_some() || literal.fields.iter().any(|field| matches!(field.member, Member::Unnamed(_))) {
            return self.refused(expr, RULE);
        }
        let name = self.struct_name(&literal.path);
        let values: Vec<_> = literal.fields.iter().map(|field| self.expression(&field.expr)).collect();
        Printed::primary(format!("{name}{{{}}}", values.join(", ")))
    }

    /// Notes a struct that is named outside a type.
    fn struct_name(&self, path: &syn::Path) -> String {
        let ty = syn::Type::Path(syn::TypePath { attrs: Vec::new(), qself: None, path: path.clone() });
        self.types().value(&ty).unwrap_or_default()
    }

    fn literal(&mut self, expr: &Expr, literal: &Lit) -> Printed {
        let text = match literal {
            Lit::Int(int) => literals::integer(int),
            Lit::Float(float) => literals::float(float),
            Lit::Bool(value) => Ok(value.value.to_string()),
            _ => Err("text and character literals are refused".into()),
        };
        match text {
            Ok(text) => Printed { level: if text.starts_with('(') { UNARY } else { PRIMARY }, text },
            Err(message) => self.refused(expr, &message),
        }
    }

    fn path(&mut self, expr: &Expr, path: &syn::Path) -> Printed {
        if let Some(name) = path.get_ident() {
            let spelled = name.to_string();
            return match self.scopes.find(&spelled) {
                Some(binding) if binding.ty == Some(KernelType::Config) => {
                    self.refused(expr, &format!("the text has a config's fields alone: write `{name}.FIELD`"))
                }
                Some(binding) => Printed::primary(binding.printed.clone()),
                None if self.argument && self.slots.iter().any(|slot| *name == slot.name) => {
                    self.passed.insert(spelled.clone());
                    Printed::primary(format!("{spelled}_slot"))
                }
                None if self.slots.iter().any(|slot| *name == slot.name) => {
                    self.refused(expr, &format!("`{name}` is a slot: call it, or pass it to a device function"))
                }
                // A device function, for a slot of the one that is called: rustc checks that it is one.
                None if self.argument && spelled.starts_with(|c: char| c.is_ascii_lowercase()) => {
                    self.callee(path);
                    Printed::primary(format!("[](auto... values) {{ return {spelled}(values...); }}"))
                }
                None => self.refused(
                    expr,
                    &format!(
                        "`{name}` is not declared in this function: a kernel sees its parameters, its compile-time \
                         parameters (`const {name}: u32`) and its own variables"
                    ),
                ),
            };
        }
        let joined = joined(path);
        if let Some(name) = joined.strip_suffix("::ZERO").filter(|name| is_struct_name(name)) {
            self.struct_name(&path.segments[0].ident.clone().into());
            return Printed::primary(format!("{name}{{}}"));
        }
        match methods::constant(&joined) {
            Some(constant) => Printed::primary(constant),
            None => {
                self.refused(expr, "this constant has no CUDA spelling: use f32::INFINITY, u32::MAX, F32x4::ZERO …")
            }
        }
    }

    fn binary(&mut self, expr: &Expr, left: &Expr, op: &BinOp, right: &Expr) -> Printed {
        let Some((symbol, own)) = operator(op) else {
            return self.refused(expr, "an assignment is a statement of its own");
        };
        let arithmetic = matches!(own, SHIFT | SUM | PRODUCT | BIT_AND | BIT_OR | BIT_XOR);
        if arithmetic && literals::is_bare(left) && (own == SHIFT || literals::is_bare(right)) {
            let side = left.to_token_stream();
            return self
                .refused(left, &format!("nothing says the width of this: give the literal a suffix, `{side}u32`"));
        }
        let nested =
            |child: &Expr| matches!(strip(child), Expr::Binary(b) if operator(&b.op).is_some_and(|(s, _)| s != symbol));
        let explicit = |child: &Expr| match own {
            SHIFT | BIT_AND | BIT_OR | BIT_XOR => nested(child),
            OR => matches!(strip(child), Expr::Binary(b) if matches!(b.op, BinOp::And(_))),
            _ => false,
        };
        // Left-associative: an equal level on the right needs parentheses.
        let l = self.at(left, if explicit(left) { PRIMARY } else { own });
        let r = self.at(right, if explicit(right) { PRIMARY } else { own + 1 });
        Printed { text: format!("{l} {symbol} {r}"), level: own }
    }

    fn unary(&mut self, expr: &Expr, op: &UnOp, operand: &Expr) -> Printed {
        match op {
            UnOp::Neg(_) => {
                if matches!(strip(operand), Expr::Lit(l) if matches!(&l.lit, Lit::Int(i)
                    if i.suffix().is_empty() && i.base10_parse::<i64>().is_ok_and(|v| v > i64::from(i32::MAX))))
                {
                    return self.refused(expr, "nothing says the width of this: give the literal a suffix, `i64`");
                }
                let inner = self.at(operand, UNARY);
                // `- -x` must not become `--x`.
                let inner = if inner.starts_with('-') { format!("({inner})") } else { inner };
                Printed { text: format!("-{inner}"), level: UNARY }
            }
            UnOp::Not(_) => Printed { text: format!("!{}", self.at(operand, UNARY)), level: UNARY },
            // A `&mut` parameter is a C++ reference: it needs no star.
            UnOp::Deref(_) => match self.scopes.type_of(operand) {
                Some(KernelType::Reference { .. }) => self.printed(operand),
                _ => self.refused(expr, "`*` is for `&mut` parameters of a device function"),
            },
            _ => self.refused(expr, "the kernel language does not have this operator"),
        }
    }

    /// `if c { a } else { b }` as a value.
    fn ternary(&mut self, expr: &Expr, branch: &ExprIf) -> Printed {
        const RULE: &str = "an `if` used as a value has an `else`, and one expression in each branch: \
                            otherwise declare `let x: T;` and assign in the branches";
        let Some((_, other)) = &branch.else_branch else { return self.refused(expr, RULE) };
        let Some(then) = only_expression(&branch.then_branch) else { return self.refused(expr, RULE) };
        let condition = self.at(&branch.cond, OR);
        let then = self.at(then, TERNARY + 1);
        let other = match &**other {
            Expr::Block(block) => match only_expression(&block.block) {
                Some(other) => self.at(other, TERNARY),
                None => return self.refused(expr, RULE),
            },
            other => self.at(other, TERNARY),
        };
        Printed { text: format!("{condition} ? {then} : {other}"), level: TERNARY }
    }

    fn arguments<'e>(&mut self, arguments: impl Iterator<Item = &'e Expr>) -> Vec<String> {
        arguments
            .map(|argument| {
                let outer = std::mem::replace(&mut self.argument, true);
                let text = self.expression(argument);
                self.argument = outer;
                text
            })
            .collect()
    }

    fn call<'e>(&mut self, expr: &Expr, function: &Expr, arguments: impl Iterator<Item = &'e Expr>) -> Printed {
        let Expr::Path(function) = function else {
            return self.refused(expr, "a call names a function: closures and function values are refused");
        };
        let path = &function.path;
        let Some(last) = path.segments.last() else { return self.refused(expr, "a call names a function") };
        let name = last.ident.to_string();
        if path.get_ident().is_some() && matches!(name.as_str(), "regs" | "shared") {
            return self.refused(
                expr,
                "this declares an array: write it as `let name = regs(0.0f32, N);` or `let name = shared::<f32>(N);`",
            );
        }
        if path.get_ident().is_some_and(|ident| *ident == self.function_name) {
            return self.refused(expr, "recursion is refused: write a loop");
        }
        let generics = self.generics(&last.arguments);
        let arguments: Vec<&Expr> = arguments.collect();
        if effects::takes_any_word(&name) && arguments.first().is_some_and(|first| literals::is_bare(first)) {
            self.errors
                .refuse(arguments[0], "nothing says the type of this: give the literal a suffix (`1u32`, `1.0f32`)");
        }
        let printed = self.arguments(arguments.into_iter());
        if let Some(slot) = self.slots.iter().find(|slot| path.get_ident().is_some() && slot.name == name) {
            let upper = slot.name.to_string().to_uppercase();
            let of_fill = if self.kernel { format!(" {upper}_ARGS") } else { String::new() };
            return Printed::primary(format!("{name}({}{of_fill})", printed.join(", ")));
        }
        // `f32::from_bits(x)`, `KV::from_f32(x)`: an associated function of a type.
        if let Some(owner) = path.segments.iter().rev().nth(1) {
            let owner_name = owner.ident.to_string();
            let is_type = owner_name.starts_with(|c: char| c.is_uppercase()) || self.is_number(&owner_name);
            if is_type {
                let ty =
                    syn::Type::Path(syn::TypePath { attrs: Vec::new(), qself: None, path: owner.ident.clone().into() });
                let Some(ty) = self.types().value(&ty) else { return Printed::primary("") };
                return match name.as_str() {
                    "from_f32" | "from_bits" => Printed::primary(format!("{name}<{ty}>({})", printed.join(", "))),
                    _ => self.refused(expr, "of a type's functions a kernel knows `from_bits` and `from_f32`"),
                };
            }
        }
        self.callee(path);
        Printed::primary(format!("{name}{generics}({})", printed.join(", ")))
    }

    fn is_number(&self, name: &str) -> bool {
        matches!(name, "f32" | "f64" | "u8" | "u16" | "u32" | "u64" | "i8" | "i16" | "i32" | "i64" | "usize" | "isize")
    }

    fn generics(&mut self, arguments: &PathArguments) -> String {
        let PathArguments::AngleBracketed(generics) = arguments else { return String::new() };
        let mut types = Vec::new();
        for argument in &generics.args {
            match argument {
                GenericArgument::Type(ty) => types.extend(self.types().value(ty)),
                other => self
                    .errors
                    .refuse(other, "a call takes type arguments alone: compile-time parameters come from the instance"),
            }
        }
        format!("<{}>", types.join(", "))
    }

    fn method(&mut self, call: &syn::ExprMethodCall) -> Printed {
        let name = call.method.to_string();
        if name == "offset" && call.args.len() == 1 {
            let (base, by) = (self.at(&call.receiver, SUM), self.at(&call.args[0], SUM + 1));
            return Printed { text: format!("{base} + {by}"), level: SUM };
        }
        let receiver = self.expression(&call.receiver);
        let arguments = self.arguments(call.args.iter());
        match methods::find(&name) {
            Some((expected, _)) if expected == arguments.len() => {
                let all: Vec<_> = std::iter::once(receiver).chain(arguments).collect();
                Printed::primary(format!("{name}({})", all.join(", ")))
            }
            _ => {
                let hint = match name.as_str() {
                    "len" => "a handle's length is not known on the GPU: pass it as a parameter",
                    "get" | "get_mut" | "set" => "write `x[i]` and `x[i] = v`",
                    "iter" | "into_iter" | "map" | "sum" => "iterators are refused: write `for i in 0u32..n`",
                    "powi" => "write the product, or `powf`",
                    "into" | "try_into" => "write the conversion: `x as u32`, `F16::from_f32(x)`",
                    "unwrap" | "expect" => "there is no `Option` in a kernel",
                    "step_by" => "write `(a..b).by(step)`",
                    _ => "not a method of the kernel language; it may be an intrinsic: `name(x, …)`",
                };
                self.errors.refuse(&call.method, format!("method `{name}`: {hint}"));
                Printed::primary("")
            }
        }
    }
}

fn strip(expr: &Expr) -> &Expr {
    match expr {
        Expr::Paren(inner) => strip(&inner.expr),
        Expr::Group(inner) => strip(&inner.expr),
        other => other,
    }
}

fn only_expression(block: &Block) -> Option<&Expr> {
    match block.stmts.as_slice() {
        [Stmt::Expr(expr, None)] => Some(expr),
        _ => None,
    }
}

/// The C++ operator and its level; `None` for assignments.
pub fn operator(op: &BinOp) -> Option<(&'static str, u8)> {
    Some(match op {
        BinOp::Add(_) => ("+", SUM),
        BinOp::Sub(_) => ("-", SUM),
        BinOp::Mul(_) => ("*", PRODUCT),
        BinOp::Div(_) => ("/", PRODUCT),
        BinOp::Rem(_) => ("%", PRODUCT),
        BinOp::And(_) => ("&&", AND),
        BinOp::Or(_) => ("||", OR),
        BinOp::BitXor(_) => ("^", BIT_XOR),
        BinOp::BitAnd(_) => ("&", BIT_AND),
        BinOp::BitOr(_) => ("|", BIT_OR),
        BinOp::Shl(_) => ("<<", SHIFT),
        BinOp::Shr(_) => (">>", SHIFT),
        BinOp::Eq(_) => ("==", EQUALITY),
        BinOp::Ne(_) => ("!=", EQUALITY),
        BinOp::Lt(_) => ("<", RELATION),
        BinOp::Le(_) => ("<=", RELATION),
        BinOp::Gt(_) => (">", RELATION),
        BinOp::Ge(_) => (">=", RELATION),
        _ => return None,
    })
}

fn refusal(expr: &Expr) -> &'static str {
    match expr {
        Expr::Closure(_) => "closures are refused: write a `#[device]` function, or a slot",
        Expr::Match(_) => "`match` is refused: write `if … else if … else`",
        Expr::Array(_) | Expr::Repeat(_) => "arrays are refused: write `let name = regs(0.0f32, N);`",
        Expr::Tuple(_) => "tuples are refused: write f32x2(a, b), or two variables",
        Expr::Range(_) => "a range stands in `for i in a..b` alone",
        Expr::Macro(_) => "macros are refused, except `require!(condition)` as a statement",
        Expr::Let(_) => "`if let` and `while let` are refused: there are no enums in a kernel",
        Expr::Try(_) => "`?` is refused: there is no `Result` in a kernel",
        Expr::Unsafe(_) => "`unsafe` is refused: an intrinsic brings its Rust meaning",
        Expr::Block(_) => "a block used as a value is refused: declare `let x: T;` and assign it",
        Expr::Assign(_) => "an assignment is a statement of its own",
        Expr::Async(_) | Expr::Await(_) | Expr::Yield(_) => "a GPU thread runs to its end: no async",
        _ => "the kernel language does not have this expression",
    }
}
