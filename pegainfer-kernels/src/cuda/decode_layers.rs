//! `ops::decode_layers` in one kernel: csrc/layers/decode.cu.

use super::abi::{Layer, Step};
use crate::choice::{self, Gpu};
use crate::decode_model::{DecodeLayer, DecodeModel};
use crate::limits::decode_layers::{
    ATTENTION_BYTES, CONSUMERS, HEAD, INPUT_PAD, MAX_OWN, MAX_STAGES, PRODUCERS, STAGE_BYTES, STAGE_ROWS, WARPS,
};
use crate::ops::{AttentionBatch, HeadShape};
use pegainfer_core::cuda::{COUNTERS, Cuda, WORKSPACE_BYTES};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Maximum number of rows: from four on, a chain of kernels is faster.
pub const DECODE_LAYERS_ROWS: usize = 2;

/// Maximum number of query heads of a KV head.
const GROUP: usize = 8;
/// Maximum hidden size with kernels.
const MAX_HIDDEN: usize = 4096;
/// Threads of a block.
const THREADS: usize = CONSUMERS + 32 * PRODUCERS;
/// Fewer would not let weights wait for x.
const MIN_STAGES: usize = 4;
/// More than the static shared memory of the kernel.
const FIXED_BYTES: usize = 1024;
/// Bytes of a partial result of attention.
const PART_BYTES: usize = GROUP * (HEAD + 4) * size_of::<f32>();

/// Sizes that a launch depends on.
#[derive(Debug, Clone, Copy)]
struct Dims {
    hidden: usize,
    intermediate: usize,
    shape: HeadShape,
    multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    shared: usize,
}

impl Dims {
    fn new(model: &DecodeModel<'_>, gpu: &Gpu) -> Self {
        let (hidden, intermediate) = model.widths();
        let (multiprocessors, shared) = (gpu.multiprocessors, gpu.shared_memory);
        Self { hidden, intermediate, shape: model.shape, multiprocessors, shared }
    }

    /// Blocks of threads: every one needs a part in every GEMM.
    fn blocks(&self) -> usize {
        let least = self.hidden.min(self.intermediate).min(self.shape.qkv_width());
        self.multiprocessors.min(least / 2)
    }

    /// Bytes of x and of the sums of a GEMM, or of attention, which uses the same memory.
    fn scratch(&self, rows: usize) -> usize {
        let Self { hidden, intermediate, shape, .. } = *self;
        let widest = hidden.max(shape.q_width()).max(intermediate);
        let share = |n: usize| 2 * (n / 2).div_ceil(self.blocks());
        let most = share(hidden).max(share(shape.qkv_width())).max(2 * share(intermediate));
        let sums = WARPS * rows * most.next_multiple_of(STAGE_ROWS) * size_of::<f32>();
        (rows * (2 * widest + INPUT_PAD) + sums).max(ATTENTION_BYTES).next_multiple_of(128)
    }

    /// Stages of the ring of weights.
    fn stages(&self, rows: usize) -> usize {
        (self.shared.saturating_sub(FIXED_BYTES + self.scratch(rows)) / STAGE_BYTES).min(MAX_STAGES)
    }

    fn fit(&self) -> bool {
        let Self { hidden, intermediate, shape, .. } = *self;
        let heads = shape.is_supported() && shape.head_dim == HEAD && shape.group() <= GROUP;
        let widths = [hidden, intermediate].iter().all(|n| *n > 0 && n.is_multiple_of(32)) && hidden <= MAX_HIDDEN;
        if !heads || !widths {
            return false;
        }
        let blocks = self.blocks();
        let attends = blocks / shape.kv_heads >= DECODE_LAYERS_ROWS;
        let counted = blocks <= COUNTERS && blocks * PART_BYTES <= WORKSPACE_BYTES;
        let owns = 2 * (hidden / 2).div_ceil(blocks) <= MAX_OWN;
        attends && counted && owns && self.stages(DECODE_LAYERS_ROWS) >= MIN_STAGES
    }

