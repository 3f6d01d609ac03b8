//! `ops::gated_decode_attention` in one kernel: csrc/attention/decode_gated.cu.

use super::abi::GatedDecode;
use super::attention_decode::{Call, Scratch};
use super::fp8::padded_rows;
use crate::choice::DecodeGrid;
use crate::ops::{AttentionBatch, Heads, KvDType};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// `ops::gated_decode_attention` in one kernel, for heads of 256.
pub(crate) fn gated_decode_fused(
    exec: &mut Exec,
    grid: &DecodeGrid,
    projected: &Tensor,
    heads: &Heads<'_>,
    batch: &AttentionBatch<'_>,
    (k, v): (&mut Tensor, &mut Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Heads { shape, norms, eps, rope, positions: rope_positions, slots } = *heads;
    let scale = (shape.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
    let gpu = exec.gpu()?;
    let format = KvDType::of(k);
    let kernel = match (format, grid.stages) {
        (KvDType::Bf16, 4) => GatedDecode::gated_decode_256_4,
        (KvDType::Bf16, _) => GatedDecode::gated_decode_256_3,
        (KvDType::Fp8, 4) => GatedDecode::gated_decode_fp8_256_4,
        (KvDType::Fp8, _) => GatedDecode::gated_decode_fp8_256_3,
    };
    let Scratch { partials, arrived } = Scratch::of(gpu);
    let AttentionBatch { qo_indptr, kv_lens, block_tables, .. } = *batch;
    let ((rows, max_blocks), blocks) = (block_tables.rows_cols(), k.rows_cols().0);
    let (positions, rotary) = rope.rows_cols();
    let arguments = GatedDecode {
        projected,
        q_norm: norms.0,
        k_norm: norms.1,
        rope,
        rope_positions,
        slots,
        k: &mut *k,
        v: &mut *v,
        qo_indptr,
        kv_lens,
        block_tables,
        padded: padded_rows(out),
        out,
        heads: shape.heads,
        rows,
        max_blocks,
        blocks,
        positions,
        rotary,
        eps,
        scale,
        partials,
        arrived,
    };
    let launch = kernel.launch(gpu, "gated_decode_attention", arguments)?;
    let launch = launch.early(norms.0).early(norms.1).early(rope).early(rope_positions).early(slots).early(k).early(v);
    // SAFETY: the op checked the shapes, the kernel checks block ids and positions.
    unsafe { Call { batch, shape, format, grid }.run(launch) }
}
