//! Reference kernel of `ops::vision::patch_embed`.

use super::values::{Value, load_f32};
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};
use pegainfer_core::team;

/// Pixels of a side of a patch.
pub const PATCH: usize = 16;
/// Values of a patch: three colours.
pub const PATCH_VALUES: usize = 3 * PATCH * PATCH;

/// Patches computed at once, with one read of the weight.
const AT_ONCE: usize = 4;

/// Read-only operands; see the op.
pub struct Inputs<'a> {
    /// RGB bytes of all images.
    pub pixels: &'a [u8],
    /// `[n, 2]`: byte of the first pixel of each patch, and bytes of a row of pixels of its image.
    pub patches: &'a [[u32; 2]],
    /// `[hidden, PATCH_VALUES]`.
    pub weight: &'a [f32],
    /// `[hidden]`.
    pub bias: &'a [f32],
}

/// Reference kernel of `ops::vision::patch_embed`, with checked patches.
pub fn patch_embed<T: Value>(isa: Isa, inputs: &Inputs<'_>, out: &mut [T]) {
    let hidden = inputs.bias.len();
    team::for_each_chunk(out, AT_ONCE * hidden, |i, out| {
        let patches = &inputs.patches[i * AT_ONCE..][..out.len() / hidden];
        dispatch(isa, Patches { inputs, patches, out });
    });
}

/// Computes up to [`AT_ONCE`] patches.
struct Patches<'a, T> {
    inputs: &'a Inputs<'a>,
    patches: &'a [[u32; 2]],
    out: &'a mut [T],
}

impl<T: Value> Kernel for Patches<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Inputs { pixels, weight, bias, .. } = *self.inputs;
        let mut values = [[0.0; PATCH_VALUES]; AT_ONCE];
        for (values, patch) in values.iter_mut().zip(self.patches) {
            read_patch(pixels, *patch, values);
        }
        for (j, (w, b)) in weight.chunks_exact(PATCH_VALUES).zip(bias).enumerate() {
            let mut sums = [s.splat(0.0); AT_ONCE];
            for (at, w) in (0..PATCH_VALUES).step_by(16).zip(w.chunks_exact(16)) {
                let w = load_f32(s, w);
                for (sum, values) in sums.iter_mut().zip(&values) {
                    *sum = s.fma(load_f32(s, &values[at..at + 16]), w, *sum);
                }
            }
            for (out, sum) in self.out.chunks_exact_mut(bias.len()).zip(sums) {
                out[j] = T::narrow(s.sum(sum) + b);
            }
        }
    }
}

/// The values of a patch in the order of the weight: colour, row, column.
#[inline(always)]
fn read_patch(pixels: &[u8], [first, stride]: [u32; 2], values: &mut [f32; PATCH_VALUES]) {
    for y in 0..PATCH {
        let row = &pixels[first as usize + y * stride as usize..][..3 * PATCH];
        for (x, pixel) in row.chunks_exact(3).enumerate() {
            for (colour, value) in pixel.iter().enumerate() {
                values[(colour * PATCH + y) * PATCH + x] = f32::from(*value) / 127.5 - 1.0;
            }
        }
    }
}
