//! Element types: what a buffer may hold. Rust's own numbers, the two 16-bit floats, and the vectors of 8 and 16 bytes.
//!
//! The 16-bit floats are bit patterns with conversions and no arithmetic, on purpose: on the GPU and here alike a
//! kernel computes in f32.

/// Name of an element type, where types are data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F16,
    BF16,
    U32x2,
    U32x4,
    I32x4,
    F32x2,
    F32x4,
}

impl ElementType {
    pub const ALL: [Self; 16] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::U32x2,
        Self::U32x4,
        Self::I32x4,
        Self::F32x2,
        Self::F32x4,
    ];

    /// The type's name, the same in Rust and in CUDA text.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F32 => "f32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U32x2 => "U32x2",
            Self::U32x4 => "U32x4",
            Self::I32x4 => "I32x4",
            Self::F32x2 => "F32x2",
            Self::F32x4 => "F32x4",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.name() == name)
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::U32x2 | Self::F32x2 => 8,
            Self::U32x4 | Self::I32x4 | Self::F32x4 => 16,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A type that memory may hold: plain bits, every pattern of them valid.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + std::fmt::Debug + 'static {
    const TYPE: ElementType;
}

/// The element types a kernel may be generic over: `fn store<KV: Float>(…)`.
pub trait Float: Element {
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even. The payload of a NaN is not specified.
    fn from_f32(value: f32) -> Self;
}

/// IEEE half precision, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub struct F16(u16);

/// The upper half of an f32, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub struct BF16(u16);

macro_rules! elements {
    ($($ty:ident $name:ident;)*) => { $(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const TYPE: ElementType = ElementType::$name;
        }
    )* };
}
elements! {
    u8 U8; i8 I8; u16 U16; i16 I16; u32 U32; i32 I32; u64 U64; i64 I64; f32 F32; F16 F16; BF16 BF16;
    U32x2 U32x2; U32x4 U32x4; I32x4 I32x4; F32x2 F32x2; F32x4 F32x4;
}

macro_rules! half_floats {
    ($($name:ident)*) => { $(
        impl $name {
            #[inline]
            pub const fn from_bits(bits: u16) -> Self {
                Self(bits)
            }

            #[inline]
            pub const fn to_bits(self) -> u16 {
                self.0
            }
        }
    )* };
}
half_floats!(F16 BF16);

impl Float for F16 {
    /// The same as `half` gives, in a few instructions that can be inlined: kernels in the simulator do little else.
    #[inline]
    fn to_f32(self) -> f32 {
        /// The difference of the exponents' biases.
        const TWO_TO_THE_112: f32 = f32::from_bits((112 + 127) << 23);
        let magnitude = u32::from(self.0 & 0x7fff) << 13;
        let is_finite = self.0 & 0x7c00 != 0x7c00;
        // Exact, also from a subnormal number.
        let scaled = (f32::from_bits(magnitude) * TWO_TO_THE_112).to_bits();
        let bits = if is_finite { scaled } else { magnitude | 0x7f80_0000 };
        f32::from_bits(bits | u32::from(self.0 & 0x8000) << 16)
    }

    fn from_f32(value: f32) -> Self {
        Self(half::f16::from_f32(value).to_bits())
    }
}

impl Float for BF16 {
    #[inline]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    fn from_f32(value: f32) -> Self {
        Self(half::bf16::from_f32(value).to_bits())
    }
}

impl Float for f32 {
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }
}

macro_rules! vectors {
    ($($doc:literal $align:literal $name:ident $new:ident $scalar:ident $($field:ident)*;)*) => { $(
        #[doc = $doc]
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C, align($align))]
        pub struct $name {
            $(pub $field: $scalar,)*
        }

        impl $name {
            pub const ZERO: Self = Self { $($field: 0 as $scalar,)* };
        }

        #[doc = concat!("Builds a [`", stringify!($name), "`].")]
        pub fn $new($($field: $scalar),*) -> $name {
            $name { $($field),* }
        }

        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        pub enum $new {}
    )* };
}
vectors! {
    "Two words: 8 bytes in one access." 8 U32x2 u32x2 u32 x y;
    "Four words: 16 bytes in one access." 16 U32x4 u32x4 u32 x y z w;
    "Four accumulators of an integer tensor-core product." 16 I32x4 i32x4 i32 x y z w;
    "Two floats: 8 bytes in one access." 8 F32x2 f32x2 f32 x y;
    "Four floats: 16 bytes in one access." 16 F32x4 f32x4 f32 x y z w;
}

// The expansion of a kernel that is generic over its element type names the choices through this module.
pub use std::primitive::f32;
