//! Large-M GEMMs on cuBLASLt, which a separate thread opens while weights are loaded.
//!
//! Each GEMM gets a plan once: layouts and the algorithm. The library's heuristic ranks candidates in 0.1 ms, and its
//! first is mostly within 3 % of the best, but up to 20 % slower when it is wrong. It does not know that the weights of
//! a layer are never in the cache. For frequent row counts the candidates are therefore timed (see `tuning`).

mod autotuned;
mod fp8;
mod gemm_size;
mod layouts;
mod library;
mod opening;
#[cfg(feature = "deepseek-v4")]
mod preparation;
#[cfg(test)]
mod tests;
mod tuning;

use crate::choice::CublasLt;
use autotuned::Autotuned;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;
use gemm_size::FREE;
pub(super) use gemm_size::{FREE_BYTES, FREE_BYTES_BY_GROUP, GemmSize, Multiplied};
use layouts::Plan;
use library::Library;
use opening::State;
use pegainfer_core::cuda::{GpuInfo, WORKSPACE_BYTES, describe};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

/// Number of candidates requested from the heuristic, which has no more for most GEMMs.
const CANDIDATES: usize = 8;

/// Row count whose plan is used for `m` rows: the next of 8 for each power of two, and up to 128 the next multiple of
/// 16. (The best algorithm for 256 rows loses a fifth at 200.)
pub(crate) fn m_bucket(m: usize) -> usize {
    m.next_multiple_of((m.next_power_of_two() / 16).max(16))
}

/// Addresses of the operands of a GEMM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub x: u64,
    pub w: u64,
    pub out: u64,
    /// Addresses of the scales of x, `[k / 128, m]` f32, and of w, `[n / 128, k / 128]` f32, or by group `[k / 128, n]`
    /// f32; 0 without.
    pub scales: (u64, u64),
}

/// The first version that has scales of blocks.
const BLOCK_SCALES: usize = 120_900;

/// The library and its objects. Plans are kept forever: 1 KB per row count.
struct BlasLt {
    library: Library,
    handle: sys::cublasLtHandle_t,
    operation: sys::cublasLtMatmulDesc_t,
    /// Preferences for GEMMs that leave [`FREE`] bytes of the workspace alone.
    preferences: [sys::cublasLtMatmulPreference_t; FREE.len()],
    /// Operation for FP8 with scales of blocks; null before version 12.9.
    fp8_operation: sys::cublasLtMatmulDesc_t,
    /// Operation for FP8 with scales of groups; null before version 12.9.
    group_operation: sys::cublasLtMatmulDesc_t,
    plans: HashMap<GemmSize, Plan>,
    autotuned: Autotuned,
    /// Stream and workspace of the main stream, for timing plans and loading kernels.
    place: Place,
}

/// Stream and workspace of GEMMs.
#[derive(Debug, Clone)]
struct Place {
    stream: Arc<CudaStream>,
    workspace: u64,
}

impl Place {
    /// Place of the current stream.
    fn current(exec: &mut Exec) -> Result<Self, OpError> {
        let gpu = exec.gpu()?;
        Ok(Self { stream: gpu.stream().clone(), workspace: gpu.workspace() })
    }
}

// SAFETY: the handles belong to this object alone, and the library lets any thread use them.
unsafe impl Send for BlasLt {}

/// Starts opening cuBLASLt for the GPU of `exec` on a separate thread, for example while weights are loaded. Otherwise
/// the first call of another function here does so and waits.
pub(super) fn begin(exec: &mut Exec) {
    exec.attached(State::begin);
}

/// Version and path of the cuBLASLt that [`matmul`] runs on, or a sentence that explains why there is none. Waits until
/// it is open; the first call warns if it cannot be opened.
pub fn blaslt(exec: &mut Exec) -> Result<String, String> {
    let blaslt = exec.attached(State::begin).opened()?;
    Ok(format!("{} ({})", blaslt.library.version(), blaslt.library.path.display()))
}

/// Available functions of cuBLASLt on the GPU of `exec`; waits until the library is open.
pub(crate) fn cublaslt(exec: &mut Exec) -> CublasLt {
    match exec.attached(State::begin).opened() {
        Ok(blaslt) if blaslt.library.version >= BLOCK_SCALES => CublasLt::BlockScales,
        Ok(_) => CublasLt::Bf16,
        Err(_) => CublasLt::Missing,
    }
}

/// Plans every GEMM launched so far whose algorithms are not timed, for all row counts from 33 to `max_rows`, and loads
/// the library's kernels for them; see `preparation`. Overwrites the workspace. No effect without cuBLASLt.
#[cfg(feature = "deepseek-v4")]
pub(crate) fn plan_row_counts(exec: &mut Exec, max_rows: usize) {
    if let Ok(blaslt) = exec.attached(State::begin).opened() {
        blaslt.prepare(max_rows);
    }
}

