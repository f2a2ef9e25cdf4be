//! cuBLASLt beside our products: what NVIDIA's own library reaches with the same rows and matrices, both bf16, on the
//! same GPU in the same run.
//!
//! It is a yardstick of `kernels --bench` and of nothing else; no plan calls it. The library is loaded if the machine
//! has it. What it multiplies is its best plan for the shape by its own heuristic, with weights as rows of a bf16
//! matrix, as our products have them, and a result in bf16, which is its fastest.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::path::Path;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use libloading::Library;

use super::{Buffer, CudaError, Device};

/// The library's names, the newest first.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Bytes that a product may use for its own purposes: what the manual advises on Hopper.
const WORKSPACE: usize = 32 << 20;
/// `CUBLAS_OP_T`, which the bindings lack.
const TRANSPOSED: c_int = 1;
/// Products between two looks at the clock.
const REPEATED: usize = 32;

/// A call of the library that failed.
#[derive(Debug, thiserror::Error)]
pub enum CublasLtError {
    #[error("no libcublasLt on this machine")]
    NotFound,
    #[error("cuBLASLt, {doing}: {code:?}")]
    Call { doing: &'static str, code: sys::cublasStatus_t },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

fn call(doing: &'static str) -> impl Fn(CublasError) -> CublasLtError {
    move |error| CublasLtError::Call { doing, code: error.0 }
}

/// The library, opened on a device.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
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

impl CublasLt {
    /// Loads the library from where the system's loader looks, or from `folder`.
    #[allow(unsafe_code)]
    pub fn open(device: &Device, folder: Option<&Path>) -> Result<CublasLt, CublasLtError> {
        // cudarc asks the loader alone. It finds a library under its name once the process has it from anywhere.
        for name in NAMES {
            // SAFETY: NVIDIA's library, whose initialisers need nothing of us.
            if let Some(Ok(library)) = folder.map(|folder| unsafe { Library::new(folder.join(name)) }) {
                std::mem::forget(library);
                break;
            }
        }
        // SAFETY: as above.
        if !unsafe { sys::is_culib_present() } {
            return Err(CublasLtError::NotFound);
        }
        // It takes the context that is current in this thread.
        device.synchronize()?;
        let handle = result::create_handle().map_err(call("opening"))?;
        Ok(CublasLt { handle, workspace: device.allocate(WORKSPACE)? })
    }

    /// Microseconds of a product, over so many copies of the weights in turn that none finds its own in L2.
    #[allow(unsafe_code)]
    pub fn microseconds(
        &self,
        device: &Device,
        shape: Shape,
        x: &Buffer,
        weights: &[Buffer],
    ) -> Result<f64, CublasLtError> {
        let Shape { rows, outputs, k } = shape;
        let out = device.allocate(rows as usize * outputs as usize * 2)?;
        let product =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F)
                .map_err(call("a product"))?;
        let transposed = TRANSPOSED;
        let of_left = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let at = (&raw const transposed).cast();
        // SAFETY: the attribute is as large as an int.
        unsafe { result::set_matmul_desc_attribute(product, of_left, at, size_of::<c_int>()) }
            .map_err(call("a transposition"))?;
        // Matrices are by columns there: the result's columns are our rows.
        let layout = |rows: u32, columns: u32| {
            let of = sys::cudaDataType_t::CUDA_R_16BF;
            result::create_matrix_layout(of, rows.into(), columns.into(), rows.into()).map_err(call("a layout"))
        };
        let (left, right, sums) = (layout(k, outputs)?, layout(k, rows)?, layout(outputs, rows)?);
        let preference = result::create_matmul_pref().map_err(call("a preference"))?;
        let most = WORKSPACE;
        let of_workspace = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let at = (&raw const most).cast();
        // SAFETY: the attribute is as large as a size.
        unsafe { result::set_matmul_pref_attribute(preference, of_workspace, at, size_of::<usize>()) }
            .map_err(call("a workspace"))?;
        // SAFETY: the descriptors were made above.
        let found =
            unsafe { result::get_matmul_algo_heuristic(self.handle, product, left, right, sums, sums, preference) };
        let found = found.map_err(call("a plan"))?;
        let (one, zero, failed) = (1.0f32, 0.0f32, Cell::new(None));
        let run = || {
            for weights in weights.iter().cycle().take(REPEATED.next_multiple_of(weights.len())) {
                // SAFETY: buffers are as large as the layouts say, and live until the device has been waited for.
                let multiplied = unsafe {
                    result::matmul(
                        self.handle,
                        product,
                        (&raw const one).cast(),
                        (&raw const zero).cast(),
                        weights.address() as *const c_void,
                        left,
                        x.address() as *const c_void,
                        right,
                        out.address() as *const c_void,
                        sums,
                        out.address() as *mut c_void,
                        sums,
                        &found.algo,
                        self.workspace.address() as *mut c_void,
                        WORKSPACE,
                        device.stream().cast(),
                    )
                };
                failed.set(failed.get().or(multiplied.err()));
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
        // SAFETY: the device was waited for; nobody else has these.
        unsafe {
            for layout in [left, right, sums] {
                result::destroy_matrix_layout(layout).map_err(call("a layout"))?;
            }
            result::destroy_matmul_desc(product).map_err(call("a product"))?;
            result::destroy_matmul_pref(preference).map_err(call("a preference"))?;
        }
        match failed.get() {
            Some(error) => Err(call("multiplying")(error)),
            None => {
                times.sort_by(f64::total_cmp);
                Ok(times[times.len() / 2])
            }
        }
    }
}
