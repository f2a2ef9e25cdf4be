//! Source texts: one = prelude + the intrinsics used + a header of a few generated lines + device functions + the body.
//! The header is all that differs between two instances of a kernel.

use crate::definition::TableDef;
use crate::definition::{HostText, Intrinsic};
use crate::instance::{Instance, InstanceParam};
use crate::values::ConstantValue;
use crate::{text, thin};
use std::fmt::Write as _;

impl Instance {
    /// The generated lines of this instance: constants, element types, shared layout, slots.
    pub fn header(&self) -> String {
        self.constants_text() + &self.slots_text()
    }

    fn constants_text(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.values().constants {
            let keyword = if matches!(value, ConstantValue::F32(v) if !v.is_finite()) { "const" } else { "constexpr" };
            let _ = writeln!(text, "{keyword} {} {name} = {};", value.ty(), value.spelling());
        }
        for (name, ty) in &self.values().types {
            let _ = writeln!(text, "typedef {} {name};", ty.name());
        }
        if self.def.launch.dynamic_shared {
            let (offsets, bytes) = self.shared_layout();
            for (array, at) in self.def.shared.iter().zip(offsets) {
                let _ = writeln!(text, "constexpr u32 {}_at = {at};", array.name);
            }
            let blocks = self.cluster();
            let declare = if self.needs_warpgroups() { "SWIZZLED_SHARED" } else { "DYNAMIC_SHARED" };
            let _ = match blocks {
                1 => writeln!(text, "{declare}({bytes});"),
                // On a GPU a block of a cluster declares its own memory, as any does; there tiles of wgmma need its
                // alignment.
                _ if self.needs_warpgroups() => {
                    writeln!(
                        text,
                        "#ifdef __CUDA_ARCH__\n{declare}({bytes});\n#else\nCLUSTER_SHARED({bytes}, {blocks});\n#endif"
                    )
                }
                _ => writeln!(text, "CLUSTER_SHARED({bytes}, {blocks});"),
            };
        }
        if self.def.launch.cluster.is_some() {
            let _ = match self.cluster() {
                1 => writeln!(text, "#define CLUSTER"),
                blocks => writeln!(text, "#define CLUSTER __cluster_dims__(1, {blocks}, 1)"),
            };
        }
        text
    }

    fn slots_text(&self) -> String {
        let mut text = String::new();
        for (slot, fill) in self.def.slots.iter().zip(self.fills()) {
            let upper = slot.name.to_uppercase();
            let extra = fill.functions.iter().zip(&fill.extra).flat_map(|(function, &first)| {
                let count = function.params.len() - slot.params.len();
                self.params()[first..first + count].iter()
            });
            let (mut params, mut args) = (String::new(), String::new());
            for param in extra {
                let _ = write!(params, ", {}", param.def.declare(&param.name));
                let _ = write!(args, ", {}", param.name);
            }
            let _ = writeln!(text, "#define {upper}_PARAMS {params}\n#define {upper}_ARGS {args}");
            let own: Vec<_> = slot.params.iter().map(|(name, ty)| format!("{ty} {name}")).collect();
            let names: Vec<_> = slot.params.iter().map(|(name, _)| *name).collect();
            let _ = writeln!(
                text,
                "__device__ __forceinline__ {} {}({} {upper}_PARAMS) {{",
                slot.output,
                slot.name,
                own.join(", ")
            );
            let mut value = names.first().map_or_else(String::new, ToString::to_string);
            for (function, &first) in fill.functions.iter().zip(&fill.extra) {
                let rest = names.iter().skip(1).map(ToString::to_string);
                let count = function.params.len() - slot.params.len();
                let extra = grouped(&self.params()[first..first + count]);
                let arguments: Vec<_> = std::iter::once(value).chain(rest).chain(extra).collect();
                value = format!("{}({})", function.name, arguments.join(", "));
            }
            let _ = writeln!(text, "    return {value};\n}}");
        }
        text
    }

    /// The whole CUDA C source of this instance, self-contained: what NVRTC compiles.
    pub fn cuda(&self) -> String {
        self.source(text::CUDA, |row| row.cuda.to_string(), "", false)
    }

    /// The same text for the host's C++ compiler, with an entry that takes its arguments as an array of pointers.
    pub fn host(&self) -> String {
        let arguments: Vec<_> = self
            .params()
            .iter()
            .enumerate()
            .map(|(index, param)| {
                let declared = param.def.declare("*");
                format!("*({declared})arguments[{index}]")
            })
            .collect();
        let entry = format!(
            "extern \"C\" void gemma4c_entry(void** arguments) {{\n    {}({});\n}}\n",
            self.def.name,
            arguments.join(", ")
        );
        self.source(text::HOST, host_text, &entry, true)
    }

