//! Weight matrices in host memory, in the format that they are stored in.

use super::formats::{E4M3_MAX, decode_e4m3, e2m1, e4m3, e8m0, encode_e4m3};
use half::bf16;
use pegainfer_core::team;
use pegainfer_core::weights::grouped::GroupFormat;
use std::ops::Range;

/// Edge of the blocks of an FP8 weight that share a scale.
pub const BLOCK: usize = 128;
/// Values of a weight row that share an FP4 scale.
pub const FP4_BLOCK: usize = 32;

/// A weight `[n, k]`; see `ops::Matrix`.
#[derive(Clone, Copy)]
pub enum Weights<'a> {
    /// `[n, k]`.
    Bf16(&'a [bf16]),
    /// e4m3 codes `[n, k]`, and the scale of each block of 128 x 128.
    Fp8(&'a [u8], Scales<'a>),
    /// Pairs of E2M1 codes `[n, k / 2]`, E8M0 scales `[n, k / 32]`.
    Fp4(&'a [u8], &'a [u8]),
    /// Codes and scales of groups of columns.
    Grouped(Grouped<'a>),
}

/// A group-quantised weight, in the layout of [`grouped::format`](pegainfer_core::weights::grouped::format).
#[derive(Clone, Copy)]
pub struct Grouped<'a> {
    /// Meaning of codes and scales.
    pub format: GroupFormat,
    /// `[n, code_bytes(k)]`.
    pub codes: &'a [u8],
    /// `[n, scale_bytes(k)]`.
    pub scales: &'a [u8],
}

impl Grouped<'_> {
    /// The numbers of row `j` of matrices with `k` columns.
    pub fn dequantize_row(self, j: usize, k: usize, out: &mut [f32]) {
        let (code_bytes, scale_bytes) = (self.format.code_bytes(k), self.format.scale_bytes(k));
        let codes = &self.codes[j * code_bytes..][..code_bytes];
        self.format.dequantize_row(codes, &self.scales[j * scale_bytes..][..scale_bytes], k, out);
    }
}

/// Scales of an FP8 weight, `[n / 128, k / 128]`, both rounded up.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    /// Powers of two.
    E8m0(&'a [u8]),
    /// Numbers.
    F32(&'a [f32]),
}

impl Scales<'_> {
    /// Scale number `i`.
    pub fn get(self, i: usize) -> f32 {
        match self {
            Self::E8m0(bytes) => e8m0(bytes[i]),
            Self::F32(scales) => scales[i],
        }
    }
}

impl Weights<'_> {
    /// Number of rows, `n`, of matrices with `k` columns, at least one.
    pub fn rows(self, k: usize) -> usize {
        match self {
            Self::Bf16(w) => w.len() / k,
            Self::Fp8(codes, _) => codes.len() / k,
            Self::Fp4(pairs, _) => 2 * pairs.len() / k,
            Self::Grouped(w) => w.codes.len() / w.format.code_bytes(k),
        }
    }

    /// Some of the rows of a matrix with `k` columns. Those of FP8 begin with a block, and end with one or with the matrix.
    pub fn row_range(self, rows: Range<usize>, k: usize) -> Self {
        let part = |width: usize| rows.start * width..rows.end * width;
        match self {
            Self::Bf16(w) => Self::Bf16(&w[part(k)]),
            Self::Fp8(codes, scales) => {
                assert!(rows.start.is_multiple_of(BLOCK), "rows from {} on begin within a block", rows.start);
                let blocks = rows.start / BLOCK * k.div_ceil(BLOCK)..rows.end.div_ceil(BLOCK) * k.div_ceil(BLOCK);
                let scales = match scales {
                    Scales::E8m0(scales) => Scales::E8m0(&scales[blocks]),
                    Scales::F32(scales) => Scales::F32(&scales[blocks]),
                };
                Self::Fp8(&codes[part(k)], scales)
            }
            Self::Fp4(pairs, scales) => Self::Fp4(&pairs[part(k / 2)], &scales[part(k / FP4_BLOCK)]),
            Self::Grouped(Grouped { format, codes, scales }) => Self::Grouped(Grouped {
                format,
                codes: &codes[part(format.code_bytes(k))],
                scales: &scales[part(format.scale_bytes(k))],
            }),
        }
    }

    /// Values along `k` that are summed before a scale is applied.
    pub fn block(self, k: usize) -> usize {
        match self {
            // Groups may have an offset, too, so that their numbers are complete.
            Self::Bf16(_) | Self::Grouped(_) => k,
            Self::Fp8(..) => BLOCK,
            Self::Fp4(..) => FP4_BLOCK,
        }
    }

    /// Row `j`: its values without scales, and the scale of each block.
    pub fn row(self, j: usize, k: usize, values: &mut [f32], scales: &mut [f32]) {
        match self {
            Self::Bf16(w) => {
                values.iter_mut().zip(&w[j * k..]).for_each(|(v, w)| *v = w.to_f32());
                scales.fill(1.0);
            }
            Self::Fp8(codes, of_blocks) => {
                values.iter_mut().zip(&codes[j * k..]).for_each(|(v, code)| *v = e4m3(*code));
                let first = j / BLOCK * k.div_ceil(BLOCK);
                scales.iter_mut().enumerate().for_each(|(b, s)| *s = of_blocks.get(first + b));
            }
            Self::Fp4(pairs, bytes) => {
                for (two, pair) in values.chunks_exact_mut(2).zip(&pairs[j * k / 2..]) {
                    // The low nibble is the even column.
                    (two[0], two[1]) = (e2m1(pair & 15), e2m1(pair >> 4));
                }
                scales.iter_mut().zip(&bytes[j * k / FP4_BLOCK..]).for_each(|(s, byte)| *s = e8m0(*byte));
            }
            Self::Grouped(w) => {
                w.dequantize_row(j, k, values);
                scales.fill(1.0);
            }
        }
    }

    /// The weight as numbers, `[n, k]`: value times scale.
    pub fn dequantize(self, n: usize, k: usize) -> Vec<f32> {
        let block = self.block(k);
        let mut scales = vec![0.0; k.div_ceil(block)];
        let mut out = vec![0.0; n * k];
        for (j, row) in out.chunks_exact_mut(k).enumerate() {
            self.row(j, k, row, &mut scales);
            row.chunks_mut(block).zip(&scales).for_each(|(part, s)| part.iter_mut().for_each(|v| *v *= s));
        }
        out
    }
}

