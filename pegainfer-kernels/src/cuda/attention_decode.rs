//! Rows of few queries on Hopper and later: csrc/attention_decode.cu, and what csrc/gated_decode.cu shares with it.

use super::attention_prefill::Prefill;
use super::images;
use crate::ops::{AttentionBatch, HeadShape, Heads};
use pegainfer_core::cuda::{COUNTERS, Cuda, Launch, WORKSPACE_BYTES};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/attention_decode.cu.
const WARPS: usize = 4;
/// Columns of the matrix of a row's queries that share a KV head; a kernel takes once or twice as many.
pub(super) const COLUMNS: usize = 8;
/// Head sizes above it have stages of keys or values, not of both.
const LARGE: usize = 128;
/// Blocks of threads of a multiprocessor, by shared memory and registers, with `stages` stages in each warp's ring.
fn occupancy(stages: usize) -> usize {
    5usize.saturating_sub(stages).max(1)
}

/// Stages of a warp's ring for `pairs` pairs of row and KV head. With three, a multiprocessor has room for two blocks, with
/// two for three: deep rings keep the memory busy where pairs nearly fill one or two rounds of two blocks and would leave
/// more of three idle: on an H200 35 us instead of 44 for 32 rows of 1,100 tokens, 60 instead of 65 for 52. A stage of
/// heads of 256 has keys or values, and three keep the memory busy. One row alone has all of a multiprocessor for a block:
/// it is then in fewer parts, which take less long to add (23.6 us instead of 25.8 for 16k tokens).
pub(super) fn stages(multiprocessors: usize, pairs: usize, head_dim: usize) -> usize {
    if head_dim > LARGE {
        return if 32 * pairs <= multiprocessors { 4 } else { 3 };
    }
    let nearly_fill = |blocks: usize| 3 * blocks < 4 * pairs && pairs <= blocks;
    let deep = nearly_fill(2 * multiprocessors) || nearly_fill(4 * multiprocessors);
    if deep && head_dim == 128 { 3 } else { 2 }
}

/// Whether these kernels can run here. They were written for 227 KB of shared memory a multiprocessor, which consumer
/// GPUs of compute capability 12 lack.
pub(super) fn available(gpu: &Cuda, shape: HeadShape) -> bool {
    matches!(gpu.capability().0, 9 | 10) && matches!(shape.head_dim, 64 | 128 | 256)
}

/// Whether [`decode_fused`] takes this shape.
pub(crate) fn fused(gpu: &Cuda, shape: HeadShape) -> bool {
    available(gpu, shape) && shape.head_dim <= LARGE && shape.group() <= COLUMNS
}

/// Blocks of threads along x: one for each row, and spare ones that go to long rows. They depend on nothing but the
/// number of rows, so that a graph fits every context. All are resident at once, in `slots`, if the rows leave room, but
/// some are spare in any case: rows differ in length.
fn blocks(slots: usize, rows: usize, kv_heads: usize, part_bytes: usize) -> usize {
    let resident = slots / kv_heads;
    let blocks = rows + resident.saturating_sub(rows).max(resident / 2);
    let fits = blocks * kv_heads <= COUNTERS && blocks * kv_heads * part_bytes <= WORKSPACE_BYTES;
    if fits { blocks } else { rows }
}

/// Size of `Shared<D, N, S>` in csrc/decode_parts.cuh.
fn shared_bytes(head_dim: usize, n: usize, stages: usize) -> usize {
    let slabs = if head_dim > LARGE { 1 } else { 2 };
    let bytes = WARPS * stages * (slabs * 32 * head_dim + 8) + 16 * n * head_dim + 4 * head_dim + 8;
    bytes.next_multiple_of(128)
}

/// The arguments and the launch that all kernels share.
pub(super) struct Call<'a, 'b> {
    pub batch: &'a AttentionBatch<'b>,
    pub shape: HeadShape,
    /// Times log2(e).
    pub scale: f32,
    /// As in csrc/decode.cuh: 8 `n` columns at most.
    pub n: usize,
    pub stages: usize,
}

impl Call<'_, '_> {
    /// Appends the batch and the output to the operands that come before them.
    pub fn batch(&self, launch: Launch, out: &mut Tensor, blocks: usize) -> Launch {
        let (rows, max_blocks) = self.batch.block_tables.rows_cols();
        let launch = launch.input(self.batch.qo_indptr).input(self.batch.kv_lens).input(self.batch.block_tables);
        launch.output(out).u32(self.shape.heads).u32(rows).u32(max_blocks).u32(blocks)
    }

    /// # Safety
    /// As [`Launch::run`], once scale, workspace and counters are appended.
    pub unsafe fn run(&self, launch: Launch, gpu: Resources) -> Result<(), OpError> {
        let HeadShape { kv_heads, head_dim, .. } = self.shape;
        let part_bytes = COLUMNS * self.n * (head_dim + 4) * size_of::<f32>();
        let slots = occupancy(self.stages) * gpu.multiprocessors;
        let blocks = blocks(slots, self.batch.block_tables.rows_cols().0, kv_heads, part_bytes);
        let launch = launch.f32(self.scale).pointer(gpu.workspace).pointer(gpu.counters);
        let launch = launch.shared(shared_bytes(head_dim, self.n, self.stages));
        // Overlapped, the kernel fetches what lies before a row's queries while those in front of it still run.
        let launch = if self.batch.load.sampled_only { launch } else { launch.overlapped() };
        // SAFETY: the caller's promise; `blocks` was chosen so that the parts fit the workspace.
        unsafe { launch.run([blocks, kv_heads, 1], 32 * WARPS) }
    }
}

