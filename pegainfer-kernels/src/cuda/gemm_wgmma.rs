//! Launches of what includes csrc/gemm_wgmma.cuh: large-M GEMMs on Hopper's warpgroups with an epilogue, csrc/gemm_wgmma_swiglu.cu and
//! csrc/gemm_wgmma_qkv.cu.

use super::abi::{GemmWgmmaQkv, GemmWgmmaSwiglu, Map};
use crate::heads::BLOCK_SIZE;
use crate::limits::gemm_wgmma::{BOX, QKV_SHARED_BYTES, ROWS, SHARED_BYTES, STORE_ROWS, THREADS};
use crate::ops::Heads;
use pegainfer_core::cuda::{BOX_COLUMNS, Cuda};
use pegainfer_core::tensor::{OpError, Tensor};

/// Rows of a box of the weights.
const BOX_ROWS: usize = 64;
/// What a block has on Hopper.
const MAX_SHARED: usize = 227 << 10;
const _: () = assert!(QKV_SHARED_BYTES <= MAX_SHARED && BOX == BOX_COLUMNS);
/// Tiles along the rows that are done before the next columns: 4,096 rows of x stay in an H200's L2.
const GROUP: usize = 32;

/// Launches `out = silu(gate) * up` with `[gate, up] = x · wᵀ`. The operands are those of
/// [`ops::linear_swiglu`](crate::ops::linear_swiglu), checked there.
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
    // SAFETY: the op checked the shapes, and copies end where the matrices do.
    unsafe { launch.run(grid, THREADS) }
}

/// Launches the QKV projection with norms, rotation and cache. The operands are those of
/// [`ops::linear_qkv`](crate::ops::linear_qkv), checked there.
pub(super) fn linear_qkv_wgmma(
    gpu: &mut Cuda,
    op: &'static str,
    (x, w): (&Tensor, &Tensor),
    heads: &Heads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let (m, columns) = x.rows_cols();
    let Heads { shape, norms, eps, rope, positions, slots } = *heads;
    let grid = [gpu.multiprocessors(), 1, 1];
    let (max_position, max_slot) = (rope.rows_cols().0, k.rows_cols().0 * BLOCK_SIZE);
    let arguments = GemmWgmmaQkv {
        x: Map::input(op, x, ROWS)?,
        w: Map::input(op, w, BOX_ROWS)?,
        q_norm: norms.0,
        k_norm: norms.1,
        rope,
        positions,
        slots,
        q,
        k,
        v,
        m,
        columns,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        max_position,
        max_slot,
        eps,
        group: GROUP,
    };
    let launch = GemmWgmmaQkv::gemm_wgmma_qkv.launch(gpu, op, arguments)?;
    let launch = launch.early(w).early(norms.0).early(norms.1).shared(QKV_SHARED_BYTES).overlapped();
    // SAFETY: the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run(grid, THREADS) }
}
