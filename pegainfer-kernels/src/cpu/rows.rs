//! Row copies.

use half::bf16;
use pegainfer_core::exec::Device;

/// Name of the kernel that copies rows on this device.
pub(crate) fn kernel(_device: Device) -> &'static str {
    "copy"
}

/// `out[i] = from[rows[i]]`, rows of `width` elements.
pub fn gather(from: &[bf16], rows: &[u32], width: usize, out: &mut [bf16]) {
    for (to, &row) in out.chunks_exact_mut(width).zip(rows) {
        to.copy_from_slice(&from[row as usize * width..][..width]);
    }
}
