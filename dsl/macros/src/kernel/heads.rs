//! The printed function around its body: documentation, qualifiers, parameters.

use super::function::{self, Function, Param, Slot};
use super::printer::{Body, Printer};
use super::scope::spelling;
use super::types::{KernelType, length_of};
use syn::{Attribute, Expr, ItemFn};

/// The lines of an item's documentation.
pub fn documentation(attributes: &[Attribute]) -> Vec<String> {
    let mut lines = Vec::new();
    for attribute in attributes {
        if let syn::Meta::NameValue(meta) = &attribute.meta
            && meta.path.is_ident("doc")
            && let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &meta.value
        {
            lines.extend(text.value().split('\n').map(|line| line.strip_prefix(' ').unwrap_or(line).to_string()));
        }
    }
    lines
}

fn comment_lines(item: &ItemFn) -> String {
    documentation(&item.attrs).iter().map(|line| format!("// {line}").trim_end().to_string() + "\n").collect()
}

/// A head that fits the line, or one parameter a line.
fn head(before: &str, parameters: &[String], after: &str) -> String {
    let flat = format!("{before}({}{after}", parameters.join(", "));
    if flat.len() <= 110 { flat } else { format!("{before}(\n    {}{after}", parameters.join(",\n    ")) }
}

fn declarations(params: &[Param]) -> Vec<String> {
    params.iter().map(|param| param.ty.declare(&spelling(&param.name.to_string()))).collect()
}

/// The operands of `__launch_bounds__`.
pub fn launch_bounds(printer: &mut Printer<'_>, block: &Expr, attribute: &function::Attribute) -> String {
    let block = printer.expression(block);
    match &attribute.min_blocks {
        Some(blocks) => format!("{block}, {}", printer.expression(blocks)),
        None => block,
    }
}

/// A kernel's text, around the views that it takes: a launch gives their fields, which only rustc knows.
pub enum KernelPart<'a> {
    Text(String),
    Params(&'a Param),
    Fields(&'a Param),
}

pub fn kernel_text<'a>(
    function: &'a Function,
    attribute: &function::Attribute,
    bounds: &str,
    body: &Body,
) -> Vec<KernelPart<'a>> {
    let cluster = if attribute.cluster.is_some() { "CLUSTER " } else { "" };
    let before =
        format!("extern \"C\" __global__ void {cluster}__launch_bounds__({bounds}) {}", function.item.sig.ident);
    let slots: String =
        attribute.slots.iter().map(|slot| format!(" {}_PARAMS", slot.name.to_string().to_uppercase())).collect();
    let after = format!("{slots}) {{\n");
    let comments = comment_lines(function.item);
    if !function.params.iter().any(|param| param.ty.is_struct()) {
        let head = head(&before, &declarations(&function.params), &after);
        return vec![KernelPart::Text(format!("{comments}{head}{}}}\n", body.text))];
    }
    let mut parts = Vec::new();
    let mut text = format!("{comments}{before}(\n    ");
    for (number, param) in function.params.iter().enumerate() {
        text += if number > 0 { ",\n    " } else { "" };
        parts.push(KernelPart::Text(std::mem::take(&mut text)));
        parts.push(KernelPart::Params(param));
    }
    text = after;
    for param in function.params.iter().filter(|param| param.ty.is_struct()) {
        text += &format!("    {} = {{", param.ty.declare(&spelling(&param.name.to_string())));
        parts.push(KernelPart::Text(std::mem::take(&mut text)));
        parts.push(KernelPart::Fields(param));
        text = "};\n".to_string();
    }
    parts.push(KernelPart::Text(format!("{text}{}}}\n", body.text)));
    parts
}

pub fn device_text(function: &Function, slots: &[Slot], body: &Body) -> String {
    let classes = slots.iter().map(|slot| slot_class(&slot.name.to_string()));
    let classes = function.types.iter().cloned().chain(classes).map(|class| format!("class {class}"));
    // A register array comes with its length: whoever takes it may pass it on to what asks for that.
    let arrays = function.params.iter().filter(|param| matches!(param.ty, KernelType::Registers { .. }));
    let lengths = arrays.map(|param| format!("u32 {}", length_of(&spelling(&param.name.to_string()))));
    let taken: Vec<_> = classes.chain(lengths).collect();
    let template = if taken.is_empty() { String::new() } else { format!("template <{}>\n", taken.join(", ")) };
    let of_slots = slots.iter().map(|Slot { name, .. }| format!("{} {name}", slot_class(&name.to_string())));
    let parameters: Vec<_> = of_slots.chain(declarations(&function.params)).collect();
    let before =
        format!("__device__ __forceinline__ {}", function.output.declare(&function.item.sig.ident.to_string()));
    let head = head(&before, &parameters, ") {\n");
    format!("{}{template}{head}{}}}\n", comment_lines(function.item), body.text)
}

/// `DenseSideSlot` for the slot `dense_side`: the class of what the caller passes.
fn slot_class(name: &str) -> String {
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').filter(|word| !word.is_empty()).map(capital).chain(["Slot".to_string()]).collect()
}
