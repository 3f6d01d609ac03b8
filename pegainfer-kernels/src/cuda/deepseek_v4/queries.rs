//! `attention_queries` (csrc/deepseek_v4/queries.cu).

use crate::cuda::abi::{AttentionQueries, Target};
use crate::limits::deepseek_v4::{HEAD_THREADS, MAX_INDEX_DIM};
use crate::limits::deepseek_v4_attention::MAX_DIM;
use crate::ops::deepseek_v4::{KeptTokens, Queries, RaggedBatch, RopeTable};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError};

const OP: &str = "attention_queries";

/// A compressor's operands; all zero if there is none.
#[derive(Default)]
struct Rings {
    values: u64,
    scores: u64,
    bias: u64,
    value_rings: u64,
    score_rings: u64,
    slot_count: usize,
    ratio: usize,
    ring: usize,
    width: usize,
}

impl Rings {
    fn of(kept: &Option<KeptTokens<'_>>) -> Self {
        let Some(KeptTokens { tokens: (values, scores), weights, spec, state }) = kept else { return Self::default() };
        Self {
            values: values.device(),
            scores: scores.device(),
            bias: weights.position_bias.device(),
            value_rings: state.values.device(),
            score_rings: state.scores.device(),
            slot_count: state.values.rows_cols().0,
            ratio: spec.ratio,
            ring: state.values.shape()[1],
            width: values.rows_cols().1,
        }
    }
}

/// `attention_queries` on checked operands.
pub(crate) fn attention_queries(
    exec: &mut Exec,
    x: Queries<'_>,
    table: &RopeTable,
    batch: &RaggedBatch<'_>,
    (eps, quantize): (f32, bool),
) -> Result<(), OpError> {
    let (frequencies, dtype) = (table.frequencies(), x.heads.dtype());
    let (tokens, heads, dim) = (x.heads.shape()[0], x.heads.shape()[1], x.heads.shape()[2]);
    let (index_heads, index_dim) = x.index.as_deref().map_or((0, 0), |index| (index.shape()[1], index.shape()[2]));
    if dim > MAX_DIM || index_dim > MAX_INDEX_DIM {
        let message =
            format!("heads of {dim} and {index_dim} elements: the GPU kernel takes {MAX_DIM} and {MAX_INDEX_DIM}");
        return Err(OpError { op: OP, message });
    }
    if tokens == 0 {
        return Ok(());
    }
    let [main, index] = [Rings::of(&x.kept[0]), Rings::of(&x.kept[1])];
    let RaggedBatch { qo_indptr, positions, slots, .. } = *batch;
    let arguments = AttentionQueries {
        q: x.heads,
        index_q: x.index.map_or(Target::Scratch(0), Target::Tensor),
        frequencies,
        qo_indptr,
        positions,
        slots,
        values: main.values,
        scores: main.scores,
        bias: main.bias,
        value_rings: main.value_rings,
        score_rings: main.score_rings,
        index_values: index.values,
        index_scores: index.scores,
        index_bias: index.bias,
        index_value_rings: index.value_rings,
        index_score_rings: index.score_rings,
        heads,
        dim,
        index_heads,
        index_dim,
        pairs: frequencies.elements(),
        rows: slots.elements(),
        slot_count: main.slot_count.max(index.slot_count),
        ratio: main.ratio,
        ring: main.ring,
        width: main.width,
        index_ratio: index.ratio,
        index_ring: index.ring,
        index_width: index.width,
        low_precision: usize::from(quantize),
        eps,
    };
    let of_heads = |heads: usize| heads.div_ceil(HEAD_THREADS / 32);
    // Absent compressors come last: if there is an indexer, its layer has a compressor as well.
    let parts = of_heads(heads) + of_heads(index_heads) + x.kept.iter().flatten().count();
    let entries = [AttentionQueries::attention_queries_bf16, AttentionQueries::attention_queries_f32];
    let mut launch = entries[usize::from(dtype == DType::F32)].launch(exec.gpu()?, OP, arguments)?.overlapped();
    launch = [frequencies, qo_indptr, positions, slots].into_iter().fold(launch, |launch, tensor| launch.early(tensor));
    for kept in x.kept.iter().flatten() {
        launch = launch.writes(&kept.state.values).writes(&kept.state.scores);
    }
    // SAFETY: the op checked the shapes; the grid covers all tokens, heads and rings.
    unsafe { launch.run([tokens, parts, 1], HEAD_THREADS) }
}
