//! `attention_latents` (csrc/deepseek_v4/latents.cu).

use super::norm::targets;
use crate::cuda::abi::AttentionLatents;
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_attention::{MAX_DIM, POOL_BLOCKS};
use crate::ops::deepseek_v4::{LatentOutputs, Latents, NewEntries, PAGE_TOKENS, RaggedBatch};
use pegainfer_core::cuda::COUNTERS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const OP: &str = "attention_latents";
/// Parts of a step: queries, keys, and two compressors.
const PARTS: usize = 4;

/// A compressor's operands; all zero if there is none.
#[derive(Default)]
struct Compressor {
    values: u64,
    scores: u64,
    bias: u64,
    norm: u64,
    value_rings: u64,
    score_rings: u64,
    entries: u64,
    entry_pages: usize,
    slot_count: usize,
    ratio: usize,
    ring: usize,
    width: usize,
    dim: usize,
}

impl Compressor {
    fn new(new: &NewEntries<'_>) -> Result<Self, OpError> {
        let (dim, (values, scores), [value_rings, score_rings]) = (new.dim(), new.tokens, new.rings);
        // A thread has one dimension, and its warps share whole groups.
        let refuse = |message| Err(OpError { op: OP, message });
        if dim > MAX_DIM || !dim.is_multiple_of(32) {
            return refuse(format!("entries of {dim} elements: the GPU kernel takes multiples of 32 up to {MAX_DIM}"));
        }
        if new.spec.index && !dim.is_power_of_two() {
            return refuse(format!("entries of {dim} elements: the Hadamard transform takes powers of two"));
        }
        Ok(Self {
            values: values.device(),
            scores: scores.device(),
            bias: new.weights.position_bias.device(),
            norm: new.weights.norm.device(),
            value_rings: value_rings.device(),
            score_rings: score_rings.device(),
            entries: new.entries.device(),
            entry_pages: new.entries.rows_cols().0,
            slot_count: value_rings.rows_cols().0,
            ratio: new.spec.ratio,
            ring: value_rings.shape()[1],
            width: values.rows_cols().1,
            dim,
        })
    }

    fn of(new: &Option<NewEntries<'_>>) -> Result<Self, OpError> {
        new.as_ref().map_or(Ok(Self::default()), Self::new)
    }

    /// True if several blocks share an entry.
    fn shares_entries(&self) -> bool {
        self.ratio == PAGE_TOKENS
    }
}

/// Maximum number of entries of 128 tokens that a step of `tokens` tokens in `rows` rows completes, with gaps: an
/// entry's place is its row and its last token over 128.
fn long_entries(rows: usize, tokens: usize) -> Result<usize, OpError> {
    let most = rows + tokens / PAGE_TOKENS + 1;
    match most <= COUNTERS {
        true => Ok(most),
        false => Err(OpError {
            op: OP,
            message: format!("{rows} rows of {tokens} tokens: the GPU kernel has {COUNTERS} counters"),
        }),
    }
}

/// `attention_latents` on checked operands.
pub(crate) fn attention_latents(
    exec: &mut Exec,
    x: Latents<'_>,
    batch: &RaggedBatch<'_>,
    out: LatentOutputs<'_>,
) -> Result<(), OpError> {
    let (frequencies, (tokens, hidden)) = (x.table.frequencies(), x.queries.0.rows_cols());
    let (dtype, dim) = (x.keys.0.dtype(), x.keys.0.rows_cols().1);
    if tokens == 0 {
        return Ok(());
    }
    let [main, index] = [Compressor::of(&out.entries[0])?, Compressor::of(&out.entries[1])?];
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let (rows, pages) = page_tables.rows_cols();
    let (low, packed) = targets(out.rounded);
    let (channels, blocks) = match main.shares_entries() {
        true => {
            let bytes = long_entries(rows, tokens)? * main.dim * size_of::<f32>();
            (Scratch::new(exec)?.take(OP, bytes)?, tokens.next_multiple_of(POOL_BLOCKS))
        }
        false => (0, tokens),
    };
    let arguments = AttentionLatents {
        x: x.queries.0,
        weight: x.queries.1,
        out: out.queries,
        low,
        packed,
        keys: x.keys.0,
        key_weight: x.keys.1,
        kv: out.keys,
        frequencies,
        qo_indptr,
        positions,
        slots,
        page_tables,
        values: main.values,
        scores: main.scores,
        bias: main.bias,
        entry_norm: main.norm,
        value_rings: main.value_rings,
        score_rings: main.score_rings,
        entries: main.entries,
        index_values: index.values,
        index_scores: index.scores,
        index_bias: index.bias,
        index_norm: index.norm,
        index_value_rings: index.value_rings,
        index_score_rings: index.score_rings,
        index_entries: index.entries,
        channels,
        arrived: exec.gpu()?.counters(),
        tokens,
        hidden,
        dim,
        pairs: frequencies.elements(),
        rows,
        pages,
        slot_count: main.slot_count.max(index.slot_count),
        entry_pages: main.entry_pages,
        ratio: main.ratio,
        ring: main.ring,
        width: main.width,
        index_pages: index.entry_pages,
        index_ratio: index.ratio,
        index_ring: index.ring,
        index_width: index.width,
        index_dim: index.dim,
        low_precision: usize::from(x.quantize),
        eps: x.eps,
    };
    // Absent compressors come last: if there is an indexer, its layer has a compressor as well.
    let parts = PARTS - out.entries.iter().filter(|new| new.is_none()).count();
    let entries = [AttentionLatents::attention_latents_bf16, AttentionLatents::attention_latents_f32];
    let mut launch = entries[usize::from(dtype == DType::F32)].launch(exec.gpu()?, OP, arguments)?.overlapped();
    launch = [frequencies, qo_indptr, positions, slots].into_iter().fold(launch, |launch, tensor| launch.early(tensor));
    let new: Vec<&Tensor> = out.entries.iter().flatten().map(|new| &*new.entries).collect();
    launch = new.into_iter().fold(launch, |launch, entries| launch.writes(entries));
    // SAFETY: the op checked the shapes, and `Compressor` that a block has a thread per channel; the grid covers all
    // tokens, and there is scratch memory and a counter for each entry that blocks share.
    unsafe { launch.run([blocks, parts, 1], MAX_DIM) }
}
