//! Launches of what includes csrc/gemm_wgmma.cuh: large-M GEMMs on Hopper's warpgroups with an epilogue, csrc/gemm_wgmma_swiglu.cu and
//! csrc/gemm_wgmma_qkv.cu.

use super::images;
use crate::heads::BLOCK_SIZE;
use crate::ops::Heads;
use pegainfer_core::cuda::{BOX_COLUMNS, Cuda, TensorMap};
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/gemm_wgmma.cuh: rows of x, and of the weights, of a tile.
const ROWS: usize = 128;
const WEIGHTS: usize = 256;
/// Rows of a box of the weights.
const BOX_ROWS: usize = 64;
/// Rows that a warp stores at once.
const STORE_ROWS: usize = 16;
const THREADS: usize = 3 * 128;
const STAGES: usize = 4;
const WARPS: usize = 8;
/// Bytes of a bf16.
const ELEMENT: usize = 2;
/// Bytes of `GemmShared`: steps of x and w, results of each warp, and two barriers a step.
const SHARED: usize = STAGES * (ROWS + WEIGHTS) * BOX_COLUMNS * ELEMENT
    + WARPS * 2 * STORE_ROWS * BOX_COLUMNS * ELEMENT
    + STAGES * 2 * size_of::<u64>();
/// The head size that csrc/gemm_wgmma_qkv.cu is built for.
const HEAD_DIM: usize = 128;
/// Bytes of `SharedHeads` in csrc/gemm_wgmma_qkv.cu: the two norms, too.
const HEADS_SHARED: usize = SHARED + 2 * HEAD_DIM * ELEMENT;
/// What a block has on Hopper.
const MAX_SHARED: usize = 227 << 10;
const _: () = assert!(HEADS_SHARED <= MAX_SHARED);
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
    let maps = [TensorMap::new(op, x, ROWS)?, TensorMap::new(op, w, BOX_ROWS)?, TensorMap::new(op, out, STORE_ROWS)?];
    let launch = gpu.launch(op, &images::GEMM_WGMMA_SWIGLU, "gemm_wgmma_swiglu")?.early(w).writes(out);
    let launch = maps.into_iter().fold(launch, |launch, map| launch.map(map));
    let launch = launch.u32(m).u32(width).u32(k).u32(GROUP).shared(SHARED).overlapped();
    // SAFETY: matches csrc/gemm_wgmma_swiglu.cu; the op checked the shapes, and copies end where the matrices do.
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
    let maps = (TensorMap::new(op, x, ROWS)?, TensorMap::new(op, w, BOX_ROWS)?);
    let launch = gpu.launch(op, &images::GEMM_WGMMA_QKV, "gemm_wgmma_qkv")?.map(maps.0).map(maps.1);
    let launch = launch.early(w).early(norms.0).early(norms.1);
    let launch = launch.input(norms.0).input(norms.1).input(rope).input(positions).input(slots);
    let launch = launch.output(q).output(k).output(v);
    let launch = launch.u32(m).u32(columns).u32(shape.heads).u32(shape.kv_heads).u32(max_position).u32(max_slot);
    let launch = launch.f32(eps).u32(GROUP).shared(HEADS_SHARED).overlapped();
    // SAFETY: matches csrc/gemm_wgmma_qkv.cu; the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run(grid, THREADS) }
}
