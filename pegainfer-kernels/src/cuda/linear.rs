//! `ops::linear` and the ops that fuse it with the next op, as chosen.

use super::abi::Target;
use super::columns::Columns;
use super::fp8::fp8_by_fp8;
use super::gemm_mma::tiled;
use super::gemm_wgmma::linear_swiglu_wgmma;
use super::gemv_splitk::gemv_splitk;
use super::groups::{PackedWeight, skinny_groups};
use super::int4::skinny_int4;
use super::narrow_gemm::narrow_gemm;
use super::norm::{add_partials_rms_norm, add_rms_norm, rms_norm};
use super::skinny_wgmma::{skinny_wgmma, skinny_wgmma_fp8};
use super::swiglu::swiglu;
use super::widened::{Narrow, widened};
use super::widened_fp8::widened_to_fp8;
use super::{blaslt, vectors};
use crate::choice::{self, AddNorm, Gemm, GemmShape, Output, Skinny, Swiglu};
use crate::ops::{BlockScales, Matrix, MatrixRef};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Error for a launch that cannot happen, because the choice depends on the weight's format.
fn mismatch(op: &'static str) -> OpError {
    OpError { op, message: "a kernel was chosen for another format of weights".to_owned() }
}

/// The tensor of a weight in bf16.
pub(super) fn bf16<'w>(op: &'static str, w: MatrixRef<'w>) -> Result<&'w Tensor, OpError> {
    w.tensor().ok_or_else(|| mismatch(op))
}

/// Codes and scales of a weight in FP8.
fn fp8<'w>(op: &'static str, w: MatrixRef<'w>) -> Result<(&'w Tensor, &'w Tensor), OpError> {
    match w {
        MatrixRef::Fp8(codes, BlockScales::F32(scales)) => Ok((codes, scales)),
        _ => Err(mismatch(op)),
    }
}

/// Codes and scales of a weight that is widened.
fn narrow<'w>(op: &'static str, w: MatrixRef<'w>) -> Result<Narrow<'w>, OpError> {
    match w {
        MatrixRef::Grouped(format, codes, scales) => Ok(Narrow::Grouped(format, codes, scales)),
        w => fp8(op, w).map(|(codes, scales)| Narrow::Fp8(codes, scales)),
    }
}

/// A group-quantised weight in the order of the kernels.
fn packed<'w>(op: &'static str, w: MatrixRef<'w>) -> Result<PackedWeight<'w>, OpError> {
    let MatrixRef::Grouped(format, codes, scales) = w else { return Err(mismatch(op)) };
    PackedWeight::of(format, w.shape(), codes, scales).ok_or_else(|| mismatch(op))
}

/// Launches a skinny GEMM; writes to `out`.
fn skinny(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w): (&Tensor, MatrixRef<'_>),
    (kernel, output): (&Skinny, Output),
    out: Target<'_>,
) -> Result<(), OpError> {
    match kernel {
        Skinny::GemvSplitK(plan) => gemv_splitk(gpu, op, (x, bf16(op, w)?), (plan, output), out),
        Skinny::Wgmma(plan) => match w.tensor() {
            Some(w) => skinny_wgmma(gpu, op, (x, w), (plan, output), out),
            None => {
                let (codes, scales) = fp8(op, w)?;
                skinny_wgmma_fp8(gpu, op, (x, codes, scales), (plan, output), out)
            }
        },
        Skinny::Int4(gemm) => skinny_int4(gpu, op, x, packed(op, w)?, (gemm, output), out),
        Skinny::Groups(plan) => skinny_groups(gpu, op, x, packed(op, w)?, (plan, output), out),
    }
}

/// Checks the kernels' requirements on a GEMM's shape.
fn check(op: &'static str, x: &Tensor, w: MatrixRef<'_>) -> Result<(), OpError> {
    vectors(op, x.rows_cols().1)?;
    vectors(op, w.shape().0)
}

pub(crate) fn linear(
    exec: &mut Exec,
    op: &'static str,
    gemm: &Gemm,
    x: &Tensor,
    w: MatrixRef<'_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    check(op, x, w)?;
    columns(exec, op, gemm, x, w, &mut Columns { tensor: out, first: 0 })
}

