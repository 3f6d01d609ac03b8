//! Reference kernel of `ops::vision::unfold_patches`.

use half::bf16;
use pegainfer_core::team;

pub use crate::limits::vision::{COPIES, PATCH, PATCH_VALUES};

/// Patches of a part of the work.
const AT_ONCE: usize = 16;

/// Reference kernel of `ops::vision::unfold_patches`, with checked patches.
pub fn unfold_patches(pixels: &[u8], patches: &[[u32; 2]], out: &mut [bf16]) {
    let row = COPIES * PATCH_VALUES;
    team::for_each_chunk(out, AT_ONCE * row, |i, out| {
        for (out, patch) in out.chunks_exact_mut(row).zip(&patches[i * AT_ONCE..]) {
            let (first, others) = out.split_at_mut(PATCH_VALUES);
            read_patch(pixels, *patch, first);
            others.chunks_exact_mut(PATCH_VALUES).for_each(|copy| copy.copy_from_slice(first));
        }
    });
}

/// `2 v - 255` for the bytes `v` of a patch, in the order of the weight: colour, row, column.
fn read_patch(pixels: &[u8], [first, stride]: [u32; 2], values: &mut [bf16]) {
    for y in 0..PATCH {
        let row = &pixels[first as usize + y * stride as usize..][..3 * PATCH];
        for (x, pixel) in row.chunks_exact(3).enumerate() {
            for (colour, value) in pixel.iter().enumerate() {
                values[(colour * PATCH + y) * PATCH + x] = bf16::from_f32(2.0 * f32::from(*value) - 255.0);
            }
        }
    }
}