    /// The intrinsics whose host text calls back into the simulator.
    pub(crate) fn hooks(&self) -> Vec<&'static Intrinsic> {
        let functions = self.functions().unwrap_or_default();
        functions.intrinsics.into_iter().filter(|row| matches!(row.host, HostText::Hook(_))).collect()
    }

    fn source(&self, platform: &str, intrinsic: impl Fn(&Intrinsic) -> String, entry: &str, on_host: bool) -> String {
        // `build` has walked the same functions already, so the walk cannot fail here.
        let functions = self.functions().unwrap_or_default();
        let mut source = String::new();
        source.push_str(platform);
        source.push_str(text::PRELUDE);
        source.push_str("\n// ---- intrinsics ----\n");
        for row in &functions.intrinsics {
            source.push('\n');
            source.push_str(&tidy(&intrinsic(row)));
        }
        if self.is_thin() {
            source.push_str(thin::POINTER);
            for (name, cuda, host) in thin::READERS {
                if functions.intrinsics.iter().any(|row| row.name == name) {
                    source.push_str(if on_host { host } else { cuda });
                }
            }
        }
        for table in &functions.tables {
            source.push_str(&table_text(table, on_host));
        }
        source.push_str("\n// ---- this instance ----\n\n");
        source.push_str(&self.constants_text());
        for printed in &functions.structs {
            source.push('\n');
            source.push_str(printed.cuda);
        }
        for device in &functions.devices {
            source.push('\n');
            source.push_str(device.cuda);
            for (name, _) in functions.replaced.iter().filter(|(_, other)| other.name == device.name) {
                let _ = writeln!(source, "#define {name} {}", device.name);
            }
        }
        source.push('\n');
        let slots = self.slots_text();
        if !slots.is_empty() {
            source.push_str(&slots);
            source.push('\n');
        }
        match on_host || functions.tables.is_empty() {
            true => source.push_str(self.def.cuda),
            false => source.push_str(&with_copies(self.def.cuda, &functions.tables)),
        }
        source.push_str(entry);
        source.push_str("\n}  // namespace gemma4c\n");
        source
    }
}

/// The launch arguments of a function in a slot: `{a, b}` where they are the fields of a view.
fn grouped(params: &[InstanceParam]) -> Vec<String> {
    let of_view = |view: &[InstanceParam]| {
        let names: Vec<_> = view.iter().map(|param| param.name.as_str()).collect();
        if view[0].def.view.is_empty() { names.join(", ") } else { format!("{{{}}}", names.join(", ")) }
    };
    params.chunk_by(|a, b| a.def.view == b.def.view).map(of_view).collect()
}

/// A table and the function that reads it: from shared memory; on the host, where it lies.
fn table_text(table: &TableDef, on_host: bool) -> String {
    let TableDef { name, doc, values } = table;
    let mut text = format!("\n// {}\n", doc.trim().replace('\n', "\n//"));
    let _ = write!(text, "__device__ const u32 {name}_values[{}] = {{", values.len());
    for (at, value) in values.iter().enumerate() {
        text.push_str(if at % 8 == 0 { "\n    " } else { " " });
        let _ = write!(text, "{value:#x}u,");
    }
    text.push_str("\n};\n");
    let place = if on_host { "values" } else { "shared" };
    if !on_host {
        let _ = writeln!(text, "__shared__ u32 {name}_shared[{}];", values.len());
    }
    let _ = writeln!(text, "__device__ __forceinline__ u32 {name}(u32 index) {{ return {name}_{place}[index]; }}");
    text
}

/// A kernel's text that copies tables to shared memory before anything else.
fn with_copies(kernel: &str, tables: &[&TableDef]) -> String {
    let head = kernel.find("extern \"C\" __global__").unwrap_or_default();
    let body = kernel[head..].find(") {\n").map_or(kernel.len(), |at| head + at + 4);
    let mut text = kernel[..body].to_string();
    for TableDef { name, values, .. } in tables {
        let _ = writeln!(
            text,
            "    for (u32 at = threadIdx.x; at < {}; at += blockDim.x) {name}_shared[at] = {name}_values[at];",
            values.len()
        );
    }
    text.push_str("    __syncthreads();\n");
    text + &kernel[body..]
}

fn host_text(row: &Intrinsic) -> String {
    match row.host {
        HostText::Same => row.cuda.to_string(),
        HostText::Text(text) => text.to_string(),
        HostText::Hook(_) => row.hook_text(),
    }
}

/// A row's text as it stands in a source: its macro joins head, body and brace without knowing whether the body has
/// lines.
fn tidy(text: &str) -> String {
    let lines = text.trim().lines().map(str::trim_end);
    lines.map(|line| if line == " }" { "}\n".to_string() } else { format!("{line}\n") }).collect()
}
