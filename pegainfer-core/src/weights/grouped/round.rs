//! Rounding of bf16 weights to integers of 4 bits.

use super::format::{GroupFormat, Offset, ScaleDType};
use super::pack::pack_nibbles;
use half::bf16;

/// Largest distance of a code from the one that stands for 0, halfway between 7 and 8: the largest weight of a group is
/// rounded by half a step at most.
const LIMIT: f32 = 7.5;
/// Group sizes, the preferred one first.
const GROUPS: [usize; 3] = [128, 64, 32];

impl GroupFormat {
    /// Format of rows of `k` columns that [`round_row`](Self::round_row) writes: symmetric int4 with bf16 scales for
    /// groups of 128 columns, or of 64 or 32 if rows are not a multiple of that; `None` if `k` is no multiple of 32.
    pub fn rounded_int4(k: usize) -> Option<Self> {
        let group = GROUPS.into_iter().find(|group| k.is_multiple_of(*group))?;
        Some(Self::int(4, group, ScaleDType::Bf16, Offset::None))
    }

    /// Rounds a row of weights to the format of [`rounded_int4`](Self::rounded_int4), with codes of -8 to 7. The scale
    /// of a group is its largest magnitude over 7.5, rounded to bf16; a code is the integer nearest to `w / scale`, ties
    /// to even.
    pub fn round_row(self, row: &[bf16], codes: &mut [u8], scales: &mut [u8]) {
        let group = self.group();
        let mut of_row = vec![0; row.len()];
        let groups = row.chunks_exact(group).zip(of_row.chunks_exact_mut(group)).zip(scales.chunks_exact_mut(2));
        for ((weights, codes), scale) in groups {
            let amax = weights.iter().fold(0f32, |max, w| max.max(w.to_f32().abs()));
            let rounded = bf16::from_f32(amax / LIMIT);
            scale.copy_from_slice(&rounded.to_le_bytes());
            let inverse = if rounded == bf16::ZERO { 0.0 } else { 1.0 / rounded.to_f32() };
            for (w, code) in weights.iter().zip(codes) {
                *code = ((w.to_f32() * inverse).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
            }
        }
        pack_nibbles(&of_row, codes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    #[test]
    fn weights_are_rounded_by_at_most_half_a_step() {
        assert_eq!([320, 96, 256].map(|k| GroupFormat::rounded_int4(k).unwrap().group()), [64, 32, 128]);
        assert_eq!(GroupFormat::rounded_int4(40), None);
        let (k, format) = (512, GroupFormat::rounded_int4(512).unwrap());
        // A group of zeros, and groups of very different magnitudes.
        let size = |i: usize| [0.0, 1e-3, 1.0, 300.0][i / 128];
        let value = |i: usize| (rng::bits(1, i as u64) as u16 as f32 / 32768.0 - 1.0) * size(i);
        let row: Vec<bf16> = (0..k).map(|i| bf16::from_f32(value(i))).collect();
        let (mut codes, mut scales) = (vec![0; format.code_bytes(k)], vec![0; format.scale_bytes(k)]);
        format.round_row(&row, &mut codes, &mut scales);
        let mut back = vec![f32::NAN; k];
        format.dequantize_row(&codes, &scales, k, &mut back);
        for (i, (w, back)) in row.iter().zip(back).enumerate() {
            // The largest positive weights are at 7.5 steps, of which 7 are left, and a scale is rounded by 0.4 %.
            let bound = 0.54 * size(i) / LIMIT;
            assert!((w.to_f32() - back).abs() <= bound, "{i}: {back} of {w}");
        }
    }
}
