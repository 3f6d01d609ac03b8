//! Launch of csrc/linear_swiglu.cu: the gated product of many rows on Hopper's warpgroups.

use super::images;
use super::many::{BOX_ROWS, GROUP, ROWS, SHARED, STORE_ROWS, THREADS, takes};
use pegainfer_core::cuda::{Cuda, TensorMap};
use pegainfer_core::tensor::{OpError, Tensor};

/// Rows of x from which the kernel is faster than cuBLASLt and csrc/swiglu.cu; see docs/benchmarks/h200-kernels.md.
const MIN_ROWS: usize = 512;

/// As in csrc/linear_swiglu.cu.
const PARTS: usize = 8;

/// Whether `gpu` runs this kernel for `m` rows of `k` columns.
pub(super) fn is_fused(gpu: &Cuda, m: usize, k: usize) -> bool {
    m >= MIN_ROWS && takes(gpu, k, PARTS)
}

/// Launches `out = silu(gate) * up` with `[gate, up] = x · wᵀ`. The operands are those of
/// [`ops::linear_swiglu`](crate::ops::linear_swiglu), checked there, and [`is_fused`].
pub(super) fn fused(gpu: &mut Cuda, op: &'static str, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let ((m, k), width) = (x.rows_cols(), out.rows_cols().1);
    let grid = [gpu.multiprocessors(), 1, 1];
    let (x, w) = (TensorMap::new(op, x, ROWS)?, TensorMap::new(op, w, BOX_ROWS)?);
    let out = TensorMap::new(op, out, STORE_ROWS)?;
    let launch = gpu.launch(op, &images::LINEAR_SWIGLU, "linear_swiglu_many")?.map(x).map(w).map(out);
    let launch = launch.u32(m).u32(width).u32(k).u32(GROUP).shared(SHARED).overlapped();
    // SAFETY: matches csrc/linear_swiglu.cu; the op checked the shapes, and copies end where the matrices do.
    unsafe { launch.run(grid, THREADS) }
}
