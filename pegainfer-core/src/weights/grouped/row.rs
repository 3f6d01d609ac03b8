//! Decoding of one row of a group-quantised matrix.

use super::format::{GroupFormat, GroupScales, IQ4_VALUES, Offset, RUN, SUPER_BLOCK, ScaleDType, Values};
use crate::small_floats::{e2m1, e4m3, e8m0};
use half::{bf16, f16};

impl ScaleDType {
    /// The little-endian bytes of a number, rounded to nearest even.
    pub fn bytes(self, value: f32) -> Vec<u8> {
        match self {
            Self::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Self::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Self::F32 => value.to_le_bytes().to_vec(),
        }
    }

    /// Number `i` of little-endian numbers.
    pub fn get(self, bytes: &[u8], i: usize) -> f32 {
        match self {
            Self::F16 => half(bytes, 2 * i),
            Self::Bf16 => bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
            Self::F32 => single(bytes, 4 * i),
        }
    }
}

impl GroupFormat {
    /// Decodes a row of `k` columns: `v` of each column to `values` (`[k]`), `s` and `o` of each group to `s` and `o`
    /// (`[k / group]`).
    pub fn row(self, codes: &[u8], scales: &[u8], k: usize, values: &mut [f32], s: &mut [f32], o: &mut [f32]) {
        self.values(codes, k, values);
        self.scales(scales, k, s, o);
    }

    /// The weights of a row of `k` columns: `s·v - o`, rounded once if `s·v` is exact.
    pub fn dequantize_row(self, codes: &[u8], scales: &[u8], k: usize, out: &mut [f32]) {
        let group = self.group();
        let (mut s, mut o) = (vec![0.0; k / group], vec![0.0; k / group]);
        self.row(codes, scales, k, out, &mut s, &mut o);
        for ((values, s), o) in out[..k].chunks_exact_mut(group).zip(s).zip(o) {
            values.iter_mut().for_each(|v| *v = s * *v - o);
        }
    }

    /// Decodes the codes of a row.
    fn values(self, codes: &[u8], k: usize, values: &mut [f32]) {
        let values = &mut values[..k];
        match self.values {
            Values::E4m3 => values.iter_mut().zip(codes).for_each(|(v, code)| *v = e4m3(*code)),
            Values::Int { bits: 8 } => values.iter_mut().zip(codes).for_each(|(v, code)| *v = f32::from(*code as i8)),
            Values::Int { .. } => {
                let centre = f32::from(self.centre());
                self.each_code(codes, k, values, |code| f32::from(code) - centre);
            }
            Values::Iq4 => self.each_code(codes, k, values, |code| f32::from(IQ4_VALUES[usize::from(code)])),
            Values::E2m1 => self.each_code(codes, k, values, e2m1),
        }
    }

    /// Decodes codes below 8 bits.
    fn each_code(self, codes: &[u8], k: usize, values: &mut [f32], value: impl Fn(u8) -> f32) {
        let (low, high) = codes.split_at(k / 2);
        for (run, (values, low)) in values.chunks_exact_mut(RUN).zip(low.chunks_exact(RUN / 2)).enumerate() {
            let mut codes: [u8; RUN] = std::array::from_fn(|j| low[j % 16] >> (j / 16 * 4) & 15);
            let codes_and_places = codes.iter_mut().enumerate();
            match self.bits() {
                5 => codes_and_places.for_each(|(j, code)| *code |= (high[run * 4 + j / 8] >> (j % 8) & 1) << 4),
                6 => codes_and_places.for_each(|(j, code)| *code |= (high[run * 8 + j % 8] >> (j / 8 * 2) & 3) << 4),
                _ => {}
            }
            values.iter_mut().zip(codes).for_each(|(v, code)| *v = value(code));
        }
    }

    /// Decodes the scales of a row of `k` columns: `s` and `o` of each group (`[k / group]`).
    pub fn scales(self, bytes: &[u8], k: usize, s: &mut [f32], o: &mut [f32]) {
        let groups = k / self.group();
        let (s, o) = (&mut s[..groups], &mut o[..groups]);
        o.fill(0.0);
        match self.scales {
            GroupScales::Plain { dtype, offset, .. } => {
                let (scales, offsets) = bytes.split_at(groups * dtype.size());
                for (i, (s, o)) in s.iter_mut().zip(o).enumerate() {
                    *s = dtype.get(scales, i);
                    *o = match offset {
                        Offset::None => 0.0,
                        Offset::Zero => *s * f32::from(offsets[i]),
                        Offset::Min => -dtype.get(offsets, i),
                    };
                }
            }
            GroupScales::K4 => {
                let of_blocks = s.chunks_exact_mut(SUPER_BLOCK / 32).zip(o.chunks_exact_mut(SUPER_BLOCK / 32));
                for (block, (s, o)) in bytes.chunks_exact(16).zip(of_blocks) {
                    let (d, dmin) = (half(block, 0), half(block, 2));
                    for (j, (s, o)) in s.iter_mut().zip(o).enumerate() {
                        let (sc, mn) = k4(&block[4..], j);
                        (*s, *o) = (d * f32::from(sc), dmin * f32::from(mn));
                    }
                }
            }
            GroupScales::K6 => {
                for (block, s) in bytes.chunks_exact(18).zip(s.chunks_exact_mut(SUPER_BLOCK / 16)) {
                    let d = half(block, 16);
                    s.iter_mut().zip(block).for_each(|(s, sc)| *s = d * f32::from(*sc as i8));
                }
            }
            GroupScales::Xs => {
                for (block, s) in bytes.chunks_exact(8).zip(s.chunks_exact_mut(SUPER_BLOCK / 32)) {
                    let (d, upper) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
                    for (j, s) in s.iter_mut().enumerate() {
                        let low = block[4 + j / 2] >> (j % 2 * 4) & 15;
                        let scale = low | ((upper >> (2 * j) & 3) as u8) << 4;
                        *s = d * (f32::from(scale) - 32.0);
                    }
                }
            }
            GroupScales::E4m3 => {
                let global = single(bytes, 0);
                s.iter_mut().zip(&bytes[4..]).for_each(|(s, code)| *s = global * e4m3(*code));
            }
            GroupScales::E8m0 => s.iter_mut().zip(bytes).for_each(|(s, code)| *s = e8m0(*code)),
        }
    }
}

/// Scale and minimum, 6 bits each, of group `j` of the 12 bytes of a Q4_K or Q5_K super-block.
fn k4(bytes: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (bytes[j] & 63, bytes[j + 4] & 63)
    } else {
        let low = bytes[j + 4];
        (low & 15 | bytes[j - 4] >> 6 << 4, low >> 4 | bytes[j] >> 6 << 4)
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn single(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
