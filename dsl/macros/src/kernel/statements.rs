//! Statements: declarations, assignments, loops and branches, one printed line each.

use super::expressions::operator;
use super::literals;
use super::printer::Printer;
use super::types::KernelType;
use quote::ToTokens;
use syn::visit::Visit;
use syn::{Attribute, BinOp, Block, Expr, ExprCall, ExprForLoop, ExprIf, Local, Meta, Pat, RangeLimits, Stmt};

impl Printer<'_> {
    /// The statements of a function's body. `returns`: the last expression is the result.
    pub fn body(&mut self, block: &Block, returns: bool) {
        for (index, statement) in block.stmts.iter().enumerate() {
            let last = index + 1 == block.stmts.len();
            match statement {
                Stmt::Expr(expr, None) if last && returns => self.tail(expr),
                _ => self.statement(statement, true),
            }
        }
        self.close(block.brace_token.span.close().start().line);
    }

    /// A device function's result: `if` branches return each their own.
    fn tail(&mut self, expr: &Expr) {
        self.lead_in(first_line(expr));
        let text = self.expression(expr);
        self.line(&format!("return {text};"));
        self.trail(last_line(expr));
    }

    fn block(&mut self, block: &Block) {
        self.trail(block.brace_token.span.open().start().line);
        self.indented(|printer| {
            for statement in &block.stmts {
                printer.statement(statement, false);
            }
            printer.close(block.brace_token.span.close().start().line);
        });
    }

    fn statement(&mut self, statement: &Stmt, top_level: bool) {
        self.lead_in(first_line(statement));
        match statement {
            Stmt::Local(local) => self.local(local, top_level),
            Stmt::Expr(expr, _) => self.expression_statement(expr),
            Stmt::Macro(call) if call.mac.path.is_ident("require") => self.require(&call.mac),
            Stmt::Macro(call) => {
                self.errors.refuse(&call.mac.path, "macros are refused, except `require!(condition)` as a statement");
            }
            Stmt::Item(syn::Item::Const(constant)) => self.constant(constant, top_level),
            Stmt::Item(item) => {
                self.errors.refuse(item, "of items, a kernel's body may hold `const NAME: u32 = …;` alone")
            }
        }
        self.trail(last_line(statement));
    }

    /// `const LANES: u32 = 32;`
    fn constant(&mut self, constant: &syn::ItemConst, top_level: bool) {
        let ty = self.types().value(&constant.ty);
        let value = self.expression(&constant.expr);
        let value_type = ty.clone().map(KernelType::Value);
        let name = self.scopes.declare(&constant.ident.to_string(), value_type, false);
        self.line(&format!("constexpr {} {name} = {value};", ty.unwrap_or_default()));
        if top_level {
            self.constants.push(constant.clone());
        }
    }

    /// `require!(K % 32 == 0)`: a condition on compile-time parameters.
    fn require(&mut self, call: &syn::Macro) {
        match call.parse_body::<Expr>() {
            Ok(condition) => {
                let text = self.expression(&condition);
                self.line(&format!("static_assert({text}, \"{text}\");"));
            }
            Err(error) => self.errors.push(error),
        }
    }

    fn local(&mut self, local: &Local, top_level: bool) {
        self.refuse_attributes(&local.attrs);
        let (pattern, annotation) = match &local.pat {
            Pat::Type(typed) => (&*typed.pat, Some(&*typed.ty)),
            pattern => (pattern, None),
        };
        if let Some((token, _)) = local.init.as_ref().and_then(|init| init.diverge.as_ref()) {
            self.errors.refuse(token, "`let … else` is refused: write `if`");
        }
        let init = local.init.as_ref().map(|init| &*init.expr);
        let (name, mutable) = match pattern {
            Pat::Ident(name) if name.by_ref.is_none() && name.subpat.is_none() => {
                (name.ident.to_string(), name.mutability.is_some())
            }
            Pat::Wild(_) => {
                if let Some(init) = init {
                    let text = self.expression(init);
                    self.line(&format!("{text};"));
                }
                return;
            }
            other => return self.errors.refuse(other, "a `let` binds one plain name: patterns are refused"),
        };
        if init.is_some_and(|init| self.array(&name, annotation, init, top_level)) {
            return;
        }
        let declared = annotation.and_then(|ty| self.types().read(ty));
        match (init, declared) {
            (None, None) if annotation.is_none() => {
                self.errors.refuse(local, "a variable without a value needs its type: `let x: f32;`");
                self.scopes.declare(&name, None, false);
            }
            (None, ty) => {
                let printed = self.scopes.declare(&name, ty.clone(), false);
                self.scopes.set_mutable(&name);
                self.line(&format!("{};", ty.unwrap_or(KernelType::Unit).declare(&printed)));
            }
            (Some(init), ty) => {
                if annotation.is_none() && literals::is_bare(init) {
                    self.errors.refuse(
                        init,
                        "nothing says the type of this: write `let x: u32 = …`, or give the literal a suffix (`0u32`, `0.0f32`)",
                    );
                }
                let declared = ty.clone().or_else(|| self.scopes.type_of(init));
                let value = self.expression(init);
                let printed = self.scopes.declare(&name, declared, calls(init, &name));
                if mutable {
                    self.scopes.set_mutable(&name);
                }
                let left = ty.map_or_else(|| format!("auto {printed}"), |ty| ty.declare(&printed));
                self.line(&format!("{left} = {value};"));
            }
        }
    }

    fn expression_statement(&mut self, expr: &Expr) {
        match expr {
            Expr::Assign(assign) => {
                let place = self.place(&assign.left);
                let value = self.expression(&assign.right);
                self.line(&format!("{place} = {value};"));
            }
            Expr::Binary(binary) if operator(&binary.op).is_none() => {
                let symbol = assignment(&binary.op);
                let place = self.place(&binary.left);
                let value = self.expression(&binary.right);
                self.line(&format!("{place} {symbol} {value};"));
            }
            Expr::ForLoop(each) => self.for_loop(each),
            Expr::While(each) => {
                let unroll = self.unroll(&each.attrs);
                self.refuse_label(each.label.as_ref());
                let condition = self.expression(&each.cond);
                self.pragma(unroll);
                self.line(&format!("while ({condition}) {{"));
                self.block(&each.body);
                self.line("}");
            }
            Expr::Loop(each) => {
                self.refuse_label(each.label.as_ref());
                self.line("while (true) {");
                self.block(&each.body);
                self.line("}");
            }
            Expr::If(branch) => self.branch(branch, ""),
            Expr::Block(block) => {
                self.refuse_label(block.label.as_ref());
                self.line("{");
                self.block(&block.block);
                self.line("}");
            }
            Expr::Break(leave) => {
                if leave.label.is_some() || leave.expr.is_some() {
                    self.errors.refuse(expr, "`break` takes no label and no value");
                }
                self.line("break;");
            }
            Expr::Continue(next) => {
                if next.label.is_some() {
                    self.errors.refuse(expr, "`continue` takes no label");
                }
                self.line("continue;");
            }
            Expr::Return(leave) => {
                let value = leave.expr.as_ref().map(|value| self.expression(value));
                self.line(&value.map_or("return;".to_string(), |value| format!("return {value};")));
            }
            Expr::Macro(call) if call.mac.path.is_ident("require") => self.require(&call.mac),
            Expr::Call(_) | Expr::MethodCall(_) => {
                let text = self.expression(expr);
                self.line(&format!("{text};"));
            }
            Expr::Paren(inner) => self.expression_statement(&inner.expr),
            other => {
                // Prints the refusal of what is not an expression of the language; the rest has no effect.
                let before = self.expression(other);
                if !before.is_empty() {
                    self.errors.refuse(other, "this statement has no effect");
                }
            }
        }
    }

    /// The left side of an assignment.
    fn place(&mut self, expr: &Expr) -> String {
        let root = match expr {
            // A view's handles may be written through, so it is `mut` in Rust; its fields stay what they are.
            Expr::Field(field) if self.is_unchanging(&field.base) => {
                self.errors.refuse(expr, "declare the struct `mut` to change its fields");
                return String::new();
            }
            Expr::Path(_) | Expr::Index(_) | Expr::Field(_) | Expr::Unary(_) => expr,
            Expr::Paren(inner) => return self.place(&inner.expr),
            other => {
                self.errors.refuse(other, "assign to a variable, an element `x[i]` or a vector's field");
                return String::new();
            }
        };
        self.expression(root)
    }

    /// A variable, or a field of one, that was declared without `mut`.
    fn is_unchanging(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Path(path) => {
                path.path.get_ident().and_then(|name| self.scopes.find(&name.to_string())).is_some_and(|binding| {
                    !binding.mutable && !matches!(binding.ty, Some(KernelType::Reference { .. }))
                })
            }
            Expr::Field(field) => self.is_unchanging(&field.base),
            _ => false,
        }
    }

    fn branch(&mut self, branch: &ExprIf, lead: &str) {
        let condition = self.expression(&branch.cond);
        self.line(&format!("{lead}if ({condition}) {{"));
        self.block(&branch.then_branch);
        match branch.else_branch.as_ref().map(|(_, other)| &**other) {
            None => self.line("}"),
            Some(Expr::If(next)) => self.branch(next, "} else "),
            Some(Expr::Block(other)) => {
                self.line("} else {");
                self.block(&other.block);
                self.line("}");
            }
            Some(other) => self.errors.refuse(other, "`else` is followed by a block or an `if`"),
        }
    }

    /// `for i in a..b` and `for i in (a..b).by(step)`.
    fn for_loop(&mut self, each: &ExprForLoop) {
        const RULE: &str = "a loop runs over `a..b` or `(a..b).by(step)`";
        self.refuse_label(each.label.as_ref());
        let unroll = self.unroll(&each.attrs);
        let (range, step) = match strip(&each.expr) {
            Expr::MethodCall(call) if call.method == "by" && call.args.len() == 1 => {
                (strip(&call.receiver), Some(&call.args[0]))
            }
            Expr::MethodCall(call) if call.method == "step_by" || call.method == "rev" => {
                let instead = if call.method == "rev" { "count up and subtract" } else { "write `(a..b).by(step)`" };
                return self.errors.refuse(&call.method, format!("{RULE}: {instead}"));
            }
            other => (other, None),
        };
        let Expr::Range(range) = range else { return self.errors.refuse(&each.expr, RULE) };
        let (Some(start), Some(end)) = (&range.start, &range.end) else { return self.errors.refuse(range, RULE) };
        if let RangeLimits::Closed(token) = &range.limits {
            return self.errors.refuse(token, "`..=` is refused: write `a..b + 1`");
        }
        let name = match &*each.pat {
            Pat::Ident(name) if name.mutability.is_none() => Some(name.ident.to_string()),
            Pat::Wild(_) => None,
            other => return self.errors.refuse(other, "a loop variable is a plain name that the body does not change"),
        };
        let bound_type = [Some(&**start), Some(&**end), step]
            .into_iter()
            .flatten()
            .find_map(|bound| if literals::is_bare(bound) { None } else { self.scopes.type_of(bound) });
        let declared = match &bound_type {
            Some(KernelType::Value(ty)) => ty.clone(),
            _ if !literals::is_bare(start) => "auto".to_string(),
            _ => return self.errors.refuse(start, "nothing says the loop variable's type: write `0u32..n`"),
        };
        let first = self.expression(start);
        // A bound's variable stands before the loop, beside those of other loops.
        let base = name.as_deref().unwrap_or("repeat");
        let (last, by) = (self.bound(end, base, "end"), step.map(|step| self.bound(step, base, "step")));
        self.scopes.enter();
        self.pragma(unroll);
        let i = self.scopes.declare(base, bound_type, false);
        let advance = by.map_or(format!("++{i}"), |by| format!("{i} += {by}"));
        self.line(&format!("for ({declared} {i} = {first}; {i} < {last}; {advance}) {{"));
        self.block(&each.body);
        self.line("}");
        self.scopes.leave();
    }

    /// A loop's bound or step. Rust evaluates it once, C++ in every turn: one that could change is put into a variable.
    fn bound(&mut self, expr: &Expr, base: &str, what: &str) -> String {
        let text = self.expression(expr);
        if !self.scopes.is_stable(expr) {
            let name = self.scopes.declare(&format!("{base}_{what}"), None, false);
            self.line(&format!("auto {name} = {text};"));
            return name;
        }
        match strip(expr) {
            Expr::Binary(binary)
                if operator(&binary.op).is_some_and(|(_, l)| l <= super::expressions::level::RELATION) =>
            {
                format!("({text})")
            }
            _ => text,
        }
    }

    fn pragma(&mut self, unroll: Option<String>) {
        if let Some(unroll) = unroll {
            self.line(&unroll);
        }
    }

    /// `#[unroll]`, `#[unroll(4)]` on a loop.
    fn unroll(&mut self, attributes: &[Attribute]) -> Option<String> {
        let mut found = None;
        for attribute in attributes {
            match &attribute.meta {
                Meta::Path(path) if path.is_ident("unroll") => found = Some("#pragma unroll".to_string()),
                Meta::List(list) if list.path.is_ident("unroll") => match list.parse_args::<syn::LitInt>() {
                    Ok(times) => found = Some(format!("#pragma unroll {}", times.base10_digits())),
                    Err(error) => self.errors.push(error),
                },
                _ => self.refuse_attributes(std::slice::from_ref(attribute)),
            }
        }
        found
    }

    fn refuse_attributes(&self, attributes: &[Attribute]) {
        for attribute in attributes {
            self.errors.refuse(attribute, "the only attribute inside a kernel is `#[unroll]` on a loop");
        }
    }

    fn refuse_label(&self, label: Option<&syn::Label>) {
        if let Some(label) = label {
            self.errors.refuse(label, "labels are refused: use a flag, or a device function that returns");
        }
    }
}

