//! Structs of the kernel language, and how a definition takes them apart.
//!
//! Three kinds: `#[registers]` (values that live in registers), `#[view]` (memory handles and numbers that travel
//! together) and `#[config]` (compile-time parameters). The macros see one item at a time, so a kernel's expansion does
//! not know the fields of a struct that it names. It leaves them to the traits here, and rustc's constant evaluation
//! puts the lists together: a launch gives a view's fields one by one, and an instance has a config's fields beside its
//! other compile-time parameters.

use crate::arguments::ArgumentValue;
use crate::definition::{Callee, ConstantDef, ParamDef, ParamKind, StructDef, StructKind};
use crate::instance::InstanceBuilder;
use crate::passing::{FromArgument, Value};
use crate::values::Values;

/// A struct that a kernel may use by name.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a value type of the kernel language",
    label = "use bool, u8…u64, i8…i64, f32, F16, BF16, U32x2, U32x4, I32x4, F32x2, F32x4, or a `#[registers]` or `#[view]` struct"
)]
pub trait Struct: Copy {
    const DEF: &'static StructDef;

    #[doc(hidden)]
    fn callee() -> Callee {
        Callee::Struct(Self::DEF)
    }
}

/// A struct that lives in registers.
pub trait Registers: Struct + Value {}

/// A view that a launch can give.
#[diagnostic::on_unimplemented(
    message = "a launch cannot give `{Self}`",
    label = "a kernel's struct is a `#[view]` of `Weights<T>`, `Input<T>`, `Output<T>`, `InOut<T>` and scalars u32, i32, u64, f32"
)]
pub trait View: Struct + FromArgument {
    /// What the host gives for it: the same fields, memory as `M`.
    type Arguments<M>: ViewArguments<M>;
}

/// The host's side of a view.
pub trait ViewArguments<M> {
    /// Appends the fields in the order of declaration.
    fn append_to(self, arguments: &mut Vec<ArgumentValue<M>>);
}

/// A `#[config]` struct: compile-time parameters that travel together.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a compile-time parameter",
    label = "a compile-time parameter is `u32`, `i32`, `f32`, `bool` or a `#[config]` struct of these"
)]
pub trait Config: Copy {
    const CONSTANTS: &'static [ConstantDef];

    /// Sets the fields in an instance.
    fn choose(self, builder: InstanceBuilder) -> InstanceBuilder;

    /// The fields as an instance has them.
    #[doc(hidden)]
    fn of_values(values: &Values) -> Self;

    /// The fields as the instance has them that the simulator runs.
    #[doc(hidden)]
    fn of_launch() -> Self;
}

/// A parameter as a function's head has it.
#[doc(hidden)]
pub enum HeadParam {
    Plain(ParamDef),
    /// `types`: the struct's element types, by the names that the function has for them.
    Struct {
        name: &'static str,
        def: &'static StructDef,
        types: &'static [&'static str],
    },
}

#[doc(hidden)]
pub const fn count_constants(groups: &[&[ConstantDef]]) -> usize {
    let (mut count, mut at) = (0, 0);
    while at < groups.len() {
        count += groups[at].len();
        at += 1;
    }
    count
}

/// The compile-time parameters of all groups. Two of one name would be one constant in the text: they are refused.
#[doc(hidden)]
pub const fn all_constants<const N: usize>(groups: &[&[ConstantDef]]) -> [ConstantDef; N] {
    let mut all = [ConstantDef { name: "", ty: "" }; N];
    let (mut count, mut at) = (0, 0);
    while at < groups.len() {
        let mut field = 0;
        while field < groups[at].len() {
            let constant = groups[at][field];
            let mut before = 0;
            while before < count {
                assert!(
                    !same(all[before].name, constant.name),
                    "two compile-time parameters of a kernel have one name"
                );
                before += 1;
            }
            all[count] = constant;
            count += 1;
            field += 1;
        }
        at += 1;
    }
    all
}

#[doc(hidden)]
pub const fn count_params(head: &[HeadParam]) -> usize {
    let (mut count, mut at) = (0, 0);
    while at < head.len() {
        count += match &head[at] {
            HeadParam::Struct { def, .. } if !matches!(def.kind, StructKind::Registers) => def.fields.len(),
            _ => 1,
        };
        at += 1;
    }
    count
}

/// The parameters of a head, a view as its fields.
#[doc(hidden)]
pub const fn all_params<const N: usize>(head: &[HeadParam]) -> [ParamDef; N] {
    let mut all = [ParamDef { name: "", view: "", kind: ParamKind::Local }; N];
    let (mut count, mut at) = (0, 0);
    while at < head.len() {
        match &head[at] {
            HeadParam::Plain(param) => {
                all[count] = *param;
                count += 1;
            }
            HeadParam::Struct { name, def, .. } if matches!(def.kind, StructKind::Registers) => {
                all[count] = ParamDef { name, view: "", kind: ParamKind::Scalar(def.name) };
                count += 1;
            }
            HeadParam::Struct { name, def, types } => {
                let mut field = 0;
                while field < def.fields.len() {
                    all[count] = ParamDef {
                        name: def.fields[field].name,
                        view: name,
                        kind: with_types(def.fields[field].kind, def, types),
                    };
                    count += 1;
                    field += 1;
                }
            }
        }
        at += 1;
    }
    all
}