/// [`launch`] of tensors in bf16: `out = x · wᵀ`, or with `accumulate` `out += x · wᵀ`.
pub(super) fn matmul(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    accumulate: bool,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let gemm = GemmSize::whole((m, n, k), out.dtype(), Multiplied::Bf16);
    let bf16 = [x.dtype(), w.dtype()] == [DType::Bf16; 2];
    let fits = w.rows_cols().1 == k && out.rows_cols() == (m, n);
    assert!(bf16 && fits, "{op}: {gemm:?} of {} and {}", x.name(), w.name());
    let at = Operands { x: x.device(), w: w.device(), out: out.device(), scales: (0, 0) };
    launch(exec, op, gemm, at, accumulate, out)
}

/// `out = x · wᵀ`, or with `accumulate` `out += x · wᵀ`, of operands at these addresses; results lie in `written`.
///
/// `x`: `[m, k]` and `w`: `[n, k]`, both bf16, or both e4m3 with scales; `out`: `[m, n]` bf16 or f32; `k` and `n` in
/// multiples of 8, all on this GPU. f32 accumulation with one final rounding. Exception: the library rounds the GEMM to
/// bf16 before adding it to a bf16 `out`, unless its algorithm splits the sum.
///
/// The first GEMM of a frequent row count takes up to 0.1 s longer, because algorithms are timed. While the stream is
/// captured, the heuristic's choice is taken instead and kept, so run a GEMM once before capturing it. Uses the
/// workspace.
pub(super) fn launch(
    exec: &mut Exec,
    op: &'static str,
    gemm: GemmSize,
    at: Operands,
    accumulate: bool,
    written: &Tensor,
) -> Result<(), OpError> {
    let GemmSize { m, n, k, .. } = gemm;
    let place = Place::current(exec)?;
    let blaslt = exec.attached(State::begin).opened();
    let blaslt = blaslt.map_err(|message| OpError { op, message: message.to_owned() })?;
    let failed = |e| OpError { op, message: format!("cuBLASLt, {m} rows of {k} to {n}: {e}") };
    let plan = blaslt.plan(gemm, at).map_err(failed)?;
    blaslt.run(&plan, at, accumulate, &place).map_err(failed)?;
    exec.gpu()?.library_kernel(op, written);
    Ok(())
}

impl BlasLt {
    fn open(info: &GpuInfo, place: Place) -> Result<Self, String> {
        place.stream.context().bind_to_thread().map_err(describe)?;
        let library = Library::open(info.driver)?;
        let setting = format!("{}, CUDA {}, cuBLASLt {}", info.name, info.driver, library.version());
        let mut opened = Self {
            library,
            handle: null_mut(),
            operation: null_mut(),
            preferences: [null_mut(); FREE.len()],
            fp8_operation: null_mut(),
            group_operation: null_mut(),
            plans: HashMap::new(),
            autotuned: Autotuned::load(autotuned::file(), setting),
            place,
        };
        let set_up = opened.set_up().and_then(|()| opened.warm_up());
        set_up.map_err(|e| format!("{} cannot be used: {e}", opened.library.path.display()))?;
        Ok(opened)
    }

