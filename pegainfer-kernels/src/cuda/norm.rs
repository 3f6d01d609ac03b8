//! `ops::rms_norm`, `ops::add_rms_norm` and the norm of `ops::linear_add_norm`: one block per row.

use super::abi::{AddPartialsRmsNorm, AddRmsNorm, Arguments, Entry, RmsNorm};
use super::fp8::padded_rows;
use super::vectors;
use crate::limits::norm::{MAX_THREADS, VECTORS};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// One block per row, with one thread per vector of the row. `kernels`: for a weight in bf16, and in f32.
fn run<A: Arguments>(
    exec: &mut Exec,
    op: &'static str,
    kernels: [Entry<A>; 2],
    (rows, hidden): (usize, usize),
    weight: &Tensor,
    arguments: A,
) -> Result<(), OpError> {
    vectors(op, hidden)?;
    let most = MAX_THREADS * VECTORS * 8;
    if hidden > most {
        return Err(OpError { op, message: format!("rows of {hidden} elements: the GPU kernel takes {most}") });
    }
    let kernel = kernels[usize::from(weight.dtype() == DType::F32)];
    let launch = kernel.launch(exec.gpu()?, op, arguments)?.early(weight).overlapped();
    let threads = (hidden / 8).next_multiple_of(32).min(MAX_THREADS);
    // SAFETY: the ops checked the shapes.
    unsafe { launch.run([rows, 1, 1], threads) }
}

pub(crate) fn rms_norm(
    exec: &mut Exec,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let shape = x.rows_cols();
    let arguments = RmsNorm { x, weight, padded: padded_rows(out), out, hidden: shape.1, eps };
    run(exec, "rms_norm", [RmsNorm::rms_norm, RmsNorm::rms_norm_f32], shape, weight, arguments)
}

pub(crate) fn add_rms_norm(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    residual: &mut Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let shape = x.rows_cols();
    let arguments = AddRmsNorm { x, residual, weight, padded: padded_rows(out), out, hidden: shape.1, eps };
    let kernels = [AddRmsNorm::add_rms_norm, AddRmsNorm::add_rms_norm_f32];
    run(exec, op, kernels, shape, weight, arguments)
}

/// Adds `count` partial sums of f32 at `partials`, each of the residual's shape.
pub(super) fn add_partials_rms_norm(
    exec: &mut Exec,
    (partials, count): (u64, usize),
    residual: &mut Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let shape = residual.rows_cols();
    let arguments =
        AddPartialsRmsNorm { partials, residual, weight, padded: padded_rows(out), out, hidden: shape.1, eps, count };
    let kernels = [AddPartialsRmsNorm::add_slices_rms_norm, AddPartialsRmsNorm::add_slices_rms_norm_f32];
    run(exec, "linear_add_norm", kernels, shape, weight, arguments)
}
