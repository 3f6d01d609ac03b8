//! `ops::gated_qk_norm_rope_write_kv`, one block per token, and `ops::attention_gate`.

use super::abi::{AttentionGate, GatedQkv};
use crate::heads::BLOCK_SIZE;
use crate::limits::gated_qkv::{GATE_THREADS, MAX_THREADS, PASSES};
use crate::ops::{HeadShape, Heads, KvDType};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// The GPU's cache has rows of 64 dimensions.
fn check(op: &'static str, shape: HeadShape) -> Result<(), OpError> {
    if shape.head_dim.is_multiple_of(64) {
        return Ok(());
    }
    Err(OpError { op, message: format!("head_dim {}: the GPU kernels take multiples of 64", shape.head_dim) })
}

pub(crate) fn gated_qk_norm_rope_write_kv(
    exec: &mut Exec,
    projected: &Tensor,
    heads_of: &Heads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let op = "gated_qk_norm_rope_write_kv";
    let Heads { shape, norms, eps, rope, positions, slots } = *heads_of;
    check(op, shape)?;
    let (tokens, (max_position, rotary_dim)) = (projected.rows_cols().0, rope.rows_cols());
    let max_slot = k.rows_cols().0 * BLOCK_SIZE;
    // Lanes per head.
    let lanes = (shape.head_dim / 8).next_power_of_two();
    let all_heads = shape.heads + 2 * shape.kv_heads;
    let threads = (all_heads.div_ceil(PASSES) * lanes).next_multiple_of(32).min(MAX_THREADS);
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let kernel = match (KvDType::of(k), heads_of.axes()) {
        (KvDType::Bf16, 1) => GatedQkv::gated_qk_norm_rope_write_kv,
        (KvDType::Fp8, 1) => GatedQkv::gated_qk_norm_rope_write_kv_fp8,
        (KvDType::Bf16, _) => GatedQkv::gated_qk_norm_rope_write_kv_grid,
        (KvDType::Fp8, _) => GatedQkv::gated_qk_norm_rope_write_kv_grid_fp8,
    };
    let arguments = GatedQkv {
        projected,
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
        rotary: rotary_dim,
        max_position,
        max_slot,
        eps,
        lanes,
    };
    let launch = kernel.launch(exec.gpu()?, op, arguments)?.overlapped();
    // SAFETY: the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run([tokens, 1, 1], threads) }
}

pub(crate) fn attention_gate(
    exec: &mut Exec,
    projected: &Tensor,
    shape: HeadShape,
    attended: &mut Tensor,
) -> Result<(), OpError> {
    let op = "attention_gate";
    check(op, shape)?;
    let (tokens, width) = attended.rows_cols();
    let HeadShape { heads, kv_heads, head_dim } = shape;
    let arguments = AttentionGate { projected, attended, heads, kv_heads, head_dim };
    let launch = AttentionGate::attention_gate.launch(exec.gpu()?, op, arguments)?.overlapped();
    // SAFETY: the op checked the shapes.
    unsafe { launch.run([tokens, (width / 8).div_ceil(GATE_THREADS), 1], GATE_THREADS) }
}
