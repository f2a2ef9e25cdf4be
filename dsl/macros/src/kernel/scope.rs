//! Names in scope: their spelling in the printed text, and their type where the source says it.
//!
//! This is not type inference. The type is known only for what is declared with one, for literals with a suffix and for
//! casts; it is asked for in two places where `auto` would not do (the variable of a loop that starts at a bare
//! literal, and the element of a register array), and an unknown one is refused there with what to write.

use super::methods::{self, Gives};
use super::types::KernelType;
use std::collections::{HashMap, HashSet};
use syn::{BinOp, Expr, Lit};

#[derive(Clone)]
pub struct Binding {
    pub printed: String,
    pub ty: Option<KernelType>,
    /// May change after its declaration.
    pub mutable: bool,
}

/// One block of the source.
#[derive(Default)]
struct Scope {
    bindings: HashMap<String, Binding>,
    /// Every spelling declared here: a shadowed variable is still declared in the printed block.
    printed: HashSet<String>,
}

#[derive(Default)]
pub struct Scopes(Vec<Scope>);

impl Scopes {
    pub fn enter(&mut self) {
        self.0.push(Scope::default());
    }

    pub fn leave(&mut self) {
        self.0.pop();
    }

    pub fn find(&self, name: &str) -> Option<&Binding> {
        self.0.iter().rev().find_map(|scope| scope.bindings.get(name))
    }

    /// Binds `name` and returns its printed spelling. Rust shadows freely; in C++ `auto x = x + 1` reads the new `x`.
    /// So a shadowing name, and one that hides a function it is initialised from, gets a number.
    pub fn declare(&mut self, name: &str, ty: Option<KernelType>, hides_call: bool) -> String {
        let base = spelling(name);
        let taken = |spelling: &str| self.0.iter().any(|scope| scope.printed.contains(spelling));
        let mut printed = base.clone();
        let mut number = 1;
        while taken(&printed) || (hides_call && printed == name) {
            number += 1;
            printed = format!("{base}_{number}");
        }
        if let Some(scope) = self.0.last_mut() {
            scope.printed.insert(printed.clone());
            scope.bindings.insert(name.to_string(), Binding { printed: printed.clone(), ty, mutable: false });
        }
        printed
    }

    /// Marks the variable `name` as one that changes.
    pub fn set_mutable(&mut self, name: &str) {
        if let Some(binding) = self.0.iter_mut().rev().find_map(|scope| scope.bindings.get_mut(name)) {
            binding.mutable = true;
        }
    }

    /// The expression has the same value whenever it is evaluated: literals, variables that do not change, arithmetic.
    pub fn is_stable(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Lit(_) => true,
            Expr::Path(path) => {
                path.path.get_ident().is_none_or(|name| self.find(&name.to_string()).is_some_and(|b| !b.mutable))
            }
            Expr::Paren(inner) => self.is_stable(&inner.expr),
            Expr::Group(inner) => self.is_stable(&inner.expr),
            Expr::Unary(unary) => self.is_stable(&unary.expr),
            Expr::Cast(cast) => self.is_stable(&cast.expr),
            Expr::Field(field) => self.is_stable(&field.base),
            Expr::Binary(binary) => self.is_stable(&binary.left) && self.is_stable(&binary.right),
            Expr::MethodCall(call) => self.is_stable(&call.receiver) && call.args.iter().all(|a| self.is_stable(a)),
            _ => false,
        }
    }

    /// The type of an expression, where the source says it.
    pub fn type_of(&self, expr: &Expr) -> Option<KernelType> {
        let value = |name: &str| Some(KernelType::Value(name.to_string()));
        match expr {
            Expr::Paren(inner) => self.type_of(&inner.expr),
            Expr::Group(inner) => self.type_of(&inner.expr),
            Expr::Unary(unary) => self.type_of(&unary.expr),
            Expr::Lit(literal) => match &literal.lit {
                Lit::Int(int) if !int.suffix().is_empty() => value(int.suffix()),
                Lit::Float(_) => value("f32"),
                Lit::Bool(_) => value("bool"),
                _ => None,
            },
            Expr::Path(path) => match path.path.get_ident() {
                Some(name) => self.find(&name.to_string())?.ty.clone(),
                None => {
                    let name = joined(&path.path);
                    match name.split_once("::") {
                        Some((ty, "ZERO")) => value(ty),
                        Some((ty @ ("f32" | "u32" | "i32" | "u64"), _)) => value(ty),
                        _ => None,
                    }
                }
            },
            Expr::Cast(cast) => match &*cast.ty {
                syn::Type::Path(path) => value(&path.path.get_ident()?.to_string()),
                _ => None,
            },
            Expr::Binary(binary) => match binary.op {
                BinOp::Shl(_) | BinOp::Shr(_) => self.type_of(&binary.left),
                BinOp::Add(_)
                | BinOp::Sub(_)
                | BinOp::Mul(_)
                | BinOp::Div(_)
                | BinOp::Rem(_)
                | BinOp::BitAnd(_)
                | BinOp::BitOr(_)
                | BinOp::BitXor(_) => self.type_of(&binary.left).or_else(|| self.type_of(&binary.right)),
                _ => value("bool"),
            },
            Expr::Index(index) => match self.type_of(&index.expr)? {
                KernelType::Memory { element, .. } | KernelType::Registers { element, .. } => value(&element),
                _ => None,
            },
            Expr::Field(field) => match self.type_of(&field.base)? {
                KernelType::Value(vector) if vector.ends_with("32x2") || vector.ends_with("32x4") => {
                    value(&vector[..3].to_lowercase())
                }
                _ => None,
            },
            Expr::MethodCall(call) => match call.method.to_string().as_str() {
                "offset" => self.type_of(&call.receiver),
                name => match methods::find(name)?.1 {
                    Gives::Receiver => self.type_of(&call.receiver),
                    Gives::F32 => value("f32"),
                    Gives::U32 => value("u32"),
                    Gives::Bool => value("bool"),
                },
            },
            Expr::Struct(literal) => value(&literal.path.get_ident()?.to_string()),
            Expr::Call(call) => match &*call.func {
                Expr::Path(path) => match path.path.segments.last()?.ident.to_string().as_str() {
                    "thread_idx" | "lane_id" | "warp_id" | "block_dim" | "block_idx" | "block_idx_y"
                    | "block_idx_z" | "grid_dim" | "grid_dim_y" | "grid_dim_z" => value("u32"),
                    vector @ ("u32x2" | "u32x4" | "i32x4" | "f32x2" | "f32x4") => {
                        value(&vector.replacen(['u', 'i', 'f'], &vector[..1].to_uppercase(), 1))
                    }
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }
}

/// A name as the text may use it: one that means something else there gets an underscore.
pub fn spelling(name: &str) -> String {
    if methods::reserved(name) { format!("{name}_") } else { name.to_string() }
}

/// `a::b::c`, generics left out.
pub fn joined(path: &syn::Path) -> String {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>().join("::")
}