/// What a launch takes from the GPU.
#[derive(Clone, Copy)]
pub(super) struct Resources {
    multiprocessors: usize,
    workspace: u64,
    counters: u64,
}

impl Resources {
    pub fn of(gpu: &Cuda) -> Self {
        Self { multiprocessors: gpu.multiprocessors(), workspace: gpu.workspace(), counters: gpu.counters() }
    }
}

/// Attention of the rows with at most 16 queries times heads of a group. `scale` includes log2(e); `prefill`: that of the
/// other rows.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(super) fn decode(
    gpu: &mut Cuda,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
    batch: &AttentionBatch<'_>,
    shape: HeadShape,
    scale: f32,
    prefill: Prefill,
    out: &mut Tensor,
) -> Result<(), OpError> {
    // Rows that only prefill takes count for nothing here: twice the columns cost 3 us of 65 a layer.
    let n = if batch.load.max_decode_queries * shape.group() <= COLUMNS { 1 } else { 2 };
    let (kernel, stages) = match (shape.head_dim, n) {
        (64, 1) => ("decode_64_1", 2),
        (64, _) => ("decode_64_2", 2),
        (128, 1) => ("decode_128_1", 2),
        (128, _) => ("decode_128_2", 2),
        (_, 1) => ("decode_256_1", 3),
        _ => ("decode_256_2", 3),
    };
    let (call, resources) = (Call { batch, shape, scale, n, stages }, Resources::of(gpu));
    let launch = gpu.launch("attention", &images::ATTENTION_DECODE, kernel)?.input(q).input(k).input(v);
    let launch = call.batch(launch, out, k.rows_cols().0).u32(usize::from(prefill == Prefill::Beside));
    // SAFETY: matches csrc/attention_decode.cu, and `prefill` says what was launched before; the op checked the shapes, the
    // kernel checks the block ids.
    unsafe { call.run(launch, resources) }
}

/// `ops::decode_attention` in one kernel, for shapes that [`fused`] accepts.
pub(crate) fn decode_fused(
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &Heads<'_>,
    batch: &AttentionBatch<'_>,
    (k, v): (&mut Tensor, &mut Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Heads { shape, norms, eps, rope, slots, .. } = *heads;
    let scale = (shape.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
    let gpu = exec.gpu()?;
    let pairs = batch.block_tables.rows_cols().0 * shape.kv_heads;
    let stages = stages(gpu.multiprocessors(), pairs, shape.head_dim);
    let kernel = match (shape.head_dim, stages) {
        (64, _) => "decode_fused_64_2",
        (_, 2) => "decode_fused_128_2",
        _ => "decode_fused_128_3",
    };
    let (call, resources) = (Call { batch, shape, scale, n: 1, stages }, Resources::of(gpu));
    let blocks = k.rows_cols().0;
    let launch = gpu.launch("decode_attention", &images::ATTENTION_DECODE, kernel)?;
    let launch = launch.input(qkv).input(norms.0).input(norms.1).input(rope).input(slots);
    let launch = launch.output(k).output(v);
    let launch = call.batch(launch, out, blocks).u32(rope.rows_cols().0).f32(eps);
    // SAFETY: matches csrc/attention_decode.cu; the op checked the shapes, the kernel checks block ids and positions.
    unsafe { call.run(launch, resources) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_fills_the_gpu_and_fits_the_workspace() {
        let part = COLUMNS * 132 * 4;
        let slots = occupancy(2) * 132;
        assert_eq!(blocks(slots, 1, 8, part), 49, "one row may have the whole GPU");
        assert_eq!(blocks(slots, 8, 8, part), 49);
        assert_eq!(blocks(slots, 128, 8, part), 152, "some are spare for long rows");
        assert_eq!(blocks(slots, 100_000, 8, part), 100_000, "no room for parts: every row has one");
    }

    #[test]
    fn as_many_blocks_fit_a_multiprocessor() {
        for (head_dim, n, stages) in
            [(64, 1, 2), (64, 2, 2), (128, 1, 2), (128, 2, 2), (128, 1, 3), (256, 1, 3), (256, 2, 3), (256, 1, 4)]
        {
            assert!(occupancy(stages) * (shared_bytes(head_dim, n, stages) + 1024) <= 228 << 10);
        }
    }

    #[test]
    fn the_ring_is_deep_where_two_blocks_are_enough() {
        assert_eq!([1, 24, 28, 33, 34, 128].map(|rows| stages(132, 8 * rows, 128)), [2, 2, 3, 3, 2, 2]);
        assert_eq!([48, 52, 64, 80].map(|rows| stages(132, 8 * rows, 128)), [2, 3, 3, 2]);
        assert_eq!([1, 2, 128].map(|rows| stages(132, 4 * rows, 256)), [4, 3, 3]);
    }
}
