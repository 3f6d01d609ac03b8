//! Ops of attention layers, with and without gates.

use super::batch::Rows;
use super::{Call, EPS, Output, allocate};
use crate::ops::{self, Heads};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError};

/// Calls the op, if it is one of these.
pub(super) fn run(exec: &mut Exec, call: &mut Call<'_>) -> Result<Option<Vec<Output>>, OpError> {
    let (shape, reads) = (call.case.shape, &call.record.reads);
    match (call.record.op, &call.read[..], &mut call.written[..]) {
        ("qk_norm_rope_write_kv", [qkv, q_norm, k_norm, rope, positions, slots], [q, k, v]) => {
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::qk_norm_rope_write_kv(exec, qkv, &heads, q, (k, v))?;
        }
        ("linear_qkv", [x, w, q_norm, k_norm, rope, positions, slots], [q, k, v]) => {
            let mut qkv = allocate(exec, "qkv", &[x.rows_cols().0, shape.qkv_width()], DType::Bf16)?;
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::linear_qkv(exec, (x, w), &heads, &mut qkv, q, (k, v))?;
        }
        ("gated_qk_norm_rope_write_kv", [projected, q_norm, k_norm, rope, positions, slots], [q, k, v]) => {
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::gated_qk_norm_rope_write_kv(exec, projected, &heads, q, (k, v))?;
        }
        ("attention", [q, k, v, ..], [out]) => {
            let tables = Rows::new(q.rows_cols().0, &reads[5], k.rows_cols().0, call.case).upload(exec)?;
            let scale = (shape.head_dim as f32).sqrt().recip();
            ops::attention(exec, q, (k, v), &tables.batch(), shape, scale, out)?;
        }
        ("attention_gate", [projected, _], [attended]) => ops::attention_gate(exec, projected, shape, attended)?,
        (op @ ("decode_attention" | "gated_decode_attention"), [x, q_norm, k_norm, rope, ..], [out, k, v]) => {
            let rows = Rows::new(x.rows_cols().0, &reads[10], k.rows_cols().0, call.case);
            let ((positions, slots), tables) = (rows.newest(exec)?, rows.upload(exec)?);
            let mut q = allocate(exec, "q", out.shape(), DType::Bf16)?;
            let norms = (q_norm, k_norm);
            let heads = Heads { shape, norms, eps: EPS, rope, positions: &positions, slots: &slots };
            let decode = if op == "decode_attention" { ops::decode_attention } else { ops::gated_decode_attention };
            decode(exec, x, &heads, &tables.batch(), (k, v), &mut q, out)?;
        }
        _ => return Ok(None),
    }
    call.outputs(exec).map(Some)
}
