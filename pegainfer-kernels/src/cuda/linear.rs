//! `ops::linear` and the ops that fuse it with what follows, as they were chosen.

use super::abi::{GemmMma, Target};
use super::gemm_wgmma::linear_swiglu_wgmma;
use super::gemv_splitk::gemv_splitk;
use super::norm::{add_partials_rms_norm, add_rms_norm, rms_norm};
use super::skinny_wgmma::skinny_wgmma;
use super::swiglu::swiglu;
use super::{blaslt, vectors};
use crate::choice::{AddNorm, Gemm, Output, Skinny, Swiglu};
use crate::limits::gemm_mma::{DEPTH, STAGES, THREADS};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Launches a skinny GEMM, which writes to `out`.
fn skinny(
    gpu: &mut Cuda,
    op: &'static str,
    operands: (&Tensor, &Tensor),
    (kernel, output): (&Skinny, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    match kernel {
        Skinny::GemvSplitK(plan) => gemv_splitk(gpu, op, operands, (plan, output), out),
        Skinny::Wgmma(plan) => skinny_wgmma(gpu, op, operands, (plan, output), out),
    }
}

/// Launches csrc/gemm_mma.cu with tiles of `tile` rows and columns.
fn tiled(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    tile: usize,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernel = match (out.dtype(), tile) {
        (DType::F32, 64) => GemmMma::gemm_mma_f32_64,
        (DType::F32, _) => GemmMma::gemm_mma_f32_128,
        (_, 64) => GemmMma::gemm_mma_bf16_64,
        (_, _) => GemmMma::gemm_mma_bf16_128,
    };
    let launch = kernel.launch(gpu, op, GemmMma { x, w, out, m, n, k })?;
    // SAFETY: the op checked the shapes.
    unsafe {
        launch
            .shared(STAGES * 2 * tile * DEPTH * DType::Bf16.size())
            .run([m.div_ceil(tile), n.div_ceil(tile), 1], THREADS)
    }
}

/// What the kernels demand of a GEMM's shape.
fn check(op: &'static str, x: &Tensor, w: &Tensor) -> Result<(), OpError> {
    vectors(op, x.rows_cols().1)?;
    vectors(op, w.rows_cols().0)
}

pub(crate) fn linear(
    exec: &mut Exec,
    op: &'static str,
    gemm: &Gemm,
    x: &Tensor,
    w: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    check(op, x, w)?;
    let output = if out.dtype() == DType::F32 { Output::F32 } else { Output::Bf16 };
    match gemm {
        Gemm::Skinny(kernel) => skinny(exec.gpu()?, op, (x, w), (kernel, output), Target::Tensor(out)),
        Gemm::CublasLt => blaslt::matmul(exec, op, x, w, false, out),
        Gemm::TiledMma(tile) => tiled(exec.gpu()?, op, x, w, *tile, out),
    }
}

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn linear_add_norm(
    exec: &mut Exec,
    choice: &AddNorm,
    x: &Tensor,
    w: &Tensor,
    residual: &mut Tensor,
    norm: &Tensor,
    eps: f32,
    delta: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "linear_add_norm";
    check(op, x, w)?;
    match choice {
        AddNorm::Partials(kernel) => {
            let gpu = exec.gpu()?;
            // At most 8 splits of 16 rows, or 64 rows of w for each multiprocessor: a few MB of the workspace's 64.
            let partials = gpu.workspace();
            skinny(gpu, op, (x, w), (kernel, Output::SplitK), Target::Scratch(partials))?;
            add_partials_rms_norm(exec, (partials, kernel.splits()), residual, norm, eps, out)
        }
        AddNorm::Accumulated => {
            blaslt::matmul(exec, op, x, w, true, residual)?;
            rms_norm(exec, residual, norm, eps, out)
        }
        AddNorm::Separate(tile) => {
            tiled(exec.gpu()?, op, x, w, *tile, delta)?;
            add_rms_norm(exec, delta, residual, norm, eps, out)
        }
    }
}

pub(crate) fn linear_swiglu(
    exec: &mut Exec,
    choice: &Swiglu,
    x: &Tensor,
    w: &Tensor,
    gate_up: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "linear_swiglu";
    check(op, x, w)?;
    match choice {
        Swiglu::Gated(kernel) => skinny(exec.gpu()?, op, (x, w), (kernel, Output::Gated), Target::Tensor(out)),
        Swiglu::Wgmma => linear_swiglu_wgmma(exec.gpu()?, op, x, w, out),
        Swiglu::Separate(gemm) => {
            linear(exec, op, gemm, x, w, gate_up)?;
            swiglu(exec, gate_up, out)
        }
    }
}
