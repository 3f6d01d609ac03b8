//! `ops::rms_norm` and `ops::add_rms_norm`: one block a row.

use super::{images, pieces};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/norm.cu.
const THREADS: usize = 256;
const MAX_HIDDEN: usize = THREADS * 8 * 8;

fn check(op: &'static str, hidden: usize) -> Result<(), OpError> {
    pieces(op, hidden)?;
    if hidden > MAX_HIDDEN {
        return Err(OpError { op, message: format!("rows of {hidden} elements: the GPU kernel takes {MAX_HIDDEN}") });
    }
    Ok(())
}

pub(crate) fn rms_norm(
    exec: &mut Exec,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, hidden) = x.rows_cols();
    check("rms_norm", hidden)?;
    let launch = exec.gpu()?.launch("rms_norm", &images::NORM, "rms_norm")?;
    let launch = launch.input(x).input(weight).output(out).u32(hidden).f32(eps);
    // SAFETY: matches csrc/norm.cu; the op checked the shapes.
    unsafe { launch.run([rows, 1, 1], THREADS) }
}

pub(crate) fn add_rms_norm(
    exec: &mut Exec,
    x: &Tensor,
    residual: &mut Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, hidden) = x.rows_cols();
    check("add_rms_norm", hidden)?;
    let launch = exec.gpu()?.launch("add_rms_norm", &images::NORM, "add_rms_norm")?;
    let launch = launch.input(x).output(residual).input(weight).output(out).u32(hidden).f32(eps);
    // SAFETY: matches csrc/norm.cu; the op checked the shapes.
    unsafe { launch.run([rows, 1, 1], THREADS) }
}
