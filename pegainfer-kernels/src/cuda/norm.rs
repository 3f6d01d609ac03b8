//! `ops::rms_norm`, and the norm of `ops::linear_add_norm`: one block a row.

use super::{images, vectors};
use pegainfer_core::cuda::Launch;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// As in csrc/norm.cu: vectors of 8 elements that a thread takes.
const VECTORS: usize = 2;
const MAX_THREADS: usize = 1024;

/// `kernels`: for a weight in bf16, and in f32.
fn launch(
    exec: &mut Exec,
    op: &'static str,
    kernels: [&'static str; 2],
    weight: &Tensor,
    hidden: usize,
) -> Result<Launch, OpError> {
    vectors(op, hidden)?;
    let most = MAX_THREADS * VECTORS * 8;
    if hidden > most {
        return Err(OpError { op, message: format!("rows of {hidden} elements: the GPU kernel takes {most}") });
    }
    let kernel = kernels[usize::from(weight.dtype() == DType::F32)];
    Ok(exec.gpu()?.launch(op, &images::NORM, kernel)?.early(weight).overlapped())
}

/// One block a row, as many threads as the row has vectors.
fn run(launch: Launch, (rows, hidden): (usize, usize)) -> Result<(), OpError> {
    let threads = (hidden / 8).next_multiple_of(32).min(MAX_THREADS);
    // SAFETY: the callers' arguments match csrc/norm.cu; the ops checked the shapes.
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
    let launch = launch(exec, "rms_norm", ["rms_norm", "rms_norm_f32"], weight, shape.1)?;
    run(launch.input(x).input(weight).output(out).u32(shape.1).f32(eps), shape)
}

pub(super) fn add_rms_norm(
    exec: &mut Exec,
    x: &Tensor,
    residual: &mut Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let shape = x.rows_cols();
    let launch = launch(exec, "linear_add_norm", ["add_rms_norm", "add_rms_norm_f32"], weight, shape.1)?;
    run(launch.input(x).output(residual).input(weight).output(out).u32(shape.1).f32(eps), shape)
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
    let kernels = ["add_slices_rms_norm", "add_slices_rms_norm_f32"];
    let launch = launch(exec, "linear_add_norm", kernels, weight, shape.1)?;
    let launch = launch.pointer(partials).output(residual).input(weight).output(out);
    run(launch.u32(shape.1).f32(eps).u32(count), shape)
}
