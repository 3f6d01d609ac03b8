//! `ops::linear` and the ops that fuse it with what follows: weights streamed past the tensor cores for few rows (on
//! Hopper up to 96), cuBLASLt for many, or tiles in shared memory where that library is missing.

use super::linear_swiglu::{fused, is_fused};
use super::norm::{add_rms_norm, add_slices_rms_norm, rms_norm};
use super::stream::{Output, STREAM_ROWS, stream};
use super::swiglu::swiglu;
use super::wide::{is_wide, wide};
use super::{images, pieces};
use pegainfer_core::cuda::{Cuda, Launch};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// As in csrc/linear_tiled.cu.
const THREADS: usize = 256;
const STAGES: usize = 4;
const DEPTH_BYTES: usize = 64;

/// Tile of the kernel for many rows: large tiles reuse more, if there are enough of them to fill the GPU.
fn tile(gpu: &Cuda, m: usize, n: usize) -> usize {
    if m.div_ceil(128) * n.div_ceil(128) >= gpu.multiprocessors() { 128 } else { 64 }
}

/// Whether weights stream for a product of `m` rows.
fn streams(gpu: &Cuda, m: usize) -> bool {
    m <= STREAM_ROWS || is_wide(gpu, m)
}

/// Launches a product whose weights stream. `out` takes the results as the kernel's output argument. Returns the number
/// of slices.
fn streamed(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    output: Output,
    out: impl FnOnce(Launch) -> Launch,
) -> Result<usize, OpError> {
    match is_wide(gpu, x.rows_cols().0) {
        true => wide(gpu, op, x, w, output, out),
        false => stream(gpu, op, x, w, output, out),
    }
}

/// Name of the kernel that takes `m` rows to `n` columns, for the record.
pub(crate) fn linear_kernel(gpu: &mut Cuda, m: usize, n: usize, dtype: DType) -> &'static str {
    match (dtype, tile(gpu, m, n)) {
        _ if is_wide(gpu, m) => "wide",
        _ if m <= STREAM_ROWS => "stream",
        _ if gpu.has_blaslt() => "cublaslt",
        (DType::F32, 64) => "tiled_f32_64",
        (DType::F32, _) => "tiled_f32_128",
        (_, 64) => "tiled_bf16_64",
        (_, _) => "tiled_bf16_128",
    }
}

/// As [`linear_kernel`], of [`linear_swiglu`] with rows of `k` columns.
pub(crate) fn swiglu_kernel(gpu: &mut Cuda, m: usize, n: usize, k: usize) -> &'static str {
    if is_fused(gpu, m, k) { "swiglu" } else { linear_kernel(gpu, m, n, DType::Bf16) }
}

pub(crate) fn linear(exec: &mut Exec, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let op = "linear";
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    pieces(op, k)?;
    pieces(op, n)?;
    let gpu = exec.gpu()?;
    if streams(gpu, m) {
        let output = if out.dtype() == DType::F32 { Output::Logits } else { Output::Bf16 };
        return streamed(gpu, op, x, w, output, |launch| launch.output(out)).map(|_| ());
    }
    if gpu.has_blaslt() {
        return gpu.matmul(op, x, w, false, out);
    }
    let (tile, kernel) = (tile(gpu, m, n), linear_kernel(gpu, m, n, out.dtype()));
    let launch = gpu.launch(op, &images::LINEAR_TILED, kernel)?.input(x).input(w).output(out).u32(m).u32(n).u32(k);
    // SAFETY: matches csrc/linear_tiled.cu; the op checked the shapes.
    unsafe { launch.shared(STAGES * 2 * tile * DEPTH_BYTES).run([m.div_ceil(tile), n.div_ceil(tile), 1], THREADS) }
}

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn linear_add_norm(
    exec: &mut Exec,
    x: &Tensor,
    w: &Tensor,
    residual: &mut Tensor,
    norm: &Tensor,
    eps: f32,
    delta: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "linear_add_norm";
    let (m, k) = x.rows_cols();
    pieces(op, k)?;
    pieces(op, w.rows_cols().0)?;
    let gpu = exec.gpu()?;
    if streams(gpu, m) {
        // At most 8 slices of 16 rows, or 64 rows of w for each multiprocessor: a few MB of the workspace's 64.
        let slices = gpu.workspace();
        let count = streamed(gpu, op, x, w, Output::Slices, |launch| launch.pointer(slices))?;
        return add_slices_rms_norm(exec, (slices, count), residual, norm, eps, out);
    }
    if gpu.has_blaslt() {
        gpu.matmul(op, x, w, true, residual)?;
        return rms_norm(exec, residual, norm, eps, out);
    }
    linear(exec, x, w, delta)?;
    add_rms_norm(exec, delta, residual, norm, eps, out)
}

pub(crate) fn linear_swiglu(
    exec: &mut Exec,
    x: &Tensor,
    w: &Tensor,
    gate_up: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "linear_swiglu";
    let (m, k) = x.rows_cols();
    pieces(op, k)?;
    pieces(op, w.rows_cols().0)?;
    let gpu = exec.gpu()?;
    if streams(gpu, m) {
        return streamed(gpu, op, x, w, Output::Gated, |launch| launch.output(out)).map(|_| ());
    }
    if is_fused(gpu, m, k) {
        return fused(gpu, op, x, w, out);
    }
    linear(exec, x, w, gate_up)?;
    swiglu(exec, gate_up, out)
}
