//! Definitions: what the macros leave behind of a kernel, of a device function, of a struct and of an intrinsic, as
//! plain statics.

use crate::elements::{self, ElementType};
use crate::passing::{Arguments, SlotArguments, Word4};
use crate::values::Values;

/// What a kernel does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Constant since before the launch: read through the non-coherent path, also before the dependency wait.
    Weights,
    /// Read; written by an earlier kernel, so not before the dependency wait.
    Input,
    /// Rows that bulk copies bring tile by tile; otherwise as `Input`. A launch gives the tensor map that describes
    /// them.
    Tiles,
    /// Written, all of it; not read.
    Output,
    /// Read and written; atomics.
    InOut,
    /// Shared memory of the block.
    Shared,
}

impl Access {
    pub const fn writes(self) -> bool {
        matches!(self, Self::Output | Self::InOut | Self::Shared)
    }

    /// What is before and behind the element in a CUDA declaration.
    pub(crate) const fn around(self) -> (&'static str, &'static str) {
        match self {
            Self::Weights => ("weights<", "> "),
            Self::Input => ("const ", "* "),
            Self::Tiles => ("__grid_constant__ const tiles<", "> "),
            Self::Output | Self::InOut | Self::Shared => ("", "* "),
        }
    }
}

/// Parameter of a kernel or a device function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamDef {
    pub name: &'static str,
    /// The parameter that is the view whose field it is; empty for one that is of no view.
    pub view: &'static str,
    pub kind: ParamKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// `element` is the name of an [`ElementType`] or of an element-type parameter.
    Memory { access: Access, element: &'static str },
    /// u32, i32, u64 or f32 for a kernel; any value type for a device function.
    Scalar(&'static str),
    /// Registers or a reference: a device function's, so that it cannot fill a slot.
    Local,
}

impl ParamDef {
    /// `kv_pages` for the field `pages` of the view `kv`.
    pub fn full_name(&self) -> String {
        if self.view.is_empty() { self.name.to_string() } else { format!("{}_{}", self.view, self.name) }
    }

    /// The parameter as CUDA text, under another name.
    pub fn declare(&self, name: &str) -> String {
        match self.kind {
            ParamKind::Memory { access, element } => {
                let (before, after) = access.around();
                format!("{before}{element}{after}{name}")
            }
            ParamKind::Scalar(ty) => format!("{ty} {name}"),
            ParamKind::Local => name.to_string(),
        }
    }
}

/// Compile-time parameter: `constexpr` in the text, a variable in Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConstantDef {
    pub name: &'static str,
    /// u32, i32, f32 or bool.
    pub ty: &'static str,
}

/// A named place in a kernel that an instance fills with device functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotDef {
    pub name: &'static str,
    /// (name, value type)
    pub params: &'static [(&'static str, &'static str)],
    pub output: &'static str,
}

impl SlotDef {
    /// The slot maps its first value to another of the same type: it may stay empty, and may chain several functions.
    pub fn is_chain(&self) -> bool {
        self.params.first().is_some_and(|(_, ty)| *ty == self.output)
    }
}

/// Shared array of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct SharedDef {
    pub name: &'static str,
    pub element: &'static str,
    /// Length in elements, from the compile-time parameters.
    pub len: fn(&Values) -> u32,
}

/// How a kernel must be launched.
#[derive(Clone, Copy, Debug)]
pub struct LaunchContract {
    /// Threads of a block, a multiple of 32.
    pub block: fn(&Values) -> u32,
    /// Blocks in a cluster. They are consecutive along y and exchange data through distributed shared memory (DSMEM).
    /// `None`: the kernel does not use clusters.
    pub cluster: Option<fn(&Values) -> u32>,
    /// Launched with programmatic dependent launch (PDL): the kernel may start before its predecessor in the stream
    /// ends. Every thread executes `grid_dependency_wait()` before it touches anything but weights and what `early`
    /// names.
    pub dependent: bool,
    /// It lets its successor start only after it has waited: when that starts, all launches before this one's
    /// predecessor, and that one, have ended.
    pub waits_first: bool,
    /// What it reads before it waits, though kernels write there. Whoever launches it sees to it that those have ended
    /// by then.
    pub early: &'static [Buffers],
    /// What it does not write, though the parameter would let it.
    pub only_reads: &'static [Buffers],
    /// Shared arrays live in dynamic shared memory, whose size the launch must state.
    pub dynamic_shared: bool,
}

/// Buffers of which something holds for some instances of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Whether it holds for an instance.
    pub when: fn(&Values) -> bool,
    /// By name.
    pub params: &'static [&'static str],
}

