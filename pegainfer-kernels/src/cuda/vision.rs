//! `ops::vision`: csrc/vision/.

use super::abi::{
    AddPositions, AfterSums, AttendGrid, CopyRows, LayerNorm, PackGrid, RotateGrid, SegmentAttention, UnfoldPatches,
};
use super::vectors;
use crate::cpu::vision::bias::After;
use crate::heads::BLOCK_SIZE;
use crate::limits::prefill_wgmma::{CONSUMERS, SHARED_64, SHARED_128, WARPGROUP};
use crate::limits::vision::{NORM_THREADS, NORM_VECTORS, PATCH_VALUES, THREADS};
use crate::limits::vision_attention::{ROWS, TOKENS};
use crate::limits::vision_attention_wgmma;
use crate::patches::{Grid, wide_head};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// Blocks of [`THREADS`] threads for so many items.
fn blocks(items: usize) -> usize {
    items.div_ceil(THREADS)
}

pub(crate) fn unfold_patches(
    exec: &mut Exec,
    pixels: &Tensor,
    patches: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, bytes) = (patches.rows_cols().0, pixels.elements());
    let arguments = UnfoldPatches { pixels, patches, out, bytes };
    let launch = UnfoldPatches::unfold_patches.launch(exec.gpu()?, "unfold_patches", arguments)?;
    // SAFETY: the op checked the shapes, the kernel checks the patches.
    unsafe { launch.overlapped().run([rows, 1, 1], PATCH_VALUES / 8) }
}

pub(crate) fn add_positions(
    exec: &mut Exec,
    table: &Tensor,
    (rows, weights): (&Tensor, &Tensor),
    x: &mut Tensor,
) -> Result<(), OpError> {
    let ((n, hidden), positions) = (x.rows_cols(), table.rows_cols().0);
    vectors("add_positions", hidden)?;
    let arguments = AddPositions { table, rows, weights, x, positions, hidden };
    let launch = AddPositions::add_positions.launch(exec.gpu()?, "add_positions", arguments)?;
    // SAFETY: the op checked the shapes, the kernel checks the rows.
    unsafe { launch.overlapped().run([n, blocks(hidden / 8), 1], THREADS) }
}

pub(crate) fn layer_norm(
    exec: &mut Exec,
    x: &Tensor,
    (weight, bias): (&Tensor, &Tensor),
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (op, (rows, hidden)) = ("layer_norm", x.rows_cols());
    vectors(op, hidden)?;
    let most = NORM_THREADS * NORM_VECTORS * 8;
    if hidden > most {
        return Err(OpError { op, message: format!("rows of {hidden} elements: the GPU kernel takes {most}") });
    }
    let launch = LayerNorm::layer_norm.launch(exec.gpu()?, op, LayerNorm { x, weight, bias, out, hidden, eps })?;
    let threads = (hidden / 8).next_multiple_of(32).min(NORM_THREADS);
    // SAFETY: the op checked the shapes.
    unsafe { launch.overlapped().run([rows, 1, 1], threads) }
}

pub(crate) fn after_sums(
    exec: &mut Exec,
    op: &'static str,
    (x, bias): (&Tensor, &Tensor),
    after: After,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, width) = x.rows_cols();
    vectors(op, width)?;
    let kernel = match after {
        After::Store => AfterSums::add_bias,
        After::Add => AfterSums::add_bias_residual,
        After::GeluTanh => AfterSums::bias_gelu_tanh,
        After::GeluErf => AfterSums::bias_gelu_erf,
    };
    let launch = kernel.launch(exec.gpu()?, op, AfterSums { x, bias, out, width })?;
    // SAFETY: the op checked the shapes.
    unsafe { launch.overlapped().run([rows, blocks(width / 8), 1], THREADS) }
}

pub(crate) fn rotate_grid(
    exec: &mut Exec,
    table: &Tensor,
    positions: &Tensor,
    (heads, qkv): (usize, &mut Tensor),
) -> Result<(), OpError> {
    let (n, (sides, half)) = (qkv.shape()[0], table.rows_cols());
    let arguments = RotateGrid { table, positions, qkv, heads, half, sides };
    let launch = RotateGrid::rotate_grid.launch(exec.gpu()?, "rotate_grid", arguments)?;
    // SAFETY: the op checked the shapes, the kernel checks the positions.
    unsafe { launch.overlapped().run([n, blocks(heads * half), 1], THREADS) }
}

