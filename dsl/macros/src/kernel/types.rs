//! Types. A value type has the same name in Rust and in the CUDA prelude; a memory handle becomes a pointer. What is
//! not listed here is refused.

use super::errors::Errors;
use quote::ToTokens;
use std::cell::RefCell;
use std::collections::BTreeMap;
use syn::{GenericArgument, PathArguments, Type};

/// Value types: what a variable, an element or a scalar parameter may be. The prelude defines them under the same
/// names.
const VALUES: &[&str] = &[
    "bool", "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "F16", "BF16", "U32x2", "U32x4", "I32x4",
    "F32x2", "F32x4",
];

/// What a kernel may do with a buffer, and what everybody else may do with it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Weights,
    Input,
    Tiles,
    Output,
    InOut,
    Shared,
}

impl Role {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "Weights" => Self::Weights,
            "Input" => Self::Input,
            "Tiles" => Self::Tiles,
            "Output" => Self::Output,
            "InOut" => Self::InOut,
            "Shared" => Self::Shared,
            _ => return None,
        })
    }
}

/// A type of the kernel language. Element and value types are held by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelType {
    Unit,
    Value(String),
    Memory {
        role: Role,
        element: String,
    },
    /// A register array: owned (`let`), or borrowed by a device function.
    Registers {
        element: String,
        mutable: bool,
    },
    /// `&mut T`: an out-parameter of a device function.
    Reference {
        value: String,
    },
    /// A `#[config]` struct: in the text there are its fields alone.
    Config,
}

impl KernelType {
    /// A number or a vector: what fits in 16 bytes.
    pub fn is_plain(&self) -> bool {
        matches!(self, Self::Value(value) if VALUES.contains(&value.as_str()))
    }

    /// A `#[registers]` or `#[view]` struct: which of them, only rustc knows.
    pub fn is_struct(&self) -> bool {
        matches!(self, Self::Value(value) if is_struct_name(base_name(value)))
    }

    /// `name` declared with this type, as a CUDA parameter or variable.
    pub fn declare(&self, name: &str) -> String {
        match self {
            Self::Unit | Self::Config => format!("void {name}"),
            Self::Value(value) => format!("{value} {name}"),
            Self::Memory { role: Role::Weights, element } => format!("weights<{element}> {name}"),
            Self::Memory { role: Role::Input, element } => format!("const {element}* {name}"),
            Self::Memory { role: Role::Tiles, element } => format!("__grid_constant__ const tiles<{element}> {name}"),
            Self::Memory { element, .. } => format!("{element}* {name}"),
            Self::Registers { element, mutable: true } => format!("{element} (&{name})[{}]", length_of(name)),
            Self::Registers { element, mutable: false } => format!("const {element} (&{name})[{}]", length_of(name)),
            Self::Reference { value } => format!("{value}& {name}"),
        }
    }
}

/// The template parameter that is the length of a register array: `SUMS_LENGTH` of `sums`.
pub fn length_of(array: &str) -> String {
    format!("{}_LENGTH", array.to_uppercase())
}

/// The structs that a function names, each once, with f32 in the place of its own type parameters: a struct's
/// definition is the same for all. That they are such structs is for rustc to check.
#[derive(Default)]
pub struct Structs(RefCell<BTreeMap<String, Type>>);

impl Structs {
    pub fn types(&self) -> Vec<Type> {
        self.0.borrow().values().cloned().collect()
    }
}

/// `KvView` of `KvView<KV>`.
pub fn base_name(spelled: &str) -> &str {
    spelled.split('<').next().unwrap_or(spelled)
}

/// The element types of a struct as a function spells them: `KV` of `KvView<KV>`.
pub fn type_arguments(ty: &Type) -> Vec<&Type> {
    let Type::Path(path) = ty else { return Vec::new() };
    let Some(PathArguments::AngleBracketed(arguments)) = path.path.segments.last().map(|last| &last.arguments) else {
        return Vec::new();
    };
    let types = arguments.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    });
    types.collect()
}

