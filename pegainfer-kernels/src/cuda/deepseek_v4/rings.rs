//! `write_ring`, also as a part of `sparse_attention`, and `copy_slot` (csrc/deepseek_v4_rings.cu).

use super::{rows, run};
use crate::cuda::abi::{CopySlot, WriteRing};
use crate::limits::deepseek_v4::ROW_THREADS;
use crate::ops::deepseek_v4::Batch;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// `rings`: `[slots, ring, width]`.
pub(crate) fn write_ring(
    exec: &mut Exec,
    op: &'static str,
    fresh: &Tensor,
    batch: &Batch<'_>,
    rings: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, width), dtype) = (fresh.rows_cols(), fresh.dtype());
    let Batch { qo_indptr, positions, slots, page_tables } = *batch;
    let ((count, pages), slot_count, ring) = (page_tables.rows_cols(), rings.shape()[0], rings.shape()[1]);
    let arguments = WriteRing {
        fresh,
        qo_indptr,
        positions,
        slots,
        page_tables,
        rings,
        rows: count,
        pages,
        slot_count,
        ring,
        width,
    };
    let entries = [WriteRing::write_ring_bf16, WriteRing::write_ring_f32];
    run(exec, op, entries, dtype, arguments, rows(tokens, width))
}

/// Does nothing between equal slots.
pub(crate) fn copy_slot(exec: &mut Exec, rings: &mut Tensor, from: usize, to: usize) -> Result<(), OpError> {
    if from == to {
        return Ok(());
    }
    let ((_, elements), dtype) = (rings.rows_cols(), rings.dtype());
    let grid = ([elements.div_ceil(ROW_THREADS), 1, 1], ROW_THREADS);
    let entries = [CopySlot::copy_slot_bf16, CopySlot::copy_slot_f32];
    run(exec, "copy_slot", entries, dtype, CopySlot { rings, from, to, elements }, grid)
}
