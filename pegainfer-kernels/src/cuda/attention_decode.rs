//! Rows of few queries on Hopper and later: csrc/attention/decode_bulk.cu, and the code shared with
//! csrc/attention/decode_gated.cu.

use super::abi::{DecodeBulk, DecodeFused};
use super::attention_operands::Operands;
use super::fp8::padded_rows;
use crate::choice::DecodeGrid;
use crate::limits::attention::{DECODE_WARPS, LARGE_HEAD};
use crate::ops::{AttentionBatch, HeadShape, Heads, KvDType};
use pegainfer_core::cuda::{Cuda, Launch};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Ordering of decode attention after the prefill launched before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefilled {
    /// Prefill is complete before decode starts, or there is none.
    Serialised,
    /// Both run concurrently: prefill released its successor only after all kernels before it were complete; see
    /// csrc/attention/decode.cuh.
    Overlapped,
}

/// Stages of each warp's ring in the kernels for this format, for a grid of `stages` stages in bf16, in the same number
/// of bytes. In FP8, a stage of small heads takes half as many bytes, and a stage of large heads has both keys and
/// values. With one stage, for which four blocks share a multiprocessor, there is memory for three FP8 stages.
pub(super) fn kernel_stages(format: KvDType, head_dim: usize, stages: usize) -> usize {
    match (format, stages) {
        (KvDType::Fp8, 1) if head_dim <= LARGE_HEAD => 3,
        (KvDType::Fp8, _) if head_dim <= LARGE_HEAD => 2 * stages,
        _ => stages,
    }
}

/// Size of `DecodeShared<D, N, S, T>` in csrc/attention/decode_partials.cuh for a grid of `stages` stages.
fn shared_bytes(format: KvDType, head_dim: usize, column_tiles: usize, stages: usize) -> usize {
    let stage = match format {
        KvDType::Bf16 if head_dim > LARGE_HEAD => 32 * head_dim,
        KvDType::Bf16 => 2 * 32 * head_dim,
        KvDType::Fp8 => 2 * 16 * (head_dim + size_of::<f32>()),
    };
    let ring = kernel_stages(format, head_dim, stages) * (stage + 8);
    let bytes = DECODE_WARPS * ring + 16 * column_tiles * head_dim + 4 * head_dim + 8;
    bytes.next_multiple_of(128)
}

/// The launch that all kernels share.
pub(super) struct Call<'a, 'b> {
    pub batch: &'a AttentionBatch<'b>,
    pub shape: HeadShape,
    pub format: KvDType,
    pub grid: &'a DecodeGrid,
}

impl Call<'_, '_> {
    /// # Safety
    /// See [`Launch::run`].
    pub unsafe fn run(&self, launch: Launch) -> Result<(), OpError> {
        let HeadShape { kv_heads, head_dim, .. } = self.shape;
        let DecodeGrid { column_tiles, stages, blocks } = *self.grid;
        let launch = launch.early(self.batch.qo_indptr).early(self.batch.kv_lens).early(self.batch.block_tables);
        let launch = launch.shared(shared_bytes(self.format, head_dim, column_tiles, stages));
        // Overlapped, the kernel fetches the keys and values before a row's queries early. They belong to earlier steps
        // if the step adds only the queries to the row.
        let launch = if self.batch.load.sampled_only { launch } else { launch.overlapped() };
        // SAFETY: the caller's promise; the blocks were chosen so that the partial results fit the workspace.
        unsafe { launch.run([blocks, kv_heads, 1], 32 * DECODE_WARPS) }
    }
}

/// Addresses for partial results.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    /// Partial results.
    pub partials: u64,
    /// Counter of arrivals at each of them.
    pub arrived: u64,
}

impl Scratch {
    pub fn of(gpu: &Cuda) -> Self {
        Self { partials: gpu.workspace(), arrived: gpu.counters() }
    }
}