/// Function that a body calls, found when a source text is assembled.
#[derive(Clone, Copy)]
pub enum Callee {
    Device(&'static DeviceDef),
    Struct(&'static StructDef),
    Intrinsic(&'static Intrinsic),
    Table(&'static TableDef),
    /// Part of every source text.
    Prelude,
}

/// The threads that must execute an intrinsic together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The thread alone.
    Thread,
    /// All 32 lanes of the warp, at the same place.
    Warp,
    /// All 128 threads of a warpgroup (four consecutive warps), at the same place. Only Hopper has such intrinsics.
    Warpgroup,
    /// All threads of the block, at the same place.
    Block,
    /// All threads of the cluster that have not returned, at the same place. Hopper and later.
    Cluster,
    /// Orders this grid against the grids before and after it in the stream.
    Grid,
}

/// What the host's compiler sees of an intrinsic.
#[derive(Clone, Copy, Debug)]
pub enum HostText {
    /// The CUDA text is plain C++.
    Same,
    Text(&'static str),
    /// A call of the Rust meaning, at this address.
    Hook(Hook),
}

/// Address of a Rust meaning with C calling convention.
#[derive(Clone, Copy, Debug)]
pub struct Hook(pub(crate) fn() -> *const ());

/// One row of the table.
#[derive(Debug)]
pub struct Intrinsic {
    pub name: &'static str,
    pub scope: Scope,
    /// The first compute capability that has it, as in `sm_90`.
    pub since: u32,
    pub doc: &'static str,
    /// The definition in CUDA C.
    pub cuda: &'static str,
    pub host: HostText,
    /// (result, parameters) of a hook, as text.
    pub signature: (&'static str, &'static [(&'static str, &'static str)]),
    /// Rows whose text this one's text uses.
    pub needs: &'static [fn() -> Callee],
}

impl Intrinsic {
    /// The host text of a hook: a pointer that the simulator fills in after loading, and a function that calls it.
    pub(crate) fn hook_text(&self) -> String {
        let (output, params) = self.signature;
        let name = self.name;
        let declared: Vec<_> = params.iter().map(|(name, ty)| format!("{ty} {name}")).collect();
        let types: Vec<_> = params.iter().map(|(_, ty)| *ty).collect();
        let names: Vec<_> = params.iter().map(|(name, _)| *name).collect();
        format!(
            "extern \"C\" {{ void* hook_{name}; }}\ninline {output} {name}({}) {{ return (({output} (*)({}))hook_{name})({}); }}",
            declared.join(", "),
            types.join(", "),
            names.join(", ")
        )
    }
}

macro_rules! in_the_prelude {
    ($($name:ident)*) => { $(impl elements::$name {
        #[doc(hidden)]
        pub fn callee() -> Callee {
            Callee::Prelude
        }
    })* };
}
in_the_prelude!(u32x2 u32x4 i32x4 f32x2 f32x4);

/// A `#[kernel]` function.
#[derive(Debug)]
pub struct KernelDef {
    pub name: &'static str,
    pub doc: &'static str,
    pub params: &'static [ParamDef],
    pub constants: &'static [ConstantDef],
    /// Element-type parameters.
    pub types: &'static [&'static str],
    pub slots: &'static [SlotDef],
    pub shared: &'static [SharedDef],
    pub launch: LaunchContract,
    pub callees: &'static [fn() -> Callee],
    /// The kernel alone, as CUDA text: the same for every instance. [`crate::Instance::cuda`] makes the whole source.
    pub cuda: &'static str,
    /// The kernel as its author wrote it.
    pub rust: &'static str,
    /// One GPU thread, in the simulator.
    #[doc(hidden)]
    pub run: fn(&Arguments<'_>),
}

/// A `#[device]` function.
#[derive(Debug)]
pub struct DeviceDef {
    pub name: &'static str,
    pub doc: &'static str,
    pub params: &'static [ParamDef],
    pub output: &'static str,
    /// Compile-time parameters it takes from the instance, by name.
    pub constants: &'static [ConstantDef],
    /// In a slot it makes the instance thin (`thin.rs`).
    pub thin: bool,
    /// What stands for it in thin instances.
    pub instead: Option<fn() -> Callee>,
    pub callees: &'static [fn() -> Callee],
    pub cuda: &'static str,
    pub rust: &'static str,
    /// The function on erased arguments; `None` when its signature cannot fill a slot.
    #[doc(hidden)]
    pub call: Option<fn(&SlotArguments<'_>) -> Word4>,
}

/// A `#[registers]` or `#[view]` struct.
#[derive(Debug)]
pub struct StructDef {
    pub name: &'static str,
    pub doc: &'static str,
    /// In the order of declaration.
    pub fields: &'static [ParamDef],
    /// Element-type parameters.
    pub types: &'static [&'static str],
    pub kind: StructKind,
    /// Structs among its fields.
    pub callees: &'static [fn() -> Callee],
    pub cuda: &'static str,
    pub rust: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StructKind {
    /// One value.
    Registers,
    /// A launch can give it: as its fields.
    Launched,
    /// A view with shared memory, or with numbers that no launch gives: made in a kernel, for its device functions.
    Local,
}

impl KernelDef {
    /// The same kernel with another text: how tests show that a wrong text is caught.
    pub const fn with_cuda(&self, cuda: &'static str) -> Self {
        Self { cuda, ..*self }
    }
}

/// A constant table of words that kernels look values up in: see [`table!`](crate::table).
#[derive(Debug, PartialEq)]
pub struct TableDef {
    pub name: &'static str,
    pub doc: &'static str,
    pub values: &'static [u32],
}

impl DeviceDef {
    /// Bytes of shared memory that the tables take which it reaches.
    pub fn table_bytes(&self) -> u32 {
        fn reach(def: &DeviceDef, found: &mut Vec<&'static TableDef>) {
            for callee in def.callees {
                match callee() {
                    Callee::Device(other) => reach(other, found),
                    Callee::Table(table) if !found.contains(&table) => found.push(table),
                    _ => {}
                }
            }
        }
        let mut found = Vec::new();
        reach(self, &mut found);
        found.iter().map(|table| table.values.len() as u32 * 4).sum()
    }
}

/// Intrinsics and definitions have unique names, so comparing names is enough.
impl PartialEq for KernelDef {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.cuda == other.cuda
    }
}

impl PartialEq for DeviceDef {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.cuda == other.cuda
    }
}

impl SharedDef {
    pub fn bytes(&self, values: &Values) -> usize {
        let size = values.element(self.element).map_or(0, ElementType::size);
        (self.len)(values) as usize * size
    }
}
