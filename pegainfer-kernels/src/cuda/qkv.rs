//! `ops::qk_norm_rope_write_kv` and `ops::rope_write_kv`: one block per token.

use super::abi::{Qkv, RopeKv};
use crate::heads::{BLOCK_SIZE, HeadShape, Heads, KvDType, MAX_HEAD_DIM, RopeHeads};
use crate::limits::qkv::MAX_THREADS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

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
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let kernel = match KvDType::of(k) {
        KvDType::Bf16 => Qkv::qk_norm_rope_write_kv,
        KvDType::Fp8 => Qkv::qk_norm_rope_write_kv_fp8,
    };
    let arguments = Qkv {
        qkv,
        q_norm: norms.0,
        k_norm: norms.1,
        rope,
        positions,
        slots,
        q,
        k,
        v,
        heads,
        kv_heads,
        head_dim,
        max_position,
        max_slot,
        eps,
        lanes,
    };
    let launch = kernel.launch(exec.gpu()?, op, arguments)?.overlapped();
    // SAFETY: the op checked the shapes, the kernel checks positions and slots.
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
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let kernel = match KvDType::of(k) {
        KvDType::Bf16 => RopeKv::rope_write_kv,
        KvDType::Fp8 => RopeKv::rope_write_kv_fp8,
    };
    let arguments =
        RopeKv { qkv, rope, positions, slots, q, k, v, heads, kv_heads, head_dim, max_position, max_slot, lanes };
    let launch = kernel.launch(exec.gpu()?, op, arguments)?.overlapped();
    // SAFETY: the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run([tokens, 1, 1], threads) }
}

/// Launch grid of both kernels: a block per token.
struct Grid {
    tokens: usize,
    threads: usize,
    /// Lanes per head.
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
