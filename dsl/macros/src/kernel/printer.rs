//! The printer's state, and what both kinds of function share: the parameter list, the text, the comments.

use super::comments::Comments;
use super::errors::Errors;
use super::function::{Function, Slot};
use super::scope::Scopes;
use super::types::{KernelType, Structs, Types};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use syn::Expr;

/// A shared array, as declared in the kernel's body.
pub struct SharedArray {
    pub name: String,
    pub element: String,
    pub len: Expr,
}

pub struct Printer<'a> {
    pub errors: &'a Errors,
    pub function_name: String,
    pub slots: &'a [Slot],
    /// Slots that a kernel passes to a device function.
    pub passed: BTreeSet<String>,
    structs: &'a Structs,
    /// The body of a kernel, which may declare shared arrays at its top level.
    pub kernel: bool,
    pub dynamic_shared: bool,
    pub scopes: Scopes,
    pub shared: Vec<SharedArray>,
    /// Constants of the body, which the length of a shared array may use.
    pub constants: Vec<syn::ItemConst>,
    /// Inside the arguments of a call, where `&mut name` is allowed.
    pub argument: bool,
    type_parameters: Vec<String>,
    callees: BTreeMap<String, syn::Path>,
    comments: Comments,
    out: String,
    indent: usize,
    /// Line of the source that was printed last, to keep its blank lines.
    last_line: usize,
}

/// What came out of a body.
pub struct Body {
    pub text: String,
    pub callees: Vec<syn::Path>,
    /// Structs that it names.
    pub structs: Vec<syn::Type>,
    pub shared: Vec<SharedArray>,
    pub constants: Vec<syn::ItemConst>,
}

impl<'a> Printer<'a> {
    pub fn new(function: &Function, slots: &'a [Slot], kernel: bool, structs: &'a Structs, errors: &'a Errors) -> Self {
        let mut scopes = Scopes::default();
        scopes.enter();
        for config in &function.configs {
            scopes.declare(&config.name.to_string(), Some(KernelType::Config), false);
        }
        for constant in &function.constants {
            scopes.declare(&constant.name.to_string(), Some(KernelType::Value(constant.ty.clone())), false);
        }
        for param in &function.params {
            scopes.declare(&param.name.to_string(), Some(param.ty.clone()), false);
            if param.mutable {
                scopes.set_mutable(&param.name.to_string());
            }
        }
        // A kernel's slots are functions of the source text; a device function's are parameters.
        for slot in slots.iter().filter(|_| !kernel) {
            scopes.declare(&slot.name.to_string(), None, false);
        }
        let braces = function.item.block.brace_token.span;
        Self {
            errors,
            function_name: function.item.sig.ident.to_string(),
            slots,
            kernel,
            passed: BTreeSet::new(),
            structs,
            dynamic_shared: false,
            scopes,
            shared: Vec::new(),
            constants: Vec::new(),
            argument: false,
            type_parameters: function.types.clone(),
            callees: BTreeMap::new(),
            comments: Comments::of_group(braces.join()),
            out: String::new(),
            indent: 1,
            last_line: braces.open().start().line,
        }
    }

    pub fn finish(self) -> Body {
        let passed = self.slots.iter().filter(|slot| self.passed.contains(&slot.name.to_string()));
        Body {
            text: passed.map(callable).collect::<String>() + &self.out,
            structs: self.structs.types(),
            callees: self.callees.into_values().collect(),
            shared: self.shared,
            constants: self.constants,
        }
    }

    pub fn types(&self) -> Types<'_> {
        Types { parameters: &self.type_parameters, structs: self.structs, errors: self.errors }
    }

    /// Notes a function that is called: its definition becomes part of the source text.
    pub fn callee(&mut self, path: &syn::Path) {
        let mut path = path.clone();
        for segment in &mut path.segments {
            segment.arguments = syn::PathArguments::None;
        }
        self.callees.entry(super::scope::joined(&path)).or_insert(path);
    }

    pub fn line(&mut self, text: &str) {
        self.out.push_str(&"    ".repeat(self.indent));
        self.out.push_str(text);
        self.out.push('\n');
    }

    pub fn indented(&mut self, body: impl FnOnce(&mut Self)) {
        self.indent += 1;
        self.scopes.enter();
        body(self);
        self.scopes.leave();
        self.indent -= 1;
    }

    /// Prints the comments and the blank line that stand before the source line `line`.
    pub fn lead_in(&mut self, line: usize) {
        for (at, comment) in self.comments.before(line) {
            self.blank_before(at);
            self.line(&comment);
            self.last_line = at;
        }
        self.blank_before(line);
        self.last_line = line;
    }

    fn blank_before(&mut self, line: usize) {
        let opening = self.out.is_empty() || self.out.ends_with("{\n") || self.out.ends_with("\n\n");
        if line > self.last_line + 1 && !opening {
            self.out.push('\n');
        }
    }

    /// Comments left before a closing brace.
    pub fn close(&mut self, line: usize) {
        for (at, comment) in self.comments.before(line) {
            self.blank_before(at);
            self.line(&comment);
            self.last_line = at;
        }
        self.last_line = line;
    }

    /// Puts the comment behind the code of source line `line` behind the printed line.
    pub fn trail(&mut self, line: usize) {
        self.last_line = line;
        if let Some(comment) = self.comments.trailing(line) {
            self.out.truncate(self.out.trim_end_matches('\n').len());
            self.out.push_str("  ");
            self.out.push_str(&comment);
            self.out.push('\n');
        }
    }
}

/// A kernel's slot as a value, with the launch arguments of what fills it: what a device function can take.
fn callable(slot: &Slot) -> String {
    let declared: Vec<_> = slot.params.iter().map(|(name, ty)| format!("{} {name}", ty.to_token_stream())).collect();
    let names: Vec<_> = slot.params.iter().map(|(name, _)| name.to_string()).collect();
    let (name, upper) = (&slot.name, slot.name.to_string().to_uppercase());
    let (declared, names) = (declared.join(", "), names.join(", "));
    format!("    auto {name}_slot = [=]({declared}) {{ return {name}({names} {upper}_ARGS); }};\n")
}
