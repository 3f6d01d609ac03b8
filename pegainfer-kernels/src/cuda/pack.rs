//! Launches of csrc/rows/pack.cu.

use super::abi::Pack;
use crate::limits::pack::{MAX_ROWS, THREADS};
use crate::packed_rows::{PackSegment, PackedRows};
use pegainfer_core::cuda::COUNTERS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Words of a row's totals in csrc/.
const TOTALS: usize = 6;
const _: () = assert!(MAX_ROWS * TOTALS <= COUNTERS);

/// See [`ops::pack_rows`](crate::ops::pack_rows); with `back` [`ops::unpack_rows`](crate::ops::unpack_rows).
pub(crate) fn pack_rows(
    exec: &mut Exec,
    segment: &PackSegment,
    rows: PackedRows<'_>,
    packed: &mut Tensor,
    back: bool,
) -> Result<(), OpError> {
    let (gpu, parts) = (exec.gpu()?, &segment.parts);
    let PackedRows { rows, count, sums: (words, first) } = rows;
    let sums = words.address() + (first * size_of::<u32>()) as u64;
    // The kernel leaves them zero.
    let totals = gpu.counters();
    let (op, entry) = if back { ("unpack_rows", Pack::unpack) } else { ("pack_rows", Pack::pack) };
    let launch = entry.launch(gpu, op, Pack { parts, packed, rows, sums, totals, pitch: segment.bytes })?;
    // Serialised: it is not part of a step.
    // SAFETY: the op checked the sizes; the parts lie within live tensors, as `pack_segments` listed them.
    unsafe { launch.run([parts.rows_cols().0, count, 1], THREADS) }
}
