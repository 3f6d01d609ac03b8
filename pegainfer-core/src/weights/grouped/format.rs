//! Group-quantised weights in memory: each row is codes of 4 to 8 bits, with a scale for each group of columns.
//!
//! A matrix `[n, k]`, `k` a multiple of 32, is two byte planes, row-major: codes `[n, code_bytes(k)]` and scales
//! `[n, scale_bytes(k)]`. Rows do not depend on each other, so rows of equal formats can be cut and stacked. A weight is
//! `w = s·v - o`: `v` is a small number that the code stands for, `s` and `o` belong to the group of the row. With
//! scales of 16 bits, `s·v` and `o` are exact in f32, so `w` is rounded once.
//!
//! # Codes of a row
//! - Formats below 8 bits: first the lower 4 bits, `k / 2` bytes. Each 32 columns are 16 bytes: byte `j` holds column
//!   `j` in its low nibble and column `j + 16` in its high nibble. This is the order of GGUF's Q4_0.
//! - 5 bits: then `k / 8` bytes. Each 32 columns are a little-endian u32: bit `j` is bit 4 of column `j`.
//! - 6 bits: then `k / 4` bytes. Each 32 columns are 8 bytes: byte `l` holds bits 4 and 5 of columns `l`, `l + 8`,
//!   `l + 16`, `l + 24`, two bits each, from the low bits up.
//! - 8 bits: one byte per column, `k` bytes.
//!
//! # Values
//! | [`Values`] | scales | `v` |
//! |---|---|---|
//! | `Int { bits: 4, 5, 6 }` | with `Zero` or `Min`, or [`GroupScales::K4`] | the code, 0 to 2^bits - 1 |
//! | `Int { bits: 4, 5, 6 }` | `Offset::None`, or [`GroupScales::K6`] | the code less 2^(bits - 1) |
//! | `Int { bits: 8 }` | any | the code as i8 (two's complement) |
//! | `Iq4` | any | [`IQ4_VALUES`] at the code |
//! | `E2m1` | any | E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, bit 3 the sign |
//! | `E4m3` | any | FP8 e4m3, no code NaN |
//!
//! # Scales of a row
//! | [`GroupScales`] | bytes of a row | `s` | `o` |
//! |---|---|---|---|
//! | `Plain`, `Offset::None` | `k / group` numbers | the number | 0 |
//! | `Plain`, `Offset::Zero` | `k / group` numbers, then as many u8 `z` | the number | `s·z` |
//! | `Plain`, `Offset::Min` | `k / group` numbers, then as many `m` of the same dtype | the number | `-m` |
//! | `K4` | 16 per 256 columns: f16 `d`, f16 `dmin`, 12 bytes of 6-bit `sc`, `mn` as in Q4_K | `d·sc` | `dmin·mn` |
//! | `K6` | 18 per 256 columns: 16 i8 `sc`, f16 `d` | `d·sc` | 0 |
//! | `Xs` | 8 per 256 columns: f16 `d`, u16 `scales_h`, 4 bytes `scales_l` as in IQ4_XS | `d·(ls - 32)` | 0 |
//! | `E4m3` | f32 `global`, then `k / 16` e4m3 | `global·e4m3`, rounded to f32 | 0 |
//! | `E8m0` | `k / 32` u8 `e` | `2^(e - 127)` | 0 |
//!
//! All numbers are little-endian.

/// Columns whose codes are stored together.
pub const RUN: usize = 32;
/// Columns of a super-block of GGUF's K and IQ4_XS types.
pub const SUPER_BLOCK: usize = 256;
/// Values of the codes of IQ4_NL and IQ4_XS.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Format of a group-quantised matrix; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupFormat {
    /// Meaning of the codes.
    pub values: Values,
    /// Layout of the scales.
    pub scales: GroupScales,
}

/// Meaning of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Values {
    /// An integer of 4, 5, 6 or 8 bits.
    Int {
        /// Number of bits.
        bits: u8,
    },
    /// An index into [`IQ4_VALUES`], 4 bits.
    Iq4,
    /// FP4 E2M1, 4 bits.
    E2m1,
    /// FP8 e4m3, 8 bits.
    E4m3,
}

