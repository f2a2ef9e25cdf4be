//! Arrays: shared memory and registers, declared by the two calls that are statements of their own.

use super::literals;
use super::printer::{Printer, SharedArray};
use super::types::{KernelType, Role};
use syn::{Expr, ExprCall, GenericArgument, PathArguments, Type};

impl Printer<'_> {
    /// Prints `let name = shared::<T>(N);` or `let name = regs(v, N);`. Returns `false` if `init` is neither.
    pub fn array(&mut self, name: &str, annotation: Option<&Type>, init: &Expr, top_level: bool) -> bool {
        let declared = if let Some(call) = call_of(init, "shared") {
            self.shared_array(name, call, top_level)
        } else if let Some(call) = call_of(init, "regs") {
            self.register_array(name, annotation, call)
        } else {
            return false;
        };
        // A refused declaration still declares its name: one mistake is one error.
        if declared.is_none() {
            self.scopes.declare(name, None, false);
        }
        true
    }

    fn shared_array(&mut self, name: &str, call: &ExprCall, top_level: bool) -> Option<()> {
        let element = match &*call.func {
            Expr::Path(path) => path.path.segments.last().and_then(|segment| match &segment.arguments {
                PathArguments::AngleBracketed(generics) => generics.args.first(),
                _ => None,
            }),
            _ => None,
        };
        let (Some(GenericArgument::Type(element)), 1) = (element, call.args.len()) else {
            self.errors.refuse(call, "write `let tile = shared::<f32>(N);`: the element type, then the length");
            return None;
        };
        if !self.kernel || !top_level {
            self.errors.refuse(
                call,
                "shared memory is declared at the top level of a kernel's body: pass it to a device function as `Shared<T>`",
            );
            return None;
        }
        let element = self.types().element(element)?;
        let len = self.expression(&call.args[0]);
        let ty = KernelType::Memory { role: Role::Shared, element: element.clone() };
        let printed = self.scopes.declare(name, Some(ty), false);
        if self.dynamic_shared {
            // The offsets are lines of the instance's header.
            self.line(&format!("{element}* {printed} = ({element}*)(dynamic_shared + {printed}_at);"));
        } else {
            self.line(&format!("__shared__ __align__(16) {element} {printed}[{len}];"));
        }
        self.shared.push(SharedArray { name: printed, element, len: call.args[0].clone() });
        Some(())
    }

    fn register_array(&mut self, name: &str, annotation: Option<&Type>, call: &ExprCall) -> Option<()> {
        let [value, len] = call.args.iter().collect::<Vec<_>>()[..] else {
            self.errors.refuse(call, "write `regs(value, N)`: the value every element starts with, then the length");
            return None;
        };
        let element = match annotation {
            Some(ty) => match self.types().read(ty)? {
                KernelType::Registers { element, .. } => Some(element),
                _ => None,
            },
            None if literals::is_bare(value) => None,
            None => match self.scopes.type_of(value) {
                Some(KernelType::Value(element)) => Some(element),
                _ => None,
            },
        };
        let Some(element) = element else {
            self.errors
                .refuse(value, "nothing says the element type: write `regs(0.0f32, N)` or `let x: Regs<f32> = …`");
            return None;
        };
        let (text, len) = (self.expression(value), self.expression(len));
        let ty = KernelType::Registers { element: element.clone(), mutable: true };
        let printed = self.scopes.declare(name, Some(ty), false);
        if literals::is_zero(value) {
            self.line(&format!("{element} {printed}[{len}] = {{}};"));
        } else {
            self.line(&format!("{element} {printed}[{len}];"));
            self.line(&format!("fill({printed}, {text});"));
        }
        Some(())
    }
}

/// The call `name(…)` or `name::<T>(…)`, if `expr` is one.
pub fn call_of<'e>(expr: &'e Expr, name: &str) -> Option<&'e ExprCall> {
    match expr {
        Expr::Call(call) => match &*call.func {
            Expr::Path(path) if path.path.segments.len() == 1 && path.path.segments[0].ident == name => Some(call),
            _ => None,
        },
        _ => None,
    }
}
