//! Instances: a kernel with its compile-time parameters, element types and slots chosen. Its source text: `source.rs`.

use crate::definition::{
    Access, Buffers, Callee, ConstantDef, DeviceDef, Intrinsic, KernelDef, ParamDef, ParamKind, Scope, SlotDef,
    StructDef, TableDef,
};
use crate::elements::ElementType;
use crate::values::{Constant, ConstantValue, Values};

/// Compile options that a kernel's meaning depends on. Without the first, the GPU would fuse a product and a sum where
/// the simulator rounds twice.
pub const NVRTC_OPTIONS: &[&str] = &["--fmad=false", "--std=c++17"];

/// One parameter of an instance: the kernel's own, then those its slots bring.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceParam {
    /// Unique in the instance: `residual` of an `epilogue` slot is `epilogue_residual`.
    pub name: String,
    pub def: ParamDef,
}

/// A slot's device functions, applied in order to the first value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fill {
    pub functions: Vec<&'static DeviceDef>,
    /// For each function, the index in [`Instance::params`] of its first extra parameter.
    pub extra: Vec<usize>,
}

/// A kernel ready to be printed, compiled and run.
#[derive(Clone, Debug)]
pub struct Instance {
    pub def: &'static KernelDef,
    values: Values,
    fills: Vec<Fill>,
    params: Vec<InstanceParam>,
}

