//! `ops::qk_norm_rope_write_kv` and `ops::rope_write_kv`: one block a token.

use super::images;
use crate::heads::{BLOCK_SIZE, HeadShape, Heads, RopeHeads};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Most threads of a block, as in csrc/qkv.cu.
const MAX_THREADS: usize = 256;
/// As in csrc/qkv.cu.
const MAX_HEAD_DIM: usize = 256;

pub(crate) fn qk_norm_rope_write_kv(
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &Heads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let op = "qk_norm_rope_write_kv";
    let Heads { shape, norms, eps, rope, positions, slots } = *heads;
    let Grid { tokens, threads, lanes } = Grid::new(op, qkv, shape)?;
    let (max_position, max_slot) = (rope.rows_cols().0, k.rows_cols().0 * BLOCK_SIZE);
    let launch = exec.gpu()?.launch(op, &images::QKV, op)?;
    let launch = launch.input(qkv).input(norms.0).input(norms.1).input(rope).input(positions).input(slots);
    let launch = launch.output(q).output(k).output(v);
    let launch = launch.u32(shape.heads).u32(shape.kv_heads).u32(shape.head_dim).u32(max_position).u32(max_slot);
    let launch = launch.f32(eps).u32(lanes).overlapped();
    // SAFETY: matches csrc/qkv.cu; the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run([tokens, 1, 1], threads) }
}

pub(crate) fn rope_write_kv(
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &RopeHeads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let op = "rope_write_kv";
    let RopeHeads { shape, rope, positions, slots } = *heads;
    let Grid { tokens, threads, lanes } = Grid::new(op, qkv, shape)?;
    let (max_position, max_slot) = (rope.rows_cols().0, k.rows_cols().0 * BLOCK_SIZE);
    let launch = exec.gpu()?.launch(op, &images::QKV, op)?;
    let launch = launch.input(qkv).input(rope).input(positions).input(slots).output(q).output(k).output(v);
    let launch = launch.u32(shape.heads).u32(shape.kv_heads).u32(shape.head_dim).u32(max_position).u32(max_slot);
    let launch = launch.u32(lanes).overlapped();
    // SAFETY: matches csrc/qkv.cu; the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run([tokens, 1, 1], threads) }
}

/// How both kernels are launched: a block for each token.
struct Grid {
    tokens: usize,
    threads: usize,
    /// Of a head.
    lanes: usize,
}

impl Grid {
    fn new(op: &'static str, qkv: &Tensor, shape: HeadShape) -> Result<Self, OpError> {
        let head_dim = shape.head_dim;
        if head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(64) {
            let message = format!("head_dim {head_dim}: the GPU's cache takes multiples of 64 up to {MAX_HEAD_DIM}");
            return Err(OpError { op, message });
        }
        let lanes = (head_dim / 16).next_power_of_two();
        let heads = shape.heads + 2 * shape.kv_heads;
        // In two passes over the heads, if half of them fit the block.
        let threads = (heads.div_ceil(2) * lanes).next_multiple_of(32).min(MAX_THREADS);
        Ok(Self { tokens: qkv.rows_cols().0, threads, lanes })
    }
}