    /// Creates the handle, the operation and the heuristic's preferences.
    fn set_up(&mut self) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA as TRANSPOSE_FIRST;
        use sys::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as WORKSPACE,
            CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK as SCHEMES,
        };
        let (compute, f32) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        // The library's matrices are column-major, so it computes outᵀ = (wᵀ)ᵀ xᵀ.
        let transpose: i32 = 1;
        // Parts of a split sum meet in f32.
        let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let lt = &self.library.functions;
        // SAFETY: each object is created before it is used; attributes have the sizes that the library documents: an
        // int32, a size and a uint32.
        unsafe {
            (lt.create)(&mut self.handle).result()?;
            (lt.create_operation)(&mut self.operation, compute, f32).result()?;
            (lt.set_operation)(self.operation, TRANSPOSE_FIRST, from_ref(&transpose).cast(), 4).result()?;
            for (preference, free) in self.preferences.iter_mut().zip(FREE) {
                let bytes = WORKSPACE_BYTES - free;
                (lt.create_preference)(preference).result()?;
                (lt.set_preference)(*preference, WORKSPACE, from_ref(&bytes).cast(), size_of::<usize>()).result()?;
                (lt.set_preference)(*preference, SCHEMES, from_ref(&schemes).cast(), 4).result()?;
            }
        }
        if self.library.version >= BLOCK_SCALES { self.set_up_fp8(compute, f32) } else { Ok(()) }
    }

    /// Queries the heuristic once for any GEMM, because its first answer takes 0.1 s longer than later ones.
    fn warm_up(&self) -> Result<(), CublasError> {
        let plan = self.layouts(GemmSize::whole((256, 1024, 1024), DType::Bf16, Multiplied::Bf16))?;
        let asked = self.candidates(&plan, (0, 0));
        self.release(&plan);
        asked.map(drop)
    }

    /// The plan of `gemm`, created if it is new. `at`: operands to time it with.
    fn plan(&mut self, gemm: GemmSize, at: Operands) -> Result<Plan, CublasError> {
        if let Some(plan) = self.plans.get(&gemm) {
            return Ok(*plan);
        }
        let mut plan = self.layouts(gemm)?;
        match self.algorithm(gemm, &plan, at) {
            Ok(algorithm) => plan.algorithm = algorithm,
            Err(error) => {
                self.release(&plan);
                return Err(error);
            }
        }
        self.plans.insert(gemm, plan);
        Ok(plan)
    }

    /// The heuristic's candidates, best first; at least one.
    fn candidates(&self, plan: &Plan, scales: (u64, u64)) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let operation = self.operation(plan.multiplied, scales)?;
        let preference = self.preferences[plan.multiplied.free_index()];
        // SAFETY: plain numbers, for which zero is valid.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut count: c_int = 0;
        let lt = &self.library.functions;
        // SAFETY: handles are alive, and `found` has space for the requested number.
        unsafe {
            let (w, x, out, wanted) = (plan.w, plan.x, plan.out, CANDIDATES as c_int);
            let list = found.as_mut_ptr();
            (lt.heuristic)(self.handle, operation, w, x, out, out, preference, wanted, list, &mut count).result()?;
        }
        let usable = found.iter().take(count as usize).filter(|c| c.state.result().is_ok());
        let algorithms: Vec<_> = usable.map(|c| c.algo).collect();
        match algorithms.is_empty() {
            true => Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
            false => Ok(algorithms),
        }
    }

    /// True if `algorithm` can compute the layouts of `plan` within the workspace. `scales`: those of the operands; see
    /// [`Operands`].
    fn accepts(&self, plan: &Plan, scales: (u64, u64), algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: plain numbers, for which zero is valid.
        let mut result: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let (lt, w, x, out) = (&self.library.functions, plan.w, plan.x, plan.out);
        let Ok(operation) = self.operation(plan.multiplied, scales) else { return false };
        // SAFETY: handles are alive, and the algorithm came from this library.
        let status = unsafe { (lt.check)(self.handle, operation, w, x, out, out, algorithm, &mut result) };
        status.result().is_ok() && result.workspaceSize <= WORKSPACE_BYTES - plan.multiplied.free_bytes()
    }

    /// Puts `out = x wᵀ`, or `out += x wᵀ`, into the stream of `place`.
    fn run(&self, plan: &Plan, at: Operands, accumulate: bool, place: &Place) -> Result<(), CublasError> {
        let (alpha, beta) = (1f32, if accumulate { 1f32 } else { 0f32 });
        let (x, w, out) = (at.x as *const c_void, at.w as *const c_void, at.out as *mut c_void);
        let (alpha, beta) = (from_ref(&alpha).cast(), from_ref(&beta).cast());
        let free = plan.multiplied.free_bytes();
        let (algorithm, workspace) = (from_ref(&plan.algorithm), (place.workspace + free as u64) as *mut c_void);
        let operation = self.operation(plan.multiplied, at.scales)?;
        let stream = place.stream.cu_stream().cast();
        // SAFETY: operands are as large as the plan's layouts (`matmul` and `tuning` see to it) and the workspace is
        // WORKSPACE_BYTES long; alpha and beta are read before the call returns.
        unsafe {
            (self.library.functions.matmul)(
                self.handle,
                operation,
                alpha,
                w,
                plan.w,
                x,
                plan.x,
                beta,
                out,
                plan.out,
                out,
                plan.out,
                algorithm,
                workspace,
                WORKSPACE_BYTES - free,
                stream,
            )
        }
        .result()
    }
}

impl Drop for BlasLt {
    fn drop(&mut self) {
        // Work that uses these objects must have ended.
        if let Err(error) = self.place.stream.synchronize() {
            log::debug!("the GPU ended with an error: {}", describe(error));
        }
        self.plans.values().for_each(|plan| self.release(plan));
        let lt = &self.library.functions;
        // SAFETY: each was created once and is destroyed once, and no call is running; null was never created.
        unsafe {
            for preference in self.preferences.into_iter().filter(|made| !made.is_null()) {
                (lt.destroy_preference)(preference);
            }
            let operations = [self.operation, self.fp8_operation, self.group_operation];
            for operation in operations.into_iter().filter(|made| !made.is_null()) {
                (lt.destroy_operation)(operation);
            }
            if !self.handle.is_null() {
                (lt.destroy)(self.handle);
            }
        }
    }
}
