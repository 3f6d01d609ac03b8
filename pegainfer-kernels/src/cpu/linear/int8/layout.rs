//! What the loops need to know of a format.

use pegainfer_core::weights::grouped::format::IQ4_VALUES;
use pegainfer_core::weights::grouped::{GroupFormat, GroupScales, Offset, Values};

/// How the codes of a row become unsigned bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// 4 bits.
    Four,
    /// 4 bits, an index into the table.
    Table([u8; 16]),
    /// 4 bits and a fifth one.
    Five,
    /// 4 bits and two more.
    Six,
    /// int8, with the sign bit inverted.
    Eight,
}

/// A format for rows of `k` columns.
pub(super) struct Layout {
    pub format: GroupFormat,
    pub k: usize,
    pub codes: Codes,
    /// Unsigned code of the value 0.
    pub centre: i32,
    /// Factor of the scales: 0.5 if codes are twice the values.
    pub unit: f32,
    /// Groups of 16 columns: each half of a run has a scale.
    pub halves: bool,
    /// Groups have offsets.
    pub offset: bool,
    /// Bytes of a row.
    pub code_bytes: usize,
    /// Bytes of a row.
    pub scale_bytes: usize,
}

impl Layout {
    /// `None` if the format is not supported.
    pub fn new(format: GroupFormat, k: usize) -> Option<Self> {
        let (codes, centre, unit) = match format.values {
            Values::Int { bits: 4 } => (Codes::Four, format.centre().into(), 1.0),
            Values::Int { bits: 5 } => (Codes::Five, format.centre().into(), 1.0),
            Values::Int { bits: 6 } => (Codes::Six, format.centre().into(), 1.0),
            Values::Int { bits: 8 } => (Codes::Eight, 128, 1.0),
            Values::Iq4 => (Codes::Table(IQ4_VALUES.map(|v| v.wrapping_add(127).cast_unsigned())), 127, 1.0),
            // Twice the values of E2M1 are integers.
            Values::E2m1 => {
                let twice = [0i8, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
                (Codes::Table(twice.map(|v| (v + 12).cast_unsigned())), 12, 0.5)
            }
            Values::Int { .. } | Values::E4m3 => return None,
        };
        let halves = match format.scales {
            GroupScales::Plain { group, .. } => group == 16,
            GroupScales::K6 | GroupScales::E4m3 => true,
            GroupScales::K4 | GroupScales::Xs | GroupScales::E8m0 => false,
        };
        let offset = match format.scales {
            GroupScales::Plain { offset, .. } => offset != Offset::None,
            scales => scales == GroupScales::K4,
        };
        let (code_bytes, scale_bytes) = (format.code_bytes(k), format.scale_bytes(k));
        let layout = Self { format, k, codes, centre, unit, halves, offset, code_bytes, scale_bytes };
        (!(halves && offset)).then_some(layout)
    }

    /// Number of products of four codes with four activations that fit in int16 together.
    pub fn quads_in_int16(&self) -> usize {
        let max_code = match self.codes {
            Codes::Four => 15,
            Codes::Five => 31,
            Codes::Six => 63,
            Codes::Table(table) => table.into_iter().fold(0, u8::max),
            Codes::Eight => 255,
        };
        // Two products are added to an int16.
        i16::MAX as usize / (2 * 127 * usize::from(max_code))
    }
}
