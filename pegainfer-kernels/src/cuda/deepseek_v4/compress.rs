//! `compress` (csrc/deepseek_v4_compress.cu): the entries, then the rings from which they were pooled.

use super::{rows, run};
use crate::cuda::abi::{CompressEntries, CompressRings};
use crate::limits::deepseek_v4_attention::MAX_DIM;
use crate::ops::deepseek_v4::{Batch, CompressorSpec, CompressorState, CompressorWeights};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Values of a key that share an FP8 scale.
const GROUP: usize = 64;

/// `frequencies`: `[pairs]` f32, of the last `2 pairs` dimensions of an entry.
pub(crate) fn compress(
    exec: &mut Exec,
    (values, scores): (&Tensor, &mut Tensor),
    (weights, frequencies): (&CompressorWeights, &Tensor),
    spec: CompressorSpec,
    batch: &Batch<'_>,
    state: &mut CompressorState,
    entries: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, width), dim, pairs) = (values.rows_cols(), weights.norm.elements(), frequencies.elements());
    check(dim, pairs, spec)?;
    let Batch { qo_indptr, positions, slots, page_tables } = *batch;
    let ((count, pages), slot_count) = (page_tables.rows_cols(), state.values.rows_cols().0);
    let (dtype, bias, (ratio, ring)) = (entries.dtype(), &weights.position_bias, (spec.ratio, state.values.shape()[1]));
    let arguments = CompressEntries {
        values,
        scores: &*scores,
        bias,
        norm: &weights.norm,
        frequencies,
        value_rings: &state.values,
        score_rings: &state.scores,
        qo_indptr,
        positions,
        slots,
        page_tables,
        entry_pages: entries.rows_cols().0,
        entries,
        rows: count,
        pages,
        slot_count,
        ratio,
        ring,
        width,
        dim,
        pairs,
        index: usize::from(spec.index),
        low_precision: usize::from(spec.quantize),
        eps: spec.eps,
    };
    let kernels = [CompressEntries::compress_entries_bf16, CompressEntries::compress_entries_f32];
    run(exec, "compress", kernels, dtype, arguments, ([tokens, 1, 1], dim))?;
    let CompressorState { values: value_rings, scores: score_rings } = state;
    let arguments = CompressRings {
        values,
        bias,
        qo_indptr,
        positions,
        slots,
        scores,
        value_rings,
        score_rings,
        rows: count,
        slot_count,
        ratio,
        ring,
        width,
    };
    let kernel = CompressRings::compress_rings;
    run(exec, "compress", [kernel, kernel], dtype, arguments, rows(tokens, width))
}

/// A thread has a dimension, and what its warps share are whole groups.
fn check(dim: usize, pairs: usize, spec: CompressorSpec) -> Result<(), OpError> {
    let refuse = |message| Err(OpError { op: "compress", message });
    if dim > MAX_DIM || !dim.is_multiple_of(32) {
        return refuse(format!("entries of {dim} elements: the GPU kernel takes multiples of 32 up to {MAX_DIM}"));
    }
    if spec.index && !dim.is_power_of_two() {
        return refuse(format!("entries of {dim} elements: the Hadamard turn takes powers of two"));
    }
    if spec.quantize && !spec.index && !(dim - 2 * pairs).is_multiple_of(GROUP) {
        let rest = dim - 2 * pairs;
        return refuse(format!("{rest} elements outside of the rotated part: FP8 takes groups of {GROUP}"));
    }
    Ok(())
}
