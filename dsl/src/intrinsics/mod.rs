//! Intrinsics: what a kernel can do beyond arithmetic. Each is one row: its Rust meaning, its CUDA text, its host text and
//! its synchronisation scope. A new one is one row in the file of its topic; it may wrap any inline PTX, if it brings its
//! Rust meaning.
//!
//! Two macros write rows. `intrinsic!` is for functions of plain values: the row's host text calls the Rust meaning back.
//! `row!` is for what is generic or takes memory: the Rust function stands beside it, and both texts are given whole.

pub mod asynchronous;
pub mod atomics;
pub mod bits;
pub mod bulk;
pub mod cluster;
pub mod grid;
pub mod ids;
pub mod loads;
pub mod math;
pub mod mbarrier;
pub mod ordered;
pub mod tensor;
pub mod warp;
pub mod warpgroup;

use crate::definition::Callee;

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

/// A function of plain values. The body is its Rust meaning, `cuda` the body of its CUDA text.
macro_rules! intrinsic {
    (
        $(#[doc = $doc:literal])*
        $scope:ident fn $name:ident($($param:ident: $ty:ident),* $(,)?) $(-> $output:ident)? $body:block
        cuda $cuda:literal
    ) => {
        $(#[doc = $doc])*
        #[track_caller]
        #[allow(clippy::too_many_arguments)]
        pub fn $name($($param: $ty),*) $(-> $output)? $body

        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        pub enum $name {}

        impl $name {
            pub const ROW: &'static $crate::intrinsics::Intrinsic = {
                #[allow(clippy::too_many_arguments)]
                extern "C-unwind" fn hook($($param: $ty),*) $(-> $output)? {
                    $name($($param),*)
                }
                fn address() -> *const () {
                    hook as *const ()
                }
                static ROW: $crate::intrinsics::Intrinsic = $crate::intrinsics::Intrinsic {
                    name: stringify!($name),
                    scope: $crate::intrinsics::Scope::$scope,
                    since: $crate::intrinsics::since!(),
                    doc: concat!($($doc, "\n"),*),
                    cuda: concat!(
                        "__device__ __forceinline__ ",
                        $crate::intrinsics::output_name!($($output)?),
                        " ",
                        stringify!($name),
                        "(",
                        $crate::intrinsics::parameter_list!($($param $ty)*),
                        ") { ",
                        $cuda,
                        " }"
                    ),
                    host: $crate::intrinsics::HostText::Hook($crate::intrinsics::Hook(address)),
                    signature: (
                        $crate::intrinsics::output_name!($($output)?),
                        &[$((stringify!($param), stringify!($ty))),*],
                    ),
                    needs: &[],
                };
                &ROW
            };

            #[doc(hidden)]
            pub fn callee() -> $crate::Callee {
                $crate::Callee::Intrinsic(Self::ROW)
            }
        }
    };
}

/// A row whose Rust function is written beside it.
macro_rules! row {
    (
        $(#[doc = $doc:literal])*
        $scope:ident $name:ident $(since $since:literal)? $(needs [$($need:path),*])?
        cuda $cuda:literal
        host $host:tt
    ) => {
        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        pub enum $name {}

        impl $name {
            pub const ROW: &'static $crate::intrinsics::Intrinsic = {
                static ROW: $crate::intrinsics::Intrinsic = $crate::intrinsics::Intrinsic {
                    name: stringify!($name),
                    scope: $crate::intrinsics::Scope::$scope,
                    since: $crate::intrinsics::since!($($since)?),
                    doc: concat!($($doc, "\n"),*),
                    cuda: $cuda,
                    host: $crate::intrinsics::host_text!($host),
                    signature: ("", &[]),
                    needs: &[$($(<$need>::callee),*)?],
                };
                &ROW
            };

            #[doc(hidden)]
            pub fn callee() -> $crate::Callee {
                $crate::Callee::Intrinsic(Self::ROW)
            }
        }
    };
}

macro_rules! host_text {
    (same) => {
        $crate::intrinsics::HostText::Same
    };
    ($text:literal) => {
        $crate::intrinsics::HostText::Text($text)
    };
}

/// Every GPU of ours has what is not said to be newer.
macro_rules! since {
    () => {
        80
    };
    ($since:literal) => {
        $since
    };
}

macro_rules! output_name {
    () => {
        "void"
    };
    ($output:ident) => {
        stringify!($output)
    };
}

macro_rules! parameter_list {
    () => { "" };
    ($param:ident $ty:ident) => { concat!(stringify!($ty), " ", stringify!($param)) };
    ($param:ident $ty:ident $($rest:ident)+) => {
        concat!(stringify!($ty), " ", stringify!($param), ", ", $crate::intrinsics::parameter_list!($($rest)+))
    };
}

pub(crate) use {host_text, intrinsic, output_name, parameter_list, row, since};

macro_rules! table {
    ($($module:ident: $($name:ident)*;)*) => {
        /// Every intrinsic, by topic.
        pub static TABLE: &[&Intrinsic] = &[$($($module::$name::ROW),*),*];
    };
}

table! {
    ids: thread_idx block_dim block_idx block_idx_y block_idx_z grid_dim grid_dim_y grid_dim_z lane_id warp_id;
    warp: barrier warp_barrier shfl_xor shfl_down shfl_idx ballot warp_any warp_all warp_sum warp_max warp_min block_sum block_max;
    atomics: atomic_add atomic_max atomic_min last_block last_block_of;
    loads: load load_streamed read_only store store_floats4 prefetch_l2;
    ordered: atomic_load_relaxed atomic_store_relaxed atomic_add_release atomic_load_acquire atomic_wait_acquire;
    asynchronous: cp_async16 cp_async_commit cp_async_wait;
    mbarrier: mbarrier_init mbarrier_arrive mbarrier_arrive_expect mbarrier_wait;
    bulk: bulk_load bulk_store bulk_commit bulk_wait_read bulk_wait;
    bits: byte_of signed_byte_of nibble_of pack_bytes byte_perm dp4a sub_bytes bf16_lo bf16_hi f16_lo f16_hi pack_bf16 pack_f16;
    math: rsqrt recip f32_to_i32 f32_to_u32 round_to_i32 exp_fast exp2_fast;
    tensor: ldmatrix_x1 ldmatrix_x2 ldmatrix_x4 ldmatrix_x2_trans ldmatrix_x4_trans mma_m16n8k16_bf16 mma_m16n8k16_f16 mma_m16n8k32_s8;
    warpgroup: wgmma_bf16 wgmma_fence wgmma_commit wgmma_wait fence_proxy_async;
    cluster: cluster_rank cluster_barrier load_peer;
    grid: grid_dependency_wait grid_launch_dependents;
}
