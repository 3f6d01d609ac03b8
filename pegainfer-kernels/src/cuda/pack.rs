//! Launches of csrc/rows/pack.cu.

use super::abi::Pack;
use crate::limits::pack::THREADS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// See [`ops::pack_rows`](crate::ops::pack_rows); with `back` [`ops::unpack_rows`](crate::ops::unpack_rows).
pub(crate) fn pack_rows(
    exec: &mut Exec,
    parts: &Tensor,
    row: usize,
    packed: &mut Tensor,
    sums: &mut Tensor,
    back: bool,
) -> Result<(), OpError> {
    let (gpu, count) = (exec.gpu()?, parts.rows_cols().0);
    // The first counter of the stream, and two words of 64 bits behind it; the kernel leaves them zero.
    let (arrived, totals) = (gpu.counters(), gpu.counters() + 8);
    let (op, entry) = if back { ("unpack_rows", Pack::unpack) } else { ("pack_rows", Pack::pack) };
    let launch = entry.launch(gpu, op, Pack { parts, packed, sums, row, totals, arrived })?;
    // Serialised: it is not part of a step.
    // SAFETY: the op checked the sizes; the parts lie within live tensors, as `pack_pieces` listed them.
    unsafe { launch.run([count, 1, 1], THREADS) }
}