/// Why an instance cannot be built. Each names the kernel.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum InstanceError {
    #[error("kernel {kernel}: compile-time parameter `{name}` is not set")]
    Missing { kernel: &'static str, name: &'static str },
    #[error("kernel {kernel}: it has no {what} `{name}`")]
    Unknown { kernel: &'static str, what: &'static str, name: String },
    #[error("kernel {kernel}: compile-time parameter `{name}` is {expected}, but {found} was given")]
    ConstantType { kernel: &'static str, name: &'static str, expected: &'static str, found: &'static str },
    #[error("kernel {kernel}: element type {found} for `{name}`, which is one of f32, F16, BF16")]
    ElementType { kernel: &'static str, name: String, found: &'static str },
    #[error("kernel {kernel}: slot `{slot}` must be filled with exactly one device function")]
    Unfilled { kernel: &'static str, slot: &'static str },
    #[error("kernel {kernel}: `{function}` cannot fill slot `{slot}`: {why}")]
    Fill { kernel: &'static str, slot: &'static str, function: &'static str, why: String },
    #[error(
        "kernel {kernel}: device function `{function}` needs compile-time parameter `{name}: {ty}`, which the kernel does not have"
    )]
    DeviceConstant { kernel: &'static str, function: &'static str, name: &'static str, ty: &'static str },
    #[error("kernel {kernel}: device function `{function}` calls itself")]
    Recursion { kernel: &'static str, function: &'static str },
    #[error("kernel {kernel}: two different device functions or structs are called `{function}`: rename one")]
    NameClash { kernel: &'static str, function: &'static str },
    #[error("kernel {kernel}: block of {threads} threads: it must be a multiple of 32, at most 1024")]
    Block { kernel: &'static str, threads: u32 },
    #[error("kernel {kernel}: clusters of {blocks} blocks: it must be 1 to 16")]
    Cluster { kernel: &'static str, blocks: u32 },
}

/// Chooses an instance's parameters: `Instance::of(matvec::DEF).constant("K", 2560u32).build()?`.
#[derive(Clone, Debug)]
pub struct InstanceBuilder {
    def: &'static KernelDef,
    constants: Vec<(String, ConstantValue)>,
    types: Vec<(String, ElementType)>,
    slots: Vec<(String, Vec<&'static DeviceDef>)>,
}

impl InstanceBuilder {
    /// Sets a compile-time parameter.
    pub fn constant(mut self, name: &str, value: impl Constant) -> Self {
        self.constants.push((name.to_string(), value.into_value()));
        self
    }

    /// Sets an element-type parameter.
    pub fn element(mut self, name: &str, ty: ElementType) -> Self {
        self.types.push((name.to_string(), ty));
        self
    }

    /// Fills a slot. Several functions are applied one after the other.
    pub fn slot(mut self, name: &str, functions: &[&'static DeviceDef]) -> Self {
        self.slots.push((name.to_string(), functions.to_vec()));
        self
    }

    pub fn build(self) -> Result<Instance, InstanceError> {
        let def = self.def;
        let kernel = def.name;
        let unknown = |what, name: &str| InstanceError::Unknown { kernel, what, name: name.to_string() };
        let mut values = Values::default();
        for (name, _) in &self.constants {
            if !def.constants.iter().any(|c| c.name == name) {
                return Err(unknown("compile-time parameter", name));
            }
        }
        for &ConstantDef { name, ty } in def.constants {
            let (_, value) = self
                .constants
                .iter()
                .rev()
                .find(|(key, _)| key == name)
                .ok_or(InstanceError::Missing { kernel, name })?;
            if value.ty() != ty {
                return Err(InstanceError::ConstantType { kernel, name, expected: ty, found: value.ty() });
            }
            values.constants.push((name, *value));
        }
        for (name, ty) in &self.types {
            if !def.types.contains(&name.as_str()) {
                return Err(unknown("element-type parameter", name));
            }
            if !matches!(ty, ElementType::F32 | ElementType::F16 | ElementType::BF16) {
                return Err(InstanceError::ElementType { kernel, name: name.clone(), found: ty.name() });
            }
        }
        for &name in def.types {
            let (_, ty) =
                self.types.iter().rev().find(|(key, _)| key == name).ok_or(InstanceError::Missing { kernel, name })?;
            values.types.push((name, *ty));
        }
        if let Some((name, _)) = self.slots.iter().find(|(name, _)| !def.slots.iter().any(|slot| slot.name == name)) {
            return Err(unknown("slot", name));
        }
        let mut params: Vec<_> = def.params.iter().map(|p| InstanceParam { name: p.full_name(), def: *p }).collect();
        let mut fills = Vec::new();
        for slot in def.slots {
            let functions =
                self.slots.iter().rev().find(|(name, _)| name == slot.name).map(|(_, f)| f.clone()).unwrap_or_default();
            fills.push(fill(kernel, slot, functions, &mut params)?);
        }
        let instance = Instance { def, values, fills, params };
        let threads = instance.block();
        if threads == 0 || !threads.is_multiple_of(32) || threads > 1024 {
            return Err(InstanceError::Block { kernel, threads });
        }
        let blocks = instance.cluster();
        if !(1..=MOST_PEERS).contains(&blocks) {
            return Err(InstanceError::Cluster { kernel, blocks });
        }
        instance.functions()?;
        Ok(instance)
    }
}

/// Checks that the functions fit the slot, and appends their extra parameters to the instance's.
fn fill(
    kernel: &'static str,
    slot: &SlotDef,
    functions: Vec<&'static DeviceDef>,
    params: &mut Vec<InstanceParam>,
) -> Result<Fill, InstanceError> {
    if functions.len() != 1 && !slot.is_chain() {
        return Err(InstanceError::Unfilled { kernel, slot: slot.name });
    }
    let mut extra = Vec::new();
    for function in &functions {
        let refuse = |why: String| InstanceError::Fill { kernel, slot: slot.name, function: function.name, why };
        if function.call.is_none() {
            return Err(refuse("its parameters must be values and memory handles, its result a value".into()));
        }
        if function.output != slot.output {
            return Err(refuse(format!("it gives {}, the slot {}", function.output, slot.output)));
        }
        for (index, (name, ty)) in slot.params.iter().enumerate() {
            match function.params.get(index).map(|p| p.kind) {
                Some(ParamKind::Scalar(found)) if found == *ty => {}
                _ => return Err(refuse(format!("parameter {index} must be the slot's `{name}: {ty}`"))),
            }
        }
        extra.push(params.len());
        for param in &function.params[slot.params.len()..] {
            let base = format!("{}_{}", slot.name, param.full_name());
            let same = params.iter().filter(|p| p.name == base || p.name.starts_with(&format!("{base}_"))).count();
            let name = if same == 0 { base } else { format!("{base}_{}", same + 1) };
            params.push(InstanceParam { name, def: *param });
        }
    }
    Ok(Fill { functions, extra })
}

/// What a source text needs besides its header and body, in the order of definition.
#[derive(Default)]
pub(crate) struct Functions {
    pub intrinsics: Vec<&'static Intrinsic>,
    pub structs: Vec<&'static StructDef>,
    pub devices: Vec<&'static DeviceDef>,
    pub tables: Vec<&'static TableDef>,
    /// Functions, and what stands for them here.
    pub replaced: Vec<(&'static str, &'static DeviceDef)>,
}

/// `matvec_q8_0[K = 2560, ROWS = 4, epilogue = add_residual]`: unique among the instances of a kernel.
impl std::fmt::Display for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let constants = self.values.constants.iter().map(|(name, value)| format!("{name} = {}", value.spelling()));
        let types = self.values.types.iter().map(|(name, ty)| format!("{name} = {}", ty.name()));
        let filled = self.def.slots.iter().zip(&self.fills).filter(|(_, fill)| !fill.functions.is_empty());
        let slots = filled.map(|(slot, fill)| {
            let functions: Vec<_> = fill.functions.iter().map(|function| function.name).collect();
            format!("{} = {}", slot.name, functions.join(" then "))
        });
        let chosen: Vec<_> = constants.chain(types).chain(slots).collect();
        if chosen.is_empty() {
            f.write_str(self.def.name)
        } else {
            write!(f, "{}[{}]", self.def.name, chosen.join(", "))
        }
    }
}

impl Instance {
    pub fn of(def: &'static KernelDef) -> InstanceBuilder {
        InstanceBuilder { def, constants: Vec::new(), types: Vec::new(), slots: Vec::new() }
    }

    pub fn values(&self) -> &Values {
        &self.values
    }

    /// The parameters in launch order: the kernel's own, then those of its slots.
    pub fn params(&self) -> &[InstanceParam] {
        &self.params
    }

    /// Every function in a slot, in launch order, with those of the instance's parameters that are its own.
    pub(crate) fn slot_params(&self) -> impl Iterator<Item = (&SlotDef, &'static DeviceDef, &[InstanceParam])> {
        self.def.slots.iter().zip(&self.fills).flat_map(move |(slot, fill)| {
            fill.functions.iter().zip(&fill.extra).map(move |(function, &first)| {
                let count = function.params.len() - slot.params.len();
                (slot, *function, &self.params[first..first + count])
            })
        })
    }

    pub(crate) fn fills(&self) -> &[Fill] {
        &self.fills
    }

    /// Threads of a block.
    pub fn block(&self) -> u32 {
        (self.def.launch.block)(&self.values)
    }

    /// Blocks in a cluster; 1 for a kernel without clusters.
    pub fn cluster(&self) -> u32 {
        self.def.launch.cluster.map_or(1, |blocks| blocks(&self.values))
    }

    /// Whether the kernel reads that parameter's memory before the dependency wait, though kernels write there.
    pub fn reads_early(&self, param: &str) -> bool {
        self.names(self.def.launch.early, param)
    }

    /// Whether the kernel writes to a parameter's memory.
    pub fn writes(&self, param: &InstanceParam) -> bool {
        match param.def.kind {
            ParamKind::Memory { access, .. } => access.writes() && !self.only_reads(&param.name),
            ParamKind::Scalar(_) | ParamKind::Local => false,
        }
    }

    /// Whether the kernel leaves that parameter's memory alone, though its role would let it write there.
    pub(crate) fn only_reads(&self, param: &str) -> bool {
        self.names(self.def.launch.only_reads, param)
    }

    fn names(&self, buffers: &[Buffers], param: &str) -> bool {
        buffers.iter().any(|buffers| (buffers.when)(&self.values) && buffers.params.contains(&param))
    }

    /// Whether elements of `Weights<U32x4>` are 8 bytes: a function in a slot says so.
    pub fn is_thin(&self) -> bool {
        self.fills.iter().flat_map(|fill| &fill.functions).any(|function| function.thin)
    }

    /// Whether that parameter's elements are 8 bytes.
    pub(crate) fn has_thin(&self, param: &InstanceParam) -> bool {
        let codes = ParamKind::Memory { access: Access::Weights, element: "U32x4" };
        param.def.kind == codes && self.is_thin()
    }

    /// Bytes of shared memory that tables take, beside the kernel's own arrays.
    pub fn table_bytes(&self) -> usize {
        self.functions().unwrap_or_default().tables.iter().map(|table| table.values.len() * 4).sum()
    }

    /// Bytes of shared memory that the kernel's own arrays take, as laid out in dynamic shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.shared_layout().1
    }

    /// (offset of each array, bytes in all)
    pub(crate) fn shared_layout(&self) -> (Vec<usize>, usize) {
        let alignment = if self.needs_warpgroups() { SWIZZLED_ALIGNMENT } else { SHARED_ALIGNMENT };
        let mut end = 0usize;
        let offsets = self.def.shared.iter().map(|array| {
            let at = end.next_multiple_of(alignment);
            end = at + array.bytes(&self.values);
            at
        });
        (offsets.collect(), end)
    }

    /// The instance uses wgmma, which only Hopper has: no other architecture compiles it.
    pub fn needs_warpgroups(&self) -> bool {
        let functions = self.functions().unwrap_or_default();
        functions.intrinsics.iter().any(|row| row.scope == Scope::Warpgroup)
    }

    /// The first compute capability that has all of the instance's intrinsics: 90 is `sm_90`.
    pub fn minimum_capability(&self) -> u32 {
        let functions = self.functions().unwrap_or_default();
        functions.intrinsics.iter().map(|row| row.since).max().unwrap_or(0)
    }

    /// The intrinsics and device functions the instance reaches.
    pub(crate) fn functions(&self) -> Result<Functions, InstanceError> {
        let mut found = Functions::default();
        let mut path = Vec::new();
        let filled = self.fills.iter().flat_map(|fill| fill.functions.iter().map(|f| Callee::Device(f)));
        for callee in self.def.callees.iter().map(|callee| callee()).chain(filled) {
            self.reach(callee, &mut found, &mut path)?;
        }
        Ok(found)
    }

    /// The device functions in the source text, those that fill slots among them.
    pub fn devices(&self) -> Vec<&'static DeviceDef> {
        self.functions().map_or_else(|_| Vec::new(), |functions| functions.devices)
    }

    /// The structs in the source text.
    pub fn structs(&self) -> Vec<&'static StructDef> {
        self.functions().map_or_else(|_| Vec::new(), |functions| functions.structs)
    }

    fn reach(&self, callee: Callee, found: &mut Functions, path: &mut Vec<&'static str>) -> Result<(), InstanceError> {
        let kernel = self.def.name;
        match callee {
            Callee::Prelude => {}
            Callee::Table(def) => {
                if !found.tables.iter().any(|known| known.name == def.name) {
                    found.tables.push(def);
                }
            }
            Callee::Struct(def) => {
                if let Some(known) = found.structs.iter().find(|known| known.name == def.name) {
                    let same = known.cuda == def.cuda;
                    return if same { Ok(()) } else { Err(InstanceError::NameClash { kernel, function: def.name }) };
                }
                for callee in def.callees {
                    self.reach(callee(), found, path)?;
                }
                found.structs.push(def);
            }
            Callee::Intrinsic(row) => {
                if !found.intrinsics.iter().any(|known| known.name == row.name) {
                    for callee in row.needs {
                        self.reach(callee(), found, path)?;
                    }
                    found.intrinsics.push(row);
                }
            }
            Callee::Device(def) if def.instead.is_some() && self.is_thin() => {
                let Some(Callee::Device(other)) = def.instead.map(|other| other()) else { return Ok(()) };
                if !found.replaced.iter().any(|(name, _)| *name == def.name) {
                    self.reach(Callee::Device(other), found, path)?;
                    found.replaced.push((def.name, other));
                }
            }
            Callee::Device(def) => {
                if path.contains(&def.name) {
                    return Err(InstanceError::Recursion { kernel, function: def.name });
                }
                if let Some(known) = found.devices.iter().find(|known| known.name == def.name) {
                    let same = known.cuda == def.cuda;
                    return if same { Ok(()) } else { Err(InstanceError::NameClash { kernel, function: def.name }) };
                }
                for constant in def.constants {
                    if !self.def.constants.contains(constant) {
                        let ConstantDef { name, ty } = *constant;
                        return Err(InstanceError::DeviceConstant { kernel, function: def.name, name, ty });
                    }
                }
                path.push(def.name);
                for callee in def.callees {
                    self.reach(callee(), found, path)?;
                }
                path.pop();
                found.devices.push(def);
            }
        }
        Ok(())
    }
}

/// Blocks in the largest cluster that any GPU supports.
const MOST_PEERS: u32 = 16;

/// Alignment of arrays in dynamic shared memory: enough for a 128-byte access,
const SHARED_ALIGNMENT: usize = 128;
/// or, for operands of wgmma, for a whole period of the 128-byte swizzle.
const SWIZZLED_ALIGNMENT: usize = 1024;