    /// Words of two elements of all exchanges, for each row.
    fn words(&self) -> usize {
        (self.hidden + self.shape.qkv_width() + self.shape.q_width() + self.intermediate) / 2
    }
}

/// Device state of the kernel from step to step: addresses of weights and caches, and progress of its exchanges. It
/// belongs to one model and is valid as long as the model's tensors live.
#[derive(Debug)]
pub struct DecodeState {
    /// Addresses of the tensors of all layers, grouped by [`Layer`].
    addresses: Vec<u64>,
    table: Tensor,
    /// For each number of rows, the number of exchanges of every block.
    epochs: Tensor,
    /// For each number of rows: words of eight bytes.
    words: Tensor,
}

impl DecodeState {
    /// `None` if the kernel cannot run: not on Hopper, or with a shape or weights that the kernel does not support.
    pub fn new(exec: &mut Exec, model: &DecodeModel<'_>) -> std::io::Result<Option<Self>> {
        let gpu = choice::gpu(exec).map_err(std::io::Error::other)?.filter(Gpu::is_hopper);
        let Some(gpu) = gpu else { return Ok(None) };
        let dims = Dims::new(model, &gpu);
        if model.layers.is_empty() || model.is_quantized() || !dims.fit() {
            return Ok(None);
        }
        let addresses = if exec.device() == Device::Cuda { addresses(model) } else { Vec::new() };
        let mut table = exec.tensor("decode table", &[model.layers.len(), 2 * Layer::COUNT], DType::U32)?;
        let halves: Vec<u32> = addresses.iter().flat_map(|at| [*at as u32, (*at >> 32) as u32]).collect();
        if !halves.is_empty() {
            exec.fill_rows(&mut table, &halves).map_err(std::io::Error::other)?;
        }
        let epochs = exec.tensor("decode epochs", &[DECODE_LAYERS_ROWS, dims.blocks()], DType::U32)?;
        let sets = DECODE_LAYERS_ROWS * (DECODE_LAYERS_ROWS + 1) / 2;
        let words = exec.tensor("decode words", &[sets, dims.words(), 2], DType::U32)?;
        Ok(Some(Self { addresses, table, epochs, words }))
    }
}

/// Rows of the kernel's table of layers, whose matrices are all bf16.
fn addresses(model: &DecodeModel<'_>) -> Vec<u64> {
    let layer = |layer: &DecodeLayer<'_>| {
        let &DecodeLayer { input_norm, qkv, o, post_norm, gate_up, down, ref cache, .. } = layer;
        let ((q_norm, k_norm), (k, v)) = (layer.head_norms, (&*cache.0, &*cache.1));
        let (qkv, o, gate_up, down) = (qkv.tensor()?, o.tensor()?, gate_up.tensor()?, down.tensor()?);
        Some(Layer { input_norm, qkv, q_norm, k_norm, k, v, o, post_norm, gate_up, down }.addresses())
    };
    model.layers.iter().filter_map(layer).flatten().collect()
}

