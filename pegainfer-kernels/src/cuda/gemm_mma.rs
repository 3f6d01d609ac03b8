//! Launch of csrc/gemm/mma.cu: tiled GEMMs, used if cuBLASLt is missing.

use super::abi::GemmMma;
use super::columns::Columns;
use crate::limits::gemm_mma::{DEPTH, STAGES, THREADS};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Launches csrc/gemm/mma.cu with tiles of `tile` rows and columns; `w`: address and rows.
pub(super) fn tiled(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    (w, n): (u64, usize),
    tile: usize,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let (m, k) = x.rows_cols();
    let kernel = match (out.tensor.dtype(), tile) {
        (DType::F32, 64) => GemmMma::gemm_mma_f32_64,
        (DType::F32, _) => GemmMma::gemm_mma_f32_128,
        (_, 64) => GemmMma::gemm_mma_bf16_64,
        (_, _) => GemmMma::gemm_mma_bf16_128,
    };
    let pitch = out.pitch();
    let launch = kernel.launch(gpu, op, GemmMma { x, w, out: out.target(), m, n, k, pitch })?;
    // SAFETY: the op checked the shapes.
    unsafe {
        launch
            .shared(STAGES * 2 * tile * DEPTH * DType::Bf16.size())
            .run([m.div_ceil(tile), n.div_ceil(tile), 1], THREADS)
    }
}
