//! Launches csrc/gemm/wgmma_swiglu.cu and wgmma_bias.cu: large-M GEMMs on Hopper's warpgroups with SwiGLU, or a bias and
//! what follows it, in their epilogue.

use super::abi::{GemmWgmmaBias, GemmWgmmaSwiglu, Map};
use crate::cpu::vision::bias::After;
use crate::limits::gemm_wgmma::{BOX, ROWS, SHARED_BYTES, STORE_ROWS, THREADS};
use pegainfer_core::cuda::{BOX_COLUMNS, Cuda};
use pegainfer_core::tensor::{OpError, Tensor};

/// Rows of a box of the weights.
const BOX_ROWS: usize = 64;
/// Maximum shared memory of a block on Hopper.
const MAX_SHARED: usize = 227 << 10;
const _: () = assert!(SHARED_BYTES <= MAX_SHARED && BOX == BOX_COLUMNS);
/// Tiles along the rows that are done before the next columns: 4,096 rows of x stay in an H200's L2.
const GROUP: usize = 32;

/// Launches `out = silu(gate) * up` with `[gate, up] = x · wᵀ`. Operands were checked by
/// [`ops::linear_swiglu`](crate::ops::linear_swiglu).
pub(super) fn linear_swiglu_wgmma(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((m, k), width) = (x.rows_cols(), out.rows_cols().1);
    let grid = [gpu.multiprocessors(), 1, 1];
    let arguments = GemmWgmmaSwiglu {
        x: Map::input(op, x, ROWS)?,
        w: Map::input(op, w, BOX_ROWS)?,
        out: Map::output(op, out, STORE_ROWS)?,
        m,
        width,
        k,
        group: GROUP,
    };
    let launch = GemmWgmmaSwiglu::gemm_wgmma_swiglu.launch(gpu, op, arguments)?;
    let launch = launch.early(w).shared(SHARED_BYTES).overlapped();
    // SAFETY: the op checked the shapes, and copies end with the matrices.
    unsafe { launch.run(grid, THREADS) }
}

/// Launches `out = after(x · wᵀ + bias)`. Operands were checked by
/// [`ops::vision::linear_bias`](crate::ops::vision::linear_bias()).
pub(crate) fn linear_bias_wgmma(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w, bias): (&Tensor, &Tensor, &Tensor),
    after: After,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((m, k), width) = (x.rows_cols(), out.rows_cols().1);
    let kernel = match after {
        After::Store => GemmWgmmaBias::linear_bias,
        After::Add => GemmWgmmaBias::linear_bias_residual,
        After::GeluTanh => GemmWgmmaBias::linear_bias_gelu_tanh,
        After::GeluErf => GemmWgmmaBias::linear_bias_gelu_erf,
    };
    let (grid, values) = ([gpu.multiprocessors(), 1, 1], out.device());
    let arguments = GemmWgmmaBias {
        x: Map::input(op, x, ROWS)?,
        w: Map::input(op, w, BOX_ROWS)?,
        out: Map::output(op, out, STORE_ROWS)?,
        values,
        bias,
        m,
        width,
        k,
        group: GROUP,
    };
    let launch = kernel.launch(gpu, op, arguments)?.early(w).shared(SHARED_BYTES).overlapped();
    // SAFETY: the op checked the shapes, and copies end with the matrices.
    unsafe { launch.run(grid, THREADS) }
}
