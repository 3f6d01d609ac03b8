//! Causal attention over the paged KV cache.

use super::activation::{ActivationMut, write_host};
use super::check::Check;
use crate::batch::AttentionBatch;
use crate::choice::{self, Attention};
use crate::cpu::attention::{self as cpu, PagedBatch};
use crate::cpu::kv_cache::KvCache;
use crate::cuda;
use crate::heads::{BLOCK_SIZE, HeadShape, KvDType};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = softmax(q kᵀ * scale) v`, causal.
///
/// `q`, `out`: `[tokens, heads * head_dim]` bf16, `out` also [in FP8](super::Activation); `k`, `v`: one layer's cache,
/// see [`qk_norm_rope_write_kv`](super::qk_norm_rope_write_kv). The f32 scales of an FP8 cache multiply scores and
/// weights. The last query of a row is at position `kv_lens - 1`. Scores, softmax and sums are f32, with one final
/// rounding to bf16. Online softmax over fixed tiles of positions makes a row's result independent of prompt chunks and
/// of other rows. On a GPU weights are rounded to bf16 before they are multiplied by `v`, the tiles depend on the
/// batch, and `head_dim` is 64, 128 or 256.
pub fn attention<'o>(
    exec: &mut Exec,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (c, out) = (Check("attention"), out.into());
    check(c, exec.device(), q, (k, v), batch, shape, out.tensor)?;
    let size = (batch.block_tables.rows_cols().0, q.rows_cols().0);
    let choice = choice::gpu(exec)?.map(|gpu| Attention::choose(&gpu, shape, KvDType::of(k), &batch.load, size));
    let out = out.in_format(exec, choice.as_ref().is_some_and(|choice| choice.rounds(shape)))?;
    exec.record(|device| {
        let kernel = choice::name(device, &choice, Attention::name);
        let reads = [q, k, v, batch.qo_indptr, batch.kv_lens, batch.block_tables];
        OpRecord::new(c.0, kernel, &reads, &[out], flops(batch, shape)).with_bytes(bytes((q, out), batch, shape, k))
    });
    match (exec.device(), &choice) {
        (Device::Cpu(_), _) => on_cpu(c, exec, q, (k, v), batch, shape, scale, out),
        (Device::Cuda, Some(choice)) => cuda::attention(exec, choice, q, (k, v), batch, shape, scale, out),
        _ => Ok(()),
    }
}

/// Checks shapes and dtypes of the operands.
pub(super) fn check(
    check: Check,
    device: Device,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    out: &Tensor,
) -> Result<(), OpError> {
    let tokens = q.rows_cols().0;
    let (rows, max_blocks) = batch.block_tables.rows_cols();
    check.that(shape.is_supported(), "heads do not group, or head_dim is not a multiple of 16 from 32 to 256")?;
    check.is(q, DType::Bf16, &[tokens, shape.q_width()])?;
    check.is_activation(out, &[tokens, shape.q_width()])?;
    check.is_cache(device, shape, (k, v))?;
    check.is(batch.qo_indptr, DType::U32, &[rows + 1])?;
    check.is(batch.kv_lens, DType::U32, &[rows])?;
    check.is(batch.block_tables, DType::U32, &[rows, max_blocks])
}

/// Floating-point operations of the call.
pub(super) fn flops(batch: &AttentionBatch<'_>, shape: HeadShape) -> u64 {
    4 * batch.load.attended * shape.q_width() as u64
}

/// Bytes of the call: queries, output, and the part of the cache that is attended to.
pub(super) fn bytes((q, out): (&Tensor, &Tensor), batch: &AttentionBatch<'_>, shape: HeadShape, k: &Tensor) -> u64 {
    q.bytes() + out.bytes() + batch.load.cached * shape.kv_bytes_per_token(KvDType::of(k)) as u64
}

/// The reference kernel, on operands with checked shapes.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(super) fn on_cpu(
    check: Check,
    exec: &mut Exec,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Device::Cpu(isa) = exec.device() else { return Ok(()) };
    let (blocks, max_blocks) = (k.rows_cols().0, batch.block_tables.rows_cols().1);
    let (block_tables, kv_lens) = (batch.block_tables.host::<u32>(), batch.kv_lens.host::<u32>());
    let mut read = block_tables.chunks(max_blocks.max(1)).zip(kv_lens).flat_map(|(table, tokens)| {
        // The rest of a row is unused.
        table.iter().take((*tokens as usize).div_ceil(BLOCK_SIZE))
    });
    check.that(read.all(|&id| (id as usize) < blocks), "a block is outside the KV cache")?;
    let batch = PagedBatch { qo_indptr: batch.qo_indptr.host(), kv_lens, block_tables, max_blocks };
    let (cache, scratch) = (KvCache::of((k, v)), &mut exec.scratch);
    write_host(out, |out| cpu::paged_attention(isa, shape, q.host(), cache, &batch, scale, scratch, out));
    Ok(())
}
