//! Compile-time parameters and element types as values: what an instance chooses, and what a kernel's definition
//! computes with.

use crate::elements::ElementType;

/// Value of a compile-time parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConstantValue {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
}

impl ConstantValue {
    pub(crate) fn ty(self) -> &'static str {
        match self {
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
        }
    }

    pub(crate) fn spelling(self) -> String {
        match self {
            Self::U32(v) => v.to_string(),
            Self::I32(v) => v.to_string(),
            // The shortest text that reads back as the same f32.
            Self::F32(v) if v.is_finite() => format!("{v:?}f"),
            Self::F32(v) => format!("bits_as<f32>({:#x}u)", v.to_bits()),
            Self::Bool(v) => v.to_string(),
        }
    }
}

/// A Rust type that a compile-time parameter may have.
pub trait Constant: Copy {
    fn into_value(self) -> ConstantValue;
    #[doc(hidden)]
    fn from_value(value: ConstantValue) -> Option<Self>;
}

macro_rules! constants {
    ($($ty:ident $variant:ident)*) => { $(
        impl Constant for $ty {
            fn into_value(self) -> ConstantValue {
                ConstantValue::$variant(self)
            }

            #[inline]
            fn from_value(value: ConstantValue) -> Option<Self> {
                match value {
                    ConstantValue::$variant(value) => Some(value),
                    _ => None,
                }
            }
        }
    )* };
}
constants!(u32 U32 i32 I32 f32 F32 bool Bool);

/// The value of the constant `name`, whose type an instance has checked.
#[inline]
pub(crate) fn of_type<T: Constant>(value: ConstantValue, name: &str) -> T {
    T::from_value(value).unwrap_or_else(|| refuse_type(value, name))
}

#[cold]
fn refuse_type(value: ConstantValue, name: &str) -> ! {
    panic!("compile-time parameter `{name}` is of another type, {}", value.ty())
}

/// The compile-time parameters and element types of an instance, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values {
    pub(crate) constants: Vec<(&'static str, ConstantValue)>,
    pub(crate) types: Vec<(&'static str, ElementType)>,
}

impl Values {
    /// The constant `name`. An [`Instance`] has checked that it is there.
    #[doc(hidden)]
    pub fn constant<T: Constant>(&self, name: &str) -> T {
        of_type(self.value(name), name)
    }

    pub(crate) fn value(&self, name: &str) -> ConstantValue {
        let found = self.constants.iter().find(|(key, _)| *key == name);
        found.unwrap_or_else(|| panic!("compile-time parameter `{name}` is not set in this instance")).1
    }

    /// The element type called `name`: a type's own name, or an element-type parameter.
    pub fn element(&self, name: &str) -> Option<ElementType> {
        ElementType::named(name).or_else(|| self.types.iter().find(|(key, _)| *key == name).map(|(_, ty)| *ty))
    }

    pub fn constants(&self) -> &[(&'static str, ConstantValue)] {
        &self.constants
    }
}
