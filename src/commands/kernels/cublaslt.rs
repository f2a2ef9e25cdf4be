//! cuBLASLt beside our products: what NVIDIA's own library reaches with the same rows and matrices, both bf16, on the same GPU in the same run.
//!
//! It is a yardstick of `kernels --bench` and of nothing else. The library is loaded if the machine has it, and its nine functions are bound here by the signatures that
//! its manual gives. What it multiplies is its best plan for the shape by its own heuristic, with weights as rows of a bf16 matrix, as our products have
//! them, and a result in bf16, which is its fastest.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context, Result, ensure};
use gemma4c_runtime::cuda::{Buffer, CudaError, Device};
use libloading::Library;

/// The library's names, the newest first: looked for where the loader does, then beside NVRTC.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Bytes that a product may use for its own purposes: what the manual advises on Hopper.
const WORKSPACE: usize = 32 << 20;
/// Products between two looks at the clock.
const REPEATED: usize = 32;

const COMPUTE_F32: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_BF16: c_int = 14;
const TRANSPOSE_LEFT: c_int = 3;
const TRANSPOSED: c_int = 1;
const MOST_WORKSPACE: c_int = 1;

type Status = c_int;
type Handle = *mut c_void;

/// What the heuristic answers: a plan (64 bytes), its workspace, whether it can be run, waves, and room for more.
#[repr(C)]
#[derive(Clone, Copy)]
struct Found {
    plan: [u64; 8],
    workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

type Multiply = unsafe extern "C" fn(
    Handle,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const [u64; 8],
    u64,
    usize,
    *mut c_void,
) -> Status;

/// The library, opened on a device.
pub struct CublasLt {
    library: Library,
    handle: Handle,
    workspace: Buffer,
}

/// A product's sizes: `rows` of x by `outputs` rows of weights, `k` values each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub rows: u32,
    pub outputs: u32,
    pub k: u32,
}

impl Shape {
    pub fn flops(&self) -> u64 {
        2 * u64::from(self.rows) * u64::from(self.outputs) * u64::from(self.k)
    }

    /// Bytes of the weights in bf16.
    pub fn weight_bytes(&self) -> u64 {
        2 * u64::from(self.outputs) * u64::from(self.k)
    }

    /// Bytes of the activations in bf16.
    pub fn row_bytes(&self) -> u64 {
        2 * u64::from(self.rows) * u64::from(self.k)
    }
}

fn done(status: Status, what: &str) -> Result<()> {
    ensure!(status == 0, "cuBLASLt, {what}: status {status}");
    Ok(())
}

impl CublasLt {
    /// Loads the library, or one in `folder`; an error says that there is none.
    #[allow(unsafe_code)]
    pub fn open(device: &Device, folder: Option<&Path>) -> Result<CublasLt> {
        let named = NAMES.iter().map(PathBuf::from);
        let beside = folder.into_iter().flat_map(|folder| NAMES.iter().map(|name| folder.join(name)));
        // SAFETY: NVIDIA's library, which has initialisers that need nothing of us.
        let library = named.chain(beside).find_map(|path| unsafe { Library::new(path) }.ok());
        let library = library.context("no libcublasLt on this machine")?;
        let mut handle = ptr::null_mut();
        device.synchronize()?;
        // SAFETY: the signature is the manual's; the device's context is current since `synchronize`.
        let status = unsafe {
            let create = library.get::<unsafe extern "C" fn(*mut Handle) -> Status>(b"cublasLtCreate")?;
            create(&mut handle)
        };
        done(status, "opening")?;
        Ok(CublasLt { library, handle, workspace: device.allocate(WORKSPACE)? })
    }

    /// Microseconds of a product, over so many copies of the weights in turn that none finds its own in L2.
    #[allow(unsafe_code)]
    pub fn microseconds(&self, device: &Device, shape: Shape, x: &Buffer, weights: &[Buffer]) -> Result<f64> {
        let Shape { rows, outputs, k } = shape;
        let out = device.allocate(rows as usize * outputs as usize * 2)?;
        let stream = device.stream();
        // SAFETY: the signatures and constants are the manual's; descriptors are small and live as long as the process; buffers are as large as the layouts say.
        unsafe {
            let describe = self
                .library
                .get::<unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status>(b"cublasLtMatmulDescCreate")?;
            let mut product = ptr::null_mut();
            done(describe(&mut product, COMPUTE_F32, TYPE_F32), "a product")?;
            type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status;
            let set = self.library.get::<Set>(b"cublasLtMatmulDescSetAttribute")?;
            let transposed = TRANSPOSED;
            done(set(product, TRANSPOSE_LEFT, (&raw const transposed).cast(), size_of::<c_int>()), "a transposition")?;
            // Matrices are by columns there: the result's columns are our rows.
            type Lay = unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status;
            let lay = self.library.get::<Lay>(b"cublasLtMatrixLayoutCreate")?;
            let layout = |of: c_int, rows: u32, columns: u32| -> Result<Handle> {
                let mut layout = ptr::null_mut();
                done(lay(&mut layout, of, rows.into(), columns.into(), rows.into()), "a layout")?;
                Ok(layout)
            };
            let (left, right) = (layout(TYPE_BF16, k, outputs)?, layout(TYPE_BF16, k, rows)?);
            let result = layout(TYPE_BF16, outputs, rows)?;
            let prefer =
                self.library.get::<unsafe extern "C" fn(*mut Handle) -> Status>(b"cublasLtMatmulPreferenceCreate")?;
            let mut preference = ptr::null_mut();
            done(prefer(&mut preference), "a preference")?;
            let ask = self.library.get::<Set>(b"cublasLtMatmulPreferenceSetAttribute")?;
            let most = WORKSPACE;
            done(ask(preference, MOST_WORKSPACE, (&raw const most).cast(), size_of::<usize>()), "a workspace")?;
            type Find = unsafe extern "C" fn(
                Handle,
                Handle,
                Handle,
                Handle,
                Handle,
                Handle,
                Handle,
                c_int,
                *mut Found,
                *mut c_int,
            ) -> Status;
            let find = self.library.get::<Find>(b"cublasLtMatmulAlgoGetHeuristic")?;
            let mut found = Found { plan: [0; 8], workspace: 0, status: 0, waves: 0.0, reserved: [0; 4] };
            let mut count = 0;
            done(
                find(self.handle, product, left, right, result, result, preference, 1, &mut found, &mut count),
                "a plan",
            )?;
            ensure!(count == 1, "cuBLASLt has no plan for {shape:?}");
            let multiply = self.library.get::<Multiply>(b"cublasLtMatmul")?;
            let (one, zero, failed) = (1.0f32, 0.0f32, Cell::new(0));
            let run = || {
                for weights in weights.iter().cycle().take(REPEATED.next_multiple_of(weights.len())) {
                    let status = multiply(
                        self.handle,
                        product,
                        (&raw const one).cast(),
                        weights.address(),
                        left,
                        x.address(),
                        right,
                        (&raw const zero).cast(),
                        out.address(),
                        result,
                        out.address(),
                        result,
                        &found.plan,
                        self.workspace.address(),
                        WORKSPACE,
                        stream,
                    );
                    failed.set(if failed.get() == 0 { status } else { failed.get() });
                }
                Ok::<(), CudaError>(())
            };
            run()?;
            device.synchronize()?;
            let count = REPEATED.next_multiple_of(weights.len()) as f64;
            let mut times = Vec::new();
            for _ in 0..5 {
                times.push(f64::from(device.time(run)?) * 1000.0 / count);
            }
            done(failed.get(), "multiplying")?;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        }
    }
}
