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
    /// Number of columns at whose multiples a row of `k` columns can be cut.
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
            GroupScales::E8m0 => vec![columns.start / 32..columns.end / 32],
        };
        Ok(Cut { format, codes, scales })
    }
}