/// Layout of the scales of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupScales {
    /// A scale, and perhaps an offset, for each group of columns.
    Plain {
        /// Columns of a group; `k` for a scale per row.
        group: usize,
        /// Dtype of scales and minima.
        dtype: ScaleDType,
        /// Number that is subtracted.
        offset: Offset,
    },
    /// Q4_K and Q5_K: groups of 32 in super-blocks of 256.
    K4,
    /// Q6_K: groups of 16 in super-blocks of 256.
    K6,
    /// IQ4_XS: groups of 32 in super-blocks of 256.
    Xs,
    /// NVFP4: an e4m3 scale for each 16 columns, times an f32 of the row.
    E4m3,
    /// MXFP4: a power of two for each 32 columns.
    E8m0,
}

/// Dtype of [`GroupScales::Plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleDType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl ScaleDType {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// Offset of the groups of [`GroupScales::Plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Offset {
    /// Symmetric: codes are centred.
    None,
    /// A zero point `z`, u8, for each group: `w = s·(q - z)`.
    Zero,
    /// A minimum `m` for each group: `w = s·q + m`.
    Min,
}

impl GroupFormat {
    /// Integers with a scale, and perhaps an offset, for each `group` columns.
    pub const fn int(bits: u8, group: usize, dtype: ScaleDType, offset: Offset) -> Self {
        Self { values: Values::Int { bits }, scales: GroupScales::Plain { group, dtype, offset } }
    }

    /// FP8 e4m3 with a scale for each row of `k` columns.
    pub const fn fp8(k: usize, dtype: ScaleDType) -> Self {
        Self { values: Values::E4m3, scales: GroupScales::Plain { group: k, dtype, offset: Offset::None } }
    }

    /// NVFP4: E2M1 with an e4m3 scale for each 16 columns and an f32 scale for each row.
    pub const NVFP4: Self = Self { values: Values::E2m1, scales: GroupScales::E4m3 };

    /// MXFP4: E2M1 with a power of two for each 32 columns.
    pub const MXFP4: Self = Self { values: Values::E2m1, scales: GroupScales::E8m0 };

    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self.values {
            Values::Int { bits } => bits.into(),
            Values::Iq4 | Values::E2m1 => 4,
            Values::E4m3 => 8,
        }
    }

    /// Value of the code that stands for 0, if every group has the same and codes are not signed by themselves.
    pub fn centre(self) -> u8 {
        let centred = match self.scales {
            GroupScales::Plain { offset, .. } => offset == Offset::None,
            scales => scales == GroupScales::K6,
        };
        match self.values {
            Values::Int { bits: bits @ 4..=6 } if centred => 1 << (bits - 1),
            _ => 0,
        }
    }

    /// Columns that share a scale.
    pub fn group(self) -> usize {
        match self.scales {
            GroupScales::Plain { group, .. } => group,
            GroupScales::K4 | GroupScales::Xs | GroupScales::E8m0 => 32,
            GroupScales::K6 | GroupScales::E4m3 => 16,
        }
    }

    /// Bytes of the codes of a row of `k` columns.
    pub fn code_bytes(self, k: usize) -> usize {
        k * self.bits() / 8
    }

    /// Bytes of the scales of a row of `k` columns.
    pub fn scale_bytes(self, k: usize) -> usize {
        match self.scales {
            GroupScales::Plain { group, dtype, offset } => {
                let offset = match offset {
                    Offset::None => 0,
                    Offset::Zero => 1,
                    Offset::Min => dtype.size(),
                };
                k / group * (dtype.size() + offset)
            }
            GroupScales::K4 => k / SUPER_BLOCK * 16,
            GroupScales::K6 => k / SUPER_BLOCK * 18,
            GroupScales::Xs => k / SUPER_BLOCK * 8,
            GroupScales::E4m3 => 4 + k / 16,
            GroupScales::E8m0 => k / 32,
        }
    }

    /// Bits of codes and scales per weight, for rows of `k` columns.
    pub fn bits_per_weight(self, k: usize) -> f64 {
        (8 * (self.code_bytes(k) + self.scale_bytes(k))) as f64 / k as f64
    }
}
