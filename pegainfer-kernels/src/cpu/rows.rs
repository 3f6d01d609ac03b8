//! Splitting rows into tasks, and copying rows.

use half::bf16;
use pegainfer_core::exec::Device;

/// Bytes per task. Handing a task to another thread takes a few microseconds; an elementwise kernel moves this much in
/// about ten, so a decode step of a few rows stays on its thread.
const TASK_BYTES: usize = 64 << 10;

/// Rows per task of an elementwise kernel that reads and writes `row_bytes` per row. If that is all rows, the one task
/// runs in place.
pub(super) fn per_task(row_bytes: usize) -> usize {
    (TASK_BYTES / row_bytes.max(1)).max(1)
}

/// Name of the kernel that copies rows on this device.
pub(crate) fn kernel(_device: Device) -> &'static str {
    "copy"
}

/// `out[i] = from[rows[i]]`, rows of `width` elements.
pub fn gather(from: &[bf16], rows: impl Iterator<Item = u32>, width: usize, out: &mut [bf16]) {
    for (to, row) in out.chunks_exact_mut(width).zip(rows) {
        to.copy_from_slice(&from[row as usize * width..][..width]);
    }
}