/// The GEMM into some columns of a matrix.
fn columns(
    exec: &mut Exec,
    op: &'static str,
    gemm: &Gemm,
    x: &Tensor,
    w: MatrixRef<'_>,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let output = out.output();
    match gemm {
        Gemm::Skinny(kernel) => skinny(exec.gpu()?, op, (x, w), (kernel, output), out.target()),
        Gemm::CublasLt => {
            let ((m, k), w) = (x.rows_cols(), bf16(op, w)?);
            let (n, pitch, out_type) = (w.rows_cols().0, out.pitch(), out.tensor.dtype());
            let whole = blaslt::GemmSize::whole((m, n, k), out_type, blaslt::Multiplied::Bf16);
            let size = blaslt::GemmSize { pitch, ..whole };
            let at = blaslt::Operands { x: x.device(), w: w.device(), out: out.address(0), scales: (0, 0) };
            blaslt::launch(exec, op, size, at, false, out.tensor)
        }
        Gemm::Narrow => narrow_gemm(exec.gpu()?, op, x, bf16(op, w)?, out),
        Gemm::TiledMma(tile) => {
            let w = bf16(op, w)?;
            tiled(exec.gpu()?, op, x, (w.device(), w.rows_cols().0), *tile, out)
        }
        Gemm::Fp8CublasLt => fp8_by_fp8(exec, op, x, fp8(op, w)?, out),
        Gemm::WidenedToFp8 => widened_to_fp8(exec, op, x, packed(op, w)?, out),
        Gemm::Widened => widened(exec, op, x, narrow(op, w)?, out),
        Gemm::Parts => {
            let MatrixRef::Stacked(parts) = w else { return Err(mismatch(op)) };
            parts_of(exec, op, x, parts, out)
        }
    }
}

/// The GEMMs of a stack, side by side.
fn parts_of(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    parts: &[Matrix],
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let (m, first) = (x.rows_cols().0, out.first);
    for part in parts.iter().map(Matrix::as_ref) {
        check(op, x, part)?;
        let (n, k) = part.shape();
        let shape = GemmShape { m, n, k, output: out.output(), format: part.format() };
        let gemm = choice::gpu(exec)?.map(|gpu| Gemm::choose(&gpu, shape)).ok_or_else(|| mismatch(op))?;
        columns(exec, op, &gemm, x, part, out)?;
        out.first += n;
    }
    out.first = first;
    Ok(())
}

#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(crate) fn linear_add_norm(
    exec: &mut Exec,
    choice: &AddNorm,
    x: &Tensor,
    w: MatrixRef<'_>,
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
            // At most 8 splits of 16 rows, or 64 rows of w per multiprocessor: a few MB of the workspace.
            let partials = gpu.workspace();
            skinny(gpu, op, (x, w), (kernel, Output::SplitK), Target::Scratch(partials))?;
            add_partials_rms_norm(exec, (partials, kernel.splits()), residual, norm, eps, out)
        }
        AddNorm::Accumulated => {
            blaslt::matmul(exec, op, x, bf16(op, w)?, true, residual)?;
            rms_norm(exec, residual, norm, eps, out)
        }
        AddNorm::Separate(gemm) => {
            linear(exec, op, gemm, x, w, delta)?;
            add_rms_norm(exec, op, delta, residual, norm, eps, out)
        }
    }
}

pub(crate) fn linear_swiglu(
    exec: &mut Exec,
    choice: &Swiglu,
    x: &Tensor,
    w: MatrixRef<'_>,
    gate_up: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "linear_swiglu";
    check(op, x, w)?;
    match choice {
        Swiglu::Gated(kernel) => skinny(exec.gpu()?, op, (x, w), (kernel, Output::Gated), Target::Tensor(out)),
        Swiglu::Wgmma => linear_swiglu_wgmma(exec.gpu()?, op, x, bf16(op, w)?, out),
        Swiglu::Separate(gemm) => {
            linear(exec, op, gemm, x, w, gate_up)?;
            swiglu(exec, gate_up, out)
        }
    }
}
