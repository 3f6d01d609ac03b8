//! Cutting of group-quantised rows into ranges of columns, for ranks that share a matrix by columns.

use super::format::{GroupFormat, GroupScales, Offset, RUN, SUPER_BLOCK, Values};
use std::fmt;
use std::ops::Range;

/// Columns that a format cannot hold, in words that follow the matrix's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupError(pub String);

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Some columns of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Format of the columns.
    pub format: GroupFormat,
    /// Byte ranges of a row of codes.
    pub codes: Vec<Range<usize>>,
    /// Byte ranges of a row of scales.
    pub scales: Vec<Range<usize>>,
}

impl GroupFormat {
    /// A row of `k` columns can be cut at multiples of this number of columns.
    pub fn cut_columns(self, k: usize) -> usize {
        match self.scales {
            GroupScales::Plain { group, .. } if group < k => RUN.max(group),
            GroupScales::K4 | GroupScales::K6 | GroupScales::Xs => SUPER_BLOCK,
            _ => RUN,
        }
    }

    /// Checks that rows of `k` columns can have this format.
    pub fn check(self, k: usize) -> Result<(), GroupError> {
        let unit = self.cut_columns(k);
        let fits = match self.scales {
            GroupScales::Plain { group, .. } => {
                (group == k || group == 16 || group > 0 && group.is_multiple_of(RUN)) && k.is_multiple_of(unit)
            }
            _ => k.is_multiple_of(unit),
        };
        let known = matches!(self.values, Values::Int { bits: 4..=6 | 8 } | Values::Iq4 | Values::E2m1 | Values::E4m3);
        match (fits && k > 0, known) {
            (true, true) => Ok(()),
            (true, false) => Err(GroupError(format!("has codes of {} bits", self.bits()))),
            (false, _) => Err(GroupError(format!("has {k} columns, which is not a multiple of {unit} ({self})"))),
        }
    }

    /// The format of some columns of a matrix with `k` columns, and which bytes of the codes and of the scales of a row
    /// belong to them, in order.
    pub fn cut(self, k: usize, columns: Range<usize>) -> Result<Cut, GroupError> {
        self.check(k)?;
        let unit = self.cut_columns(k);
        if columns.start >= columns.end || columns.end > k || !(columns.start | columns.end).is_multiple_of(unit) {
            let Range { start, end } = columns;
            return Err(GroupError(format!(
                "has {k} columns in groups that can only be divided at multiples of {unit} ({self}), not at {start} to \
                 {end}; use fewer ranks"
            )));
        }
        // A part of the row that begins at `first` and has `bits` per column.
        let part = |first: usize, bits: usize| first + columns.start * bits / 8..first + columns.end * bits / 8;
        let codes = match self.bits() {
            8 => vec![part(0, 8)],
            4 => vec![part(0, 4)],
            bits => vec![part(0, 4), part(k / 2, bits - 4)],
        };
        let per_group = |group: usize| columns.start / group..columns.end / group;
        let per_block = |bytes: usize| columns.start / SUPER_BLOCK * bytes..columns.end / SUPER_BLOCK * bytes;
        let mut format = self;
        let scales = match self.scales {
            GroupScales::Plain { group, dtype, offset } if group == k => {
                format.scales = GroupScales::Plain { group: columns.len(), dtype, offset };
                std::iter::once(0..self.scale_bytes(k)).collect()
            }
            GroupScales::Plain { group, dtype, offset } => {
                let numbers = |first: usize, size: usize| {
                    first + columns.start / group * size..first + columns.end / group * size
                };
                let second = k / group * dtype.size();
                match offset {
                    Offset::None => vec![numbers(0, dtype.size())],
                    Offset::Zero => vec![numbers(0, dtype.size()), numbers(second, 1)],
                    Offset::Min => vec![numbers(0, dtype.size()), numbers(second, dtype.size())],
                }
            }
            GroupScales::K4 => vec![per_block(16)],
            GroupScales::K6 => vec![per_block(18)],
            GroupScales::Xs => vec![per_block(8)],
            GroupScales::E4m3 => vec![0..4, 4 + columns.start / 16..4 + columns.end / 16],
            GroupScales::E8m0 => vec![per_group(32)],
        };
        Ok(Cut { format, codes, scales })
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::ScaleDType;
    use super::super::pack::pack_codes;
    use super::*;
    use crate::rng;

    /// Every layout of codes and of scales.
    fn formats() -> Vec<GroupFormat> {
        let mut formats = vec![GroupFormat::NVFP4, GroupFormat::MXFP4];
        for offset in [Offset::None, Offset::Zero, Offset::Min] {
            for dtype in [ScaleDType::F16, ScaleDType::Bf16, ScaleDType::F32] {
                formats.extend([32, 128, 768].map(|group| GroupFormat::int(4, group, dtype, offset)));
            }
            formats.extend([5, 6, 8].map(|bits| GroupFormat::int(bits, 64, ScaleDType::F16, offset)));
        }
        for (bits, scales) in [(4, GroupScales::K4), (5, GroupScales::K4), (6, GroupScales::K6)] {
            formats.push(GroupFormat { values: Values::Int { bits }, scales });
        }
        formats.push(GroupFormat { values: Values::Iq4, scales: GroupScales::Xs });
        formats.push(GroupFormat::fp8(768, ScaleDType::Bf16));
        formats
    }

    /// Random bytes without the upper bits that make numbers NaN.
    fn bytes(seed: u64, count: usize) -> Vec<u8> {
        (0..count).map(|i| rng::bits(seed, i as u64) as u8 & 0x3f).collect()
    }

    fn dequantized(format: GroupFormat, codes: &[u8], scales: &[u8], k: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; k];
        format.dequantize_row(codes, scales, k, &mut out);
        out
    }