/// All layers of up to [`DECODE_LAYERS_ROWS`] rows; the op checked the shapes.
pub(crate) fn decode_layers(
    exec: &mut Exec,
    model: &mut DecodeModel<'_>,
    state: &mut DecodeState,
    slots: &Tensor,
    batch: &AttentionBatch<'_>,
    residual: &mut Tensor,
    normed: &mut Tensor,
) -> Result<(), OpError> {
    let op = "decode_layers";
    let dims = choice::gpu(exec)?.map(|gpu| Dims::new(model, &gpu));
    let dims = dims.ok_or_else(|| OpError { op, message: "there is no GPU".to_owned() })?;
    let gpu: &mut Cuda = exec.gpu()?;
    if addresses(model) != state.addresses || !dims.fit() {
        return Err(OpError { op, message: "the state was made for another model".to_owned() });
    }
    let (rows, max_blocks) = batch.block_tables.rows_cols();
    let kernel = match (rows, dims.hidden) {
        (1, ..=3072) => Step::decode_layers_1_3072,
        (1, _) => Step::decode_layers_1_4096,
        (_, ..=3072) => Step::decode_layers_2_3072,
        _ => Step::decode_layers_2_4096,
    };
    let (workspace, counters) = (gpu.workspace(), gpu.counters());
    let epochs = state.epochs.device() + ((rows - 1) * dims.blocks() * size_of::<u32>()) as u64;
    // The sets of fewer rows come before.
    let words = state.words.device() + (rows * (rows - 1) / 2 * dims.words() * size_of::<u64>()) as u64;
    let blocks = model.layers[0].cache.0.rows_cols().0;
    let scale = (HEAD as f32).sqrt().recip() * std::f32::consts::LOG2_E;
    let step = Step {
        layers: &state.table,
        final_norm: model.final_norm,
        rope: model.rope,
        slots,
        qo_indptr: batch.qo_indptr,
        kv_lens: batch.kv_lens,
        block_tables: batch.block_tables,
        residual,
        normed,
        epochs,
        flagged: words,
        partials: workspace,
        arrived: counters,
        n_layers: model.layers.len(),
        hidden: dims.hidden,
        heads: dims.shape.heads,
        kv_heads: dims.shape.kv_heads,
        intermediate: dims.intermediate,
        positions: model.rope.rows_cols().0,
        max_blocks,
        blocks,
        stages: dims.stages(rows),
        eps: model.eps,
        scale,
    };
    let launch = kernel.launch(gpu, op, step)?.overlapped().cooperative();
    // The kernel also reads the weights of all layers, and keys and values of earlier steps; their addresses are in the
    // table.
    let launch = launch.early(&state.table).early(batch.qo_indptr).early(batch.kv_lens).early(batch.block_tables);
    let launch = launch.shared(dims.stages(rows) * STAGE_BYTES + dims.scratch(rows));
    // SAFETY: the op checked the shapes, the table is of these layers, and the kernel checks block ids and positions.
    unsafe { launch.run([dims.blocks(), 1, 1], THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(hidden: usize, intermediate: usize, heads: usize, kv_heads: usize, gpu: &Gpu) -> Dims {
        let shape = HeadShape { heads, kv_heads, head_dim: HEAD };
        Dims { hidden, intermediate, shape, multiprocessors: gpu.multiprocessors, shared: gpu.shared_memory }
    }

    #[test]
    fn dense_models_of_up_to_8b_fit_an_h200() {
        let on = |hidden, width, heads, kv_heads| dims(hidden, width, heads, kv_heads, &Gpu::PLANNED);
        for (hidden, width, heads, kv_heads) in
            [(320, 896, 4, 2), (1024, 3072, 16, 8), (2560, 9728, 32, 8), (4096, 12_288, 32, 8)]
        {
            let dims = on(hidden, width, heads, kv_heads);
            assert!(dims.fit() && dims.blocks() == 132, "{dims:?}");
            for rows in 1..=DECODE_LAYERS_ROWS {
                let shared = FIXED_BYTES + dims.stages(rows) * STAGE_BYTES + dims.scratch(rows);
                assert!(shared <= Gpu::PLANNED.shared_memory, "{dims:?}");
            }
        }
        let small = Gpu { shared_memory: 101_376, ..Gpu::PLANNED };
        assert_eq!(on(2560, 9728, 32, 8).stages(1), 7);
        assert!(!on(5120, 17_408, 40, 8).fit(), "too wide for the norm");
        assert!(!on(2560, 9728, 32, 2).fit(), "16 heads share a KV head");
        assert!(!on(2560, 9720, 32, 8).fit(), "rows are no multiple of 32");
        assert!(!dims(2560, 9728, 32, 8, &small).fit(), "too little shared memory");
    }

    #[test]
    fn every_block_has_a_part_in_every_product() {
        let small = dims(128, 256, 1, 1, &Gpu::PLANNED);
        assert_eq!(small.blocks(), 64);
        assert!(small.fit());
    }
}