/// A field's kind where the struct's element types have these names.
const fn with_types(kind: ParamKind, def: &StructDef, types: &'static [&'static str]) -> ParamKind {
    let ParamKind::Memory { access, element } = kind else { return kind };
    let mut at = 0;
    while at < def.types.len() {
        if same(def.types[at], element) {
            return ParamKind::Memory { access, element: types[at] };
        }
        at += 1;
    }
    kind
}

/// A function with this head may fill a slot, as far as its structs go.
#[doc(hidden)]
pub const fn fits_slots(head: &[HeadParam]) -> bool {
    let mut at = 0;
    while at < head.len() {
        if let HeadParam::Struct { def, .. } = &head[at]
            && matches!(def.kind, StructKind::Local)
        {
            return false;
        }
        at += 1;
    }
    true
}

/// Refuses a field that a view does not have, where a kernel's attribute names one.
#[doc(hidden)]
pub const fn names_a_field(params: &[ParamDef], view: &str, field: &str) {
    let mut at = 0;
    while at < params.len() {
        if same(params[at].view, view) && same(params[at].name, field) {
            return;
        }
        at += 1;
    }
    panic!("the view has no such field");
}

/// Refuses a struct literal whose fields are not in the order of their declaration: C++ takes them by position.
#[doc(hidden)]
pub const fn in_order(declared: &[ParamDef], written: &[&str]) {
    let mut at = 0;
    while at < written.len() {
        assert!(same(declared[at].name, written[at]), "write the fields of a struct in the order of their declaration");
        at += 1;
    }
}

/// A kernel's text around its views: C++ gets their fields as parameters and puts them together again.
#[doc(hidden)]
pub enum TextPart {
    Text(&'static str),
    /// `const u32* kv_pages,` … one parameter a line.
    Params(HeadParam),
    /// `kv_pages, kv_k`
    Fields(&'static str, &'static StructDef),
}

/// A text that constant evaluation writes: with N = 0 it is only measured.
#[doc(hidden)]
pub struct Text<const N: usize> {
    pub bytes: [u8; N],
    pub len: usize,
}

impl<const N: usize> Text<N> {
    #[doc(hidden)]
    pub const fn of(parts: &[TextPart]) -> Self {
        let mut text = Self { bytes: [0; N], len: 0 };
        let mut at = 0;
        while at < parts.len() {
            match &parts[at] {
                TextPart::Text(part) => text.push(part),
                TextPart::Params(HeadParam::Plain(param)) => text.declare(param.kind, "", param.name),
                TextPart::Params(HeadParam::Struct { name, def, types }) => {
                    let mut field = 0;
                    while field < def.fields.len() {
                        if field > 0 {
                            text.push(",\n    ");
                        }
                        text.declare(with_types(def.fields[field].kind, def, types), name, def.fields[field].name);
                        field += 1;
                    }
                }
                TextPart::Fields(name, def) => {
                    let mut field = 0;
                    while field < def.fields.len() {
                        text.push(if field > 0 { ", " } else { "" });
                        text.push(name);
                        text.push("_");
                        text.push(def.fields[field].name);
                        field += 1;
                    }
                }
            }
            at += 1;
        }
        text
    }

    #[doc(hidden)]
    pub const fn as_str(&self) -> &str {
        match std::str::from_utf8(&self.bytes) {
            Ok(text) => text,
            Err(_) => panic!("whole strings were written"),
        }
    }

    const fn push(&mut self, part: &str) {
        let (bytes, mut at) = (part.as_bytes(), 0);
        while at < bytes.len() {
            if self.len < N {
                self.bytes[self.len] = bytes[at];
            }
            self.len += 1;
            at += 1;
        }
    }

    const fn declare(&mut self, kind: ParamKind, view: &str, name: &str) {
        let (before, ty, after) = match kind {
            ParamKind::Memory { access, element } => {
                let (before, after) = access.around();
                (before, element, after)
            }
            ParamKind::Scalar(ty) => ("", ty, " "),
            ParamKind::Local => ("", "", ""),
        };
        self.push(before);
        self.push(ty);
        self.push(after);
        if !view.is_empty() {
            self.push(view);
            self.push("_");
        }
        self.push(name);
    }
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut same = a.len() == b.len();
    let mut at = 0;
    while same && at < a.len() {
        same = a[at] == b[at];
        at += 1;
    }
    same
}
