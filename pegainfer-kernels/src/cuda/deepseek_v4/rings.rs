//! `write_ring`, also as a part of `sparse_attention`, and `copy_slots` (csrc/deepseek_v4/rings.cu).

use super::{rows, run};
use crate::cuda::abi::{CopySlots, WriteRing};
use crate::limits::deepseek_v4::ROW_THREADS;
use crate::ops::deepseek_v4::{RaggedBatch, RingTable};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Vectors that a thread copies of the longest slot.
const VECTORS: usize = 4;

/// `rings`: `[slots, ring, width]`.
pub(crate) fn write_ring(
    exec: &mut Exec,
    op: &'static str,
    fresh: &Tensor,
    batch: &RaggedBatch<'_>,
    rings: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, width), dtype) = (fresh.rows_cols(), fresh.dtype());
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
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
pub(crate) fn copy_slots(
    exec: &mut Exec,
    table: &RingTable,
    rings: &mut [&mut Tensor],
    (from, to): (usize, usize),
) -> Result<(), OpError> {
    let op = "copy_slots";
    if from == to || rings.is_empty() {
        return Ok(());
    }
    let Some(addresses) = table.of(rings) else {
        return Err(OpError { op, message: "the table belongs to other rings".to_owned() });
    };
    let launch = CopySlots::copy_slots.launch(exec.gpu()?, op, CopySlots { rings: addresses, from, to })?.overlapped();
    let launch = rings.iter().fold(launch, |launch, ring| launch.writes(ring));
    let shares = table.longest.div_ceil(ROW_THREADS * VECTORS);
    // SAFETY: the op checked the slots, and the table has the addresses and lengths of these rings.
    unsafe { launch.run([rings.len(), shares, 1], ROW_THREADS) }
}