/// A node's own span covers its first token alone on a stable compiler, so its lines are read off its tokens.
fn first_line(node: &impl ToTokens) -> usize {
    node.to_token_stream().into_iter().next().map_or(0, |token| token.span().start().line)
}

fn last_line(node: &impl ToTokens) -> usize {
    node.to_token_stream().into_iter().last().map_or(0, |token| token.span().end().line)
}

fn strip(expr: &Expr) -> &Expr {
    match expr {
        Expr::Paren(inner) => strip(&inner.expr),
        Expr::Group(inner) => strip(&inner.expr),
        other => other,
    }
}

/// `expr` calls a function called `name`.
fn calls(expr: &Expr, name: &str) -> bool {
    struct Finder<'n>(&'n str, bool);
    impl<'ast> Visit<'ast> for Finder<'_> {
        fn visit_expr_call(&mut self, call: &'ast ExprCall) {
            if let Expr::Path(path) = &*call.func {
                self.1 |= path.path.is_ident(self.0);
            }
            syn::visit::visit_expr_call(self, call);
        }
    }
    let mut finder = Finder(name, false);
    finder.visit_expr(expr);
    finder.1
}

fn assignment(op: &BinOp) -> &'static str {
    match op {
        BinOp::AddAssign(_) => "+=",
        BinOp::SubAssign(_) => "-=",
        BinOp::MulAssign(_) => "*=",
        BinOp::DivAssign(_) => "/=",
        BinOp::RemAssign(_) => "%=",
        BinOp::BitXorAssign(_) => "^=",
        BinOp::BitAndAssign(_) => "&=",
        BinOp::BitOrAssign(_) => "|=",
        BinOp::ShlAssign(_) => "<<=",
        BinOp::ShrAssign(_) => ">>=",
        _ => "=",
    }
}