    #[test]
    fn parts_of_a_row_have_the_values_of_the_row() {
        let k = 768;
        for (i, format) in formats().into_iter().enumerate() {
            format.check(k).unwrap();
            let codes = bytes(2 * i as u64, format.code_bytes(k));
            let scales = bytes(2 * i as u64 + 1, format.scale_bytes(k));
            let whole = dequantized(format, &codes, &scales, k);
            assert!(whole.iter().any(|w| *w != 0.0) && whole.iter().all(|w| w.is_finite()), "{format}");
            let unit = format.cut_columns(k);
            for columns in [0..k, 0..unit, unit..k, k - unit..k].into_iter().filter(|part| !part.is_empty()) {
                let cut = format.cut(k, columns.clone()).unwrap();
                let part = |from: &[u8], ranges: &[Range<usize>]| -> Vec<u8> {
                    ranges.iter().flat_map(|range| &from[range.clone()]).copied().collect()
                };
                let (codes, scales) = (part(&codes, &cut.codes), part(&scales, &cut.scales));
                let width = columns.len();
                assert_eq!(codes.len(), cut.format.code_bytes(width), "{format} {columns:?}");
                assert_eq!(scales.len(), cut.format.scale_bytes(width), "{format} {columns:?}");
                let values = dequantized(cut.format, &codes, &scales, width);
                assert_eq!(values, whole[columns.clone()], "{format} {columns:?}");
            }
            for columns in [0..k + unit, unit..unit, 0..unit / 2, unit / 2..k] {
                let error = format.cut(k, columns).unwrap_err().to_string();
                assert!(error.contains(&format!("multiples of {unit} ({format})")), "{error}");
            }
        }
    }

    #[test]
    fn packed_codes_have_their_values() {
        let k = 96;
        for bits in [4u8, 5, 6, 8] {
            let format = GroupFormat::int(bits, k, ScaleDType::F32, Offset::None);
            let codes: Vec<u8> = (0..k).map(|i| (rng::bits(7, i as u64) as u16 % (1 << bits)) as u8).collect();
            let mut packed = vec![0; format.code_bytes(k)];
            pack_codes(format, &codes, &mut packed);
            let values = dequantized(format, &packed, &1f32.to_le_bytes(), k);
            let expected = codes.iter().map(|code| match bits {
                8 => f32::from(*code as i8),
                _ => f32::from(*code) - (1 << (bits - 1)) as f32,
            });
            assert!(values.iter().copied().eq(expected), "{bits} bits");
        }
    }

    #[test]
    fn impossible_columns_and_codes_are_refused() {
        let int = |bits, group| GroupFormat::int(bits, group, ScaleDType::F16, Offset::None);
        for (format, k, message) in [
            (int(4, 128), 192, "not a multiple of 128"),
            (int(4, 32), 48, "not a multiple of 32"),
            (int(4, 48), 96, "not a multiple of 48"),
            (int(4, 0), 96, "not a multiple of 32"),
            (int(3, 32), 96, "codes of 3 bits"),
            (GroupFormat { values: Values::Int { bits: 4 }, scales: GroupScales::K4 }, 320, "not a multiple of 256"),
            (GroupFormat::MXFP4, 0, "not a multiple of 32"),
        ] {
            assert!(format.check(k).unwrap_err().0.contains(message), "{format} {k}");
        }
    }
}