/// Attention of the rows with at most 16 queries times heads of a group.
pub(super) fn decode_bulk(
    exec: &mut Exec,
    grid: &DecodeGrid,
    operands: Operands<'_, '_>,
    prefilled: Prefilled,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Operands { q, k, v, batch, shape, scale } = operands;
    let format = KvDType::of(k);
    let kernel = match (format, shape.head_dim, grid.column_tiles) {
        (KvDType::Bf16, 64, 1) => DecodeBulk::decode_64_1,
        (KvDType::Bf16, 64, _) => DecodeBulk::decode_64_2,
        (KvDType::Bf16, 128, 1) => DecodeBulk::decode_128_1,
        (KvDType::Bf16, 128, _) => DecodeBulk::decode_128_2,
        (KvDType::Bf16, _, 1) => DecodeBulk::decode_256_1,
        (KvDType::Bf16, ..) => DecodeBulk::decode_256_2,
        (KvDType::Fp8, 64, 1) => DecodeBulk::decode_fp8_64_1,
        (KvDType::Fp8, 64, _) => DecodeBulk::decode_fp8_64_2,
        (KvDType::Fp8, 128, 1) => DecodeBulk::decode_fp8_128_1,
        (KvDType::Fp8, 128, _) => DecodeBulk::decode_fp8_128_2,
        (KvDType::Fp8, _, 1) => DecodeBulk::decode_fp8_256_1,
        (KvDType::Fp8, ..) => DecodeBulk::decode_fp8_256_2,
    };
    let gpu = exec.gpu()?;
    let Scratch { partials, arrived } = Scratch::of(gpu);
    let AttentionBatch { qo_indptr, kv_lens, block_tables, .. } = *batch;
    let (rows, max_blocks) = block_tables.rows_cols();
    let overlapped = prefilled == Prefilled::Overlapped;
    let arguments = DecodeBulk {
        q,
        k,
        v,
        qo_indptr,
        kv_lens,
        block_tables,
        padded: padded_rows(out),
        out,
        heads: shape.heads,
        rows,
        max_blocks,
        blocks: k.rows_cols().0,
        overlapped: usize::from(overlapped),
        scale,
        partials,
        arrived,
    };
    let launch = kernel.launch(gpu, "attention", arguments)?;
    // Concurrent with prefill, the kernel waits for nothing before it reads.
    let launch = if overlapped { launch.early(q).early(k).early(v) } else { launch };
    // SAFETY: `prefilled` says what was launched before; the op checked the shapes, the kernel checks the block ids.
    unsafe { Call { batch, shape, format, grid }.run(launch) }
}

/// `ops::decode_attention` in one kernel.
pub(crate) fn decode_fused(
    exec: &mut Exec,
    grid: &DecodeGrid,
    qkv: &Tensor,
    heads: &Heads<'_>,
    batch: &AttentionBatch<'_>,
    (k, v): (&mut Tensor, &mut Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Heads { shape, norms, eps, rope, slots, .. } = *heads;
    let scale = (shape.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
    let format = KvDType::of(k);
    let kernel = match (format, shape.head_dim, grid.stages) {
        (KvDType::Bf16, 64, _) => DecodeFused::decode_fused_64_2,
        (KvDType::Bf16, _, 2) => DecodeFused::decode_fused_128_2,
        (KvDType::Bf16, ..) => DecodeFused::decode_fused_128_3,
        (KvDType::Fp8, 64, _) => DecodeFused::decode_fused_fp8_64_4,
        (KvDType::Fp8, ..) => DecodeFused::decode_fused_fp8_128_3,
    };
    let gpu = exec.gpu()?;
    let Scratch { partials, arrived } = Scratch::of(gpu);
    let AttentionBatch { qo_indptr, kv_lens, block_tables, .. } = *batch;
    let ((rows, max_blocks), blocks) = (block_tables.rows_cols(), k.rows_cols().0);
    let arguments = DecodeFused {
        qkv,
        q_norm: norms.0,
        k_norm: norms.1,
        rope,
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
        positions: rope.rows_cols().0,
        eps,
        scale,
        partials,
        arrived,
    };
    let launch = kernel.launch(gpu, "decode_attention", arguments)?;
    let launch = launch.early(norms.0).early(norms.1).early(rope).early(slots).early(k).early(v);
    // SAFETY: the op checked the shapes, the kernel checks block ids and positions.
    unsafe { Call { batch, shape, format, grid }.run(launch) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::occupancy;

    #[test]
    fn as_many_blocks_fit_a_multiprocessor() {
        for (head_dim, column_tiles, stages) in [
            (64, 1, 2),
            (64, 2, 2),
            (128, 1, 1),
            (128, 1, 2),
            (128, 2, 2),
            (128, 1, 3),
            (256, 1, 3),
            (256, 2, 3),
            (256, 1, 4),
        ] {
            for format in [KvDType::Bf16, KvDType::Fp8] {
                let bytes = shared_bytes(format, head_dim, column_tiles, stages) + 1024;
                assert!(occupancy(stages) * bytes <= 228 << 10, "{format:?}, {head_dim}, {stages}");
            }
        }
    }
}