/// A struct's type outside the function: f32 stands for the function's own type parameters.
pub fn outside(ty: &Type, parameters: &[String]) -> Type {
    let Type::Path(path) = ty else { return ty.clone() };
    let Some(name) = path.path.segments.last().map(|last| &last.ident) else { return ty.clone() };
    let arguments: Vec<Type> =
        type_arguments(ty)
            .into_iter()
            .map(|ty| {
                if parameters.contains(&ty.to_token_stream().to_string()) { syn::parse_quote!(f32) } else { ty.clone() }
            })
            .collect();
    if arguments.is_empty() { syn::parse_quote!(#name) } else { syn::parse_quote!(#name<#(#arguments),*>) }
}

/// The name may be a struct's: `Unit`.
pub fn is_struct_name(name: &str) -> bool {
    let foreign = matches!(name, "String" | "Vec" | "Option" | "Result" | "Box" | "Self");
    name.starts_with(|c: char| c.is_ascii_uppercase())
        && name.contains(|c: char| c.is_ascii_lowercase())
        && !foreign
        && name.chars().all(char::is_alphanumeric)
        && !VALUES.contains(&name)
}

/// The type may be that of a compile-time parameter.
pub fn is_constant_type(ty: &str) -> bool {
    matches!(ty, "u32" | "i32" | "f32" | "bool")
}

/// Reads types in the scope of a function's type parameters.
pub struct Types<'a> {
    pub parameters: &'a [String],
    pub structs: &'a Structs,
    pub errors: &'a Errors,
}

impl Types<'_> {
    pub fn read(&self, ty: &Type) -> Option<KernelType> {
        match ty {
            Type::Paren(inner) => self.read(&inner.elem),
            Type::Group(inner) => self.read(&inner.elem),
            Type::Tuple(tuple) if tuple.elems.is_empty() => Some(KernelType::Unit),
            Type::Path(_) => match memory_of(ty) {
                Some((name, element)) if name == "Regs" => {
                    Some(KernelType::Registers { element: self.value(element)?, mutable: true })
                }
                Some((name, element)) if Role::named(&name).is_some() => {
                    let role = Role::named(&name)?;
                    Some(KernelType::Memory { role, element: self.element(element)? })
                }
                _ => self.value(ty).map(KernelType::Value),
            },
            Type::Reference(reference) => {
                let mutable = reference.mutability.is_some();
                match self.read(&reference.elem)? {
                    KernelType::Registers { element, .. } => Some(KernelType::Registers { element, mutable }),
                    KernelType::Value(value) if mutable => Some(KernelType::Reference { value }),
                    _ => {
                        self.errors.refuse(
                            ty,
                            "a reference may be `&mut T` of a value, or `&Regs<T>` / `&mut Regs<T>`: \
                             pass values and memory handles by value",
                        );
                        None
                    }
                }
            }
            _ => {
                self.errors.refuse(ty, format!("{}: a kernel knows values, memory handles and `Regs<T>`", shape(ty)));
                None
            }
        }
    }

    /// Reads an element of memory: any value type but a struct.
    pub fn element(&self, ty: &Type) -> Option<String> {
        let name = self.value(ty)?;
        if is_struct_name(base_name(&name)) && !self.parameters.contains(&name) {
            self.errors.refuse(ty, "a struct lives in registers: memory holds numbers and vectors");
            return None;
        }
        Some(name)
    }

    /// Reads a value type.
    pub fn value(&self, ty: &Type) -> Option<String> {
        let name = ty.to_token_stream().to_string();
        if VALUES.contains(&name.as_str()) || self.parameters.contains(&name) {
            return Some(name);
        }
        if let Type::Path(path) = ty
            && path.path.segments.len() == 1
            && let base = path.path.segments[0].ident.to_string()
            && is_struct_name(&base)
        {
            let mut arguments = Vec::new();
            for argument in type_arguments(ty) {
                arguments.push(self.element(argument)?);
            }
            let spelled = if arguments.is_empty() { base.clone() } else { format!("{base}<{}>", arguments.join(", ")) };
            self.structs.0.borrow_mut().entry(base).or_insert_with(|| outside(ty, self.parameters));
            return Some(spelled);
        }
        let hint = match name.as_str() {
            "f64" => "a kernel computes in f32: write `f32`",
            "usize" | "isize" => {
                "the width of `usize` differs between host and GPU: write `u32`, or `u64` for large offsets"
            }
            "u128" | "i128" => "no 128-bit integers on the GPU: write `U32x4` for 16 bytes",
            "char" | "str" | "String" => "no text in a kernel",
            _ => {
                "not a value type of the kernel language: use bool, u8…u64, i8…i64, f32, F16, BF16, U32x2, U32x4, I32x4, F32x2, F32x4, or a `#[registers]` or `#[view]` struct"
            }
        };
        self.errors.refuse(ty, format!("type `{name}`: {hint}"));
        None
    }
}

fn shape(ty: &Type) -> &'static str {
    match ty {
        Type::Array(_) | Type::Slice(_) => "arrays and slices are refused (write `Regs<T>` for registers)",
        Type::Tuple(_) => "tuples are refused (write F32x2, U32x2 … or a `&mut` parameter)",
        Type::Ptr(_) => "raw pointers are refused (write a memory handle such as `Input<f32>`)",
        Type::TraitObject(_) | Type::ImplTrait(_) => "trait objects and `impl Trait` are refused",
        Type::FnPtr(_) => "function pointers are refused (write a slot)",
        _ => "this type is refused",
    }
}

/// `Input<f32>` → (`Input`, `f32`).
fn memory_of(ty: &Type) -> Option<(String, &Type)> {
    let Type::Path(path) = ty else { return None };
    let segment = path.path.segments.last()?;
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return None };
    let mut types = arguments.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    });
    Some((segment.ident.to_string(), types.next()?))
}