/// `to[first..] = from[rows]`.
pub(crate) fn copy_rows(
    exec: &mut Exec,
    (from, rows): (&Tensor, Range<usize>),
    (to, first): (&mut Tensor, usize),
) -> Result<(), OpError> {
    let (op, hidden, count) = ("copy_rows", from.rows_cols().1, rows.len());
    vectors(op, hidden)?;
    if rows.is_empty() {
        return Ok(());
    }
    let arguments = CopyRows { from, to, start: rows.start, first, hidden };
    let launch = CopyRows::copy_rows.launch(exec.gpu()?, op, arguments)?;
    // SAFETY: the op checked that the rows are inside.
    unsafe { launch.overlapped().run([count, blocks(hidden / 8), 1], THREADS) }
}

/// `out = attention(qkv)` inside each segment.
pub(crate) fn segment_attention(
    exec: &mut Exec,
    qkv: &Tensor,
    indptr: &Tensor,
    scale: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (shape, segments) = (qkv.shape(), indptr.elements() - 1);
    let (n, heads, head_dim) = (shape[0], shape[2], shape[3]);
    // A row in shared memory has an odd number of vectors.
    let (kernel, vectors) = match head_dim {
        0..=64 => (SegmentAttention::segment_attention_64, 9),
        65..=80 => (SegmentAttention::segment_attention_80, 11),
        _ => (SegmentAttention::segment_attention_128, 17),
    };
    let scale = scale * std::f32::consts::LOG2_E;
    let arguments = SegmentAttention { qkv, indptr, out, segments, heads, head_dim, scale };
    let launch = kernel.launch(exec.gpu()?, "segment_attention", arguments)?;
    let (tiles, shared) = (n / ROWS + segments, (ROWS + 2 * TOKENS) * vectors * 16);
    // SAFETY: the op checked the shapes; the segments are the rows in order.
    unsafe { launch.shared(shared).overlapped().run([tiles, heads, 1], ROWS) }
}

/// Packs queries, keys and values in `scratch`, and attends to them.
pub(crate) fn grid_attention(
    exec: &mut Exec,
    qkv: &Tensor,
    (grid, capacity): (&Grid<'_>, usize),
    scale: f32,
    scratch: u64,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (op, Grid { table, positions, slots, segments }) = ("grid_attention", *grid);
    let ([n, heads, head_dim], sides) = ([0, 2, 3].map(|i| qkv.shape()[i]), table.rows_cols().0);
    let wide = wide_head(head_dim).unwrap_or(head_dim);
    let (pack, attend, shared) = match wide {
        64 => (PackGrid::pack_grid_64, AttendGrid::attend_grid_64, SHARED_64),
        _ => (PackGrid::pack_grid_128, AttendGrid::attend_grid_128, SHARED_128),
    };
    let row_bytes = heads * wide * DType::Bf16.size();
    let k = scratch + (n * row_bytes) as u64;
    let (q, v) = (scratch, k + (capacity * BLOCK_SIZE * row_bytes) as u64);
    let gpu = exec.gpu()?;
    let arguments = PackGrid { table, positions, slots, qkv, q, k, v, heads, head_dim, sides, capacity };
    let launch = pack.launch(gpu, op, arguments)?.overlapped();
    let threads = vision_attention_wgmma::THREADS;
    // SAFETY: the op checked the shapes and the scratch, the kernel positions and slots.
    unsafe { launch.run([n, (heads * wide / 8).div_ceil(threads), 1], threads)? };
    let (indptr, count) = (segments.indptr, segments.indptr.elements() - 1);
    let scale = scale * std::f32::consts::LOG2_E;
    let arguments = AttendGrid { q, k, v, indptr, out, segments: count, heads, head_dim, capacity, scale };
    let grid = [gpu.multiprocessors(), 1, 1];
    let launch = attend.launch(gpu, op, arguments)?.shared(shared).overlapped_late_release();
    // SAFETY: as above; the kernel before has written what this one reads.
    unsafe { launch.run(grid, (1 + CONSUMERS) * WARPGROUP) }
}
