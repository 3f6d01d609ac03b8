//! Launch of csrc/gemm/narrow.cu: GEMMs with a weight of few rows.

use super::abi::NarrowGemm;
use super::columns::Columns;
use crate::limits::narrow_gemm::{COLUMNS, ROWS, THREADS};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::{OpError, Tensor};

/// Launches the GEMM of `x` and `w` into columns of a matrix in bf16.
pub(super) fn narrow_gemm(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let pitch = out.pitch();
    let launch = NarrowGemm::narrow_gemm.launch(gpu, op, NarrowGemm { x, w, out: out.target(), m, k, pitch })?;
    // SAFETY: the op checked the shapes, the choice that n and k are whole tiles.
    unsafe { launch.early(w).overlapped().run([n / COLUMNS, m.div_ceil(ROWS), 1], THREADS) }
}