/// Rounds a weight `[n, k]` to FP8. The scale of a block of 128 x 128 is its largest magnitude over 448 (1 if that is
/// 0); a code is the e4m3 value nearest to `w / scale`, ties to even. `codes`: `[n, k]`; `scales`: `[n / 128, k /
/// 128]`, both rounded up. Runs on the current team.
pub fn quantize_fp8(w: &[bf16], k: usize, codes: &mut [u8], scales: &mut [f32]) {
    let rows = BLOCK * k;
    team::for_each_chunk_pair((codes, rows), (scales, k.div_ceil(BLOCK)), |i, codes, scales| {
        let w = &w[i * rows..][..codes.len()];
        for (b, scale) in scales.iter_mut().enumerate() {
            let columns = b * BLOCK..(b * BLOCK + BLOCK).min(k);
            let parts = || w.chunks_exact(k).map(|row| &row[columns.clone()]);
            // Compared as bits, so that a NaN is the largest: its scale makes the block NaN as it would be in bf16.
            let amax = parts().flatten().fold(0, |max, w| max.max(w.to_bits() & 0x7fff));
            *scale = if amax == 0 { 1.0 } else { bf16::from_bits(amax).to_f32() / E4M3_MAX };
            for (w, codes) in parts().zip(codes.chunks_exact_mut(k)) {
                w.iter()
                    .zip(&mut codes[columns.clone()])
                    .for_each(|(w, code)| *code = encode_e4m3(w.to_f32() / *scale));
            }
        }
    });
}

/// The bf16 numbers of e4m3 codes, exactly; `out` is at least as long as `codes`. No code may be NaN: 0x7f gives 480.
#[inline(always)]
pub fn widen_e4m3(codes: &[u8], out: &mut [bf16]) {
    for (code, out) in codes.iter().zip(out) {
        *out = bf16::from_bits((decode_e4m3(*code).to_bits() >> 16) as u16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_widens_to_its_value() {
        let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
        let mut wide = vec![bf16::ZERO; codes.len()];
        widen_e4m3(&codes, &mut wide);
        for (code, wide) in codes.iter().zip(wide) {
            assert_eq!(wide.to_f32().to_bits(), e4m3(*code).to_bits(), "{code:#x}");
        }
    }

    #[test]
    fn a_block_is_scaled_by_its_own_largest_magnitude() {
        let (n, k) = (130, 200);
        let value = |i: usize| bf16::from_f32(((i * 37 % 1009) as f32 - 500.0) * if i / k < 128 { 1e-3 } else { 1e3 });
        let mut w: Vec<bf16> = (0..n * k).map(value).collect();
        // A block of zeros: rows 128 and 129, columns from 128 on.
        (128..n).for_each(|j| w[j * k + 128..(j + 1) * k].fill(bf16::ZERO));
        let (mut codes, mut scales) = (vec![0xff; n * k], vec![f32::NAN; 4]);
        quantize_fp8(&w, k, &mut codes, &mut scales);
        assert_eq!(scales[3], 1.0);
        let amax = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
            let all = rows.flat_map(|j| columns.clone().map(move |l| j * k + l));
            all.map(|i| w[i].to_f32().abs()).fold(0f32, f32::max)
        };
        assert_eq!(scales[..3], [amax(0..128, 0..128), amax(0..128, 128..k), amax(128..n, 0..128)].map(|a| a / 448.0));
        let back = Weights::Fp8(&codes, Scales::F32(&scales)).dequantize(n, k);
        for (i, (back, w)) in back.iter().zip(&w).enumerate() {
            let (w, scale) = (w.to_f32(), scales[i / k / 128 * 2 + i % k / 128]);
            // Half of the spacing of e4m3: a sixteenth of the value, or of subnormals 2^-10.
            assert!((back - w).abs() <= (w.abs() / 16.0).max(scale / 1024.0) * 1.0001, "{i}: {back} for {w}");
        }
    }
}
