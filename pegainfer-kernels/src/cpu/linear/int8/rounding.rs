//! Rounding of activations to int8.

use super::layout::Layout;
use super::panel::RUN;
use super::vector::{Kernel, Tile};
use half::bf16;

/// 32 columns of a row of x: eight words of four codes each, then the numbers at [`SCALE`], [`SUM`] and
/// [`BIAS`].
pub(super) type Run = [u32; WORDS];

/// Words of a [`Run`].
pub(super) const WORDS: usize = 12;

/// Place of `sx`, the bits of an f32.
pub(super) const SCALE: usize = 8;
/// Place of the sum of the codes, the bits of an f32.
pub(super) const SUM: usize = 9;
/// Place of `-c` times the sum of the codes, int32, for weights whose code `c` is zero; for groups of 16, `-c` times the
/// sum of the first 16 codes, then of the last 16.
pub(super) const BIAS: usize = 10;

/// Magnitudes below this count as zero: `127 / max` would overflow.
const TINY: f32 = f32::from_bits(7 << 23); // 2^-120

/// Rounds some rows of x.
pub(super) struct Round<'a> {
    /// `[rows, k]`.
    pub x: &'a [bf16],
    pub k: usize,
    /// Format of the weights.
    pub layout: &'a Layout,
    /// `[k / 32, rows]`.
    pub out: &'a mut [Run],
}

impl Kernel for Round<'_> {
    #[inline(always)]
    fn run<T: Tile>(self, _: T) {
        let rows = self.x.len() / self.k;
        for (r, row) in self.x.chunks_exact(self.k).enumerate() {
            for (x, out) in row.as_chunks::<RUN>().0.iter().zip(self.out.chunks_exact_mut(rows)) {
                out[r] = round(x, self.layout);
            }
        }
    }
}

/// Rounds 32 values. If one of them is infinite or NaN, the scale is NaN, and with it every output of the row.
#[inline(always)]
fn round(x: &[bf16; RUN], layout: &Layout) -> Run {
    /// 1.5 * 2^23: an f32 near it has its integer part in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let max = x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff));
    let max = f32::from_bits(u32::from(max) << 16);
    let (scale, inverse) = match max.is_finite() {
        true if max < TINY => (0.0, 0.0),
        true => (max / 127.0, 127.0 / max),
        false => (f32::NAN, 0.0),
    };
    let mut codes = [0i8; RUN];
    for (code, x) in codes.iter_mut().zip(x) {
        // The low byte of the sum of a finite product.
        let x = f32::from_bits(u32::from(x.to_bits()) << 16);
        *code = (x * inverse + ROUND).to_bits() as i8;
    }
    let sum = |codes: &[i8]| codes.iter().map(|code| i32::from(*code)).sum::<i32>();
    let (first, second) = (sum(&codes[..RUN / 2]), sum(&codes[RUN / 2..]));
    let mut run = [0; WORDS];
    for (word, codes) in run.iter_mut().zip(codes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(codes.map(i8::cast_unsigned));
    }
    run[SCALE] = scale.to_bits();
    run[SUM] = ((first + second) as f32).to_bits();
    let biased = if layout.halves { [first, second] } else { [first + second, 0] };
    run[BIAS..].copy_from_slice(&biased.map(|sum| (-layout.centre * sum).cast_unsigned()));
    run
}
