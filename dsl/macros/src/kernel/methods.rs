//! Methods of Rust's own number types that a kernel may call. Each is printed as a function of the same name, which the
//! CUDA prelude defines with the same meaning. Anything with a synchronisation scope is an intrinsic instead.

/// What a method's result is, as far as the printer needs to know.
#[derive(Clone, Copy, PartialEq)]
pub enum Gives {
    Receiver,
    F32,
    U32,
    Bool,
}

/// (name, arguments after the receiver, result)
const METHODS: &[(&str, usize, Gives)] = &[
    ("min", 1, Gives::Receiver),
    ("max", 1, Gives::Receiver),
    ("clamp", 2, Gives::Receiver),
    ("abs", 0, Gives::Receiver),
    // Exact in every executor.
    ("sqrt", 0, Gives::F32),
    ("mul_add", 2, Gives::F32),
    ("floor", 0, Gives::F32),
    ("ceil", 0, Gives::F32),
    ("trunc", 0, Gives::F32),
    ("round", 0, Gives::F32),
    ("round_ties_even", 0, Gives::F32),
    ("to_f32", 0, Gives::F32),
    ("to_bits", 0, Gives::U32),
    ("is_nan", 0, Gives::Bool),
    // Within a few units in the last place: the last bits differ between executors.
    ("exp", 0, Gives::F32),
    ("exp2", 0, Gives::F32),
    ("ln", 0, Gives::F32),
    ("log2", 0, Gives::F32),
    ("powf", 1, Gives::F32),
    ("tanh", 0, Gives::F32),
    ("sin", 0, Gives::F32),
    ("cos", 0, Gives::F32),
    // Integers.
    ("wrapping_add", 1, Gives::Receiver),
    ("wrapping_sub", 1, Gives::Receiver),
    ("wrapping_mul", 1, Gives::Receiver),
    ("rotate_left", 1, Gives::Receiver),
    ("rotate_right", 1, Gives::Receiver),
    ("div_ceil", 1, Gives::Receiver),
    ("abs_diff", 1, Gives::U32),
    ("count_ones", 0, Gives::U32),
    ("leading_zeros", 0, Gives::U32),
    ("trailing_zeros", 0, Gives::U32),
];

pub fn find(name: &str) -> Option<(usize, Gives)> {
    METHODS.iter().find(|(method, ..)| *method == name).map(|(_, arguments, gives)| (*arguments, *gives))
}

/// Names a variable must not take in the printed text: they would hide a function, or are words of C++.
pub fn reserved(name: &str) -> bool {
    const WORDS: &[&str] = &[
        "alignas",
        "and",
        "asm",
        "auto",
        "case",
        "catch",
        "char",
        "class",
        "compl",
        "constexpr",
        "default",
        "delete",
        "do",
        "double",
        "explicit",
        "export",
        "extern",
        "float",
        "friend",
        "goto",
        "inline",
        "int",
        "long",
        "namespace",
        "new",
        "not",
        "operator",
        "or",
        "private",
        "protected",
        "public",
        "register",
        "short",
        "signed",
        "sizeof",
        "static",
        "struct",
        "switch",
        "template",
        "this",
        "throw",
        "try",
        "typedef",
        "union",
        "unsigned",
        "using",
        "virtual",
        "void",
        "volatile",
        "xor",
        "weights",
        "fill",
        "load",
        "store",
    ];
    WORDS.contains(&name) || METHODS.iter().any(|(method, ..)| *method == name)
}

/// Constants of Rust's number types, as the prelude spells them.
pub fn constant(path: &str) -> Option<&'static str> {
    Some(match path {
        "f32::INFINITY" => "F32_INFINITY",
        "f32::NEG_INFINITY" => "F32_NEG_INFINITY",
        "f32::NAN" => "F32_NAN",
        "f32::MAX" => "F32_MAX",
        "f32::MIN" => "F32_MIN",
        "f32::EPSILON" => "F32_EPSILON",
        "u32::MAX" => "U32_MAX",
        "i32::MAX" => "I32_MAX",
        "i32::MIN" => "I32_MIN",
        "u64::MAX" => "U64_MAX",
        "U32x2::ZERO" => "U32x2{}",
        "U32x4::ZERO" => "U32x4{}",
        "I32x4::ZERO" => "I32x4{}",
        "F32x2::ZERO" => "F32x2{}",
        "F32x4::ZERO" => "F32x4{}",
        _ => return None,
    })
}
