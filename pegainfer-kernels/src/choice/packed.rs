//! Group-quantised weights on a GPU: which of them are packed in the order of the kernels, and how.

use pegainfer_core::weights::grouped::format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};

/// Columns of a block of packed codes.
const BLOCK: usize = 128;
/// Columns of a unit of packed codes and scales.
const UNIT: usize = 256;
/// Rows of packed scales are a multiple of this: vectors of zero points, tiles of the kernels.
const ROW_UNIT: usize = 16;
/// Columns of the smallest group that is packed as such.
const GROUP: usize = 32;

/// Layout of packed codes and scales; see csrc/common/groups.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Four bits, groups of blocks of 128 columns, perhaps with zero points.
    Int4Wide,
    /// Four bits, groups of 32.
    Int4Plain,
    /// The same with zero points.
    Int4Zero,
    /// The same with minima.
    Int4Min,
    /// Q4_K.
    Int4K,
    /// Five bits, groups of 32.
    Int5Plain,
    /// The same with minima.
    Int5Min,
    /// Q5_K.
    Int5K,
    /// Q6_K.
    Int6K,
    /// Eight bits, groups of 32.
    Int8Plain,
    /// IQ4_NL.
    Iq4Plain,
    /// IQ4_XS.
    Iq4Xs,
    /// NVFP4.
    E2m1E4m3,
    /// MXFP4.
    E2m1E8m0,
    /// FP8, groups of blocks of 128 columns or whole rows.
    E4m3Wide,
}

/// The layout of a packed weight `[n, k]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    /// Its kind.
    pub packing: Packing,
    /// Dtype of its numbers.
    pub dtype: ScaleDType,
    /// Of the wide kinds: a group has `2^group_shift` blocks of 128 columns.
    pub group_shift: usize,
    /// Of the wide kinds: groups of a row.
    pub groups: usize,
    /// Bytes of records.
    pub records: usize,
    /// Bytes of what follows them.
    pub extra: usize,
}

impl Packed {
    /// The layout if a GPU packs weights `[n, k]` of this format.
    pub fn of(format: GroupFormat, n: usize, k: usize) -> Option<Self> {
        if n == 0 || k == 0 || !n.is_multiple_of(ROW_UNIT) || !k.is_multiple_of(BLOCK) {
            return None;
        }
        Self::wide(format, n, k).or_else(|| k.is_multiple_of(UNIT).then(|| Self::of_units(format, n, k)).flatten())
    }

    /// Groups of 128 columns times a power of two, or of whole rows.
    fn wide(format: GroupFormat, n: usize, k: usize) -> Option<Self> {
        let GroupScales::Plain { group, dtype, offset } = format.scales else { return None };
        let blocks = group / BLOCK;
        let fits = group.is_multiple_of(BLOCK) && (group == k || blocks.is_power_of_two()) && k.is_multiple_of(group);
        let packing = match (format.values, dtype, offset) {
            _ if !fits => return None,
            (Values::Int { bits: 4 }, ScaleDType::F16 | ScaleDType::Bf16, Offset::None | Offset::Zero) => {
                Packing::Int4Wide
            }
            (Values::E4m3, _, Offset::None) if k.is_multiple_of(UNIT) => Packing::E4m3Wide,
            _ => return None,
        };
        let groups = k / group;
        Some(Self {
            packing,
            dtype,
            group_shift: if group == k { usize::BITS as usize / 2 - 1 } else { blocks.ilog2() as usize },
            groups,
            records: groups * n * dtype.size(),
            extra: if offset == Offset::Zero { groups * n } else { 0 },
        })
    }

    /// All other formats.
    fn of_units(format: GroupFormat, n: usize, k: usize) -> Option<Self> {
        use {Packing as P, Values as V};
        let none = ScaleDType::F16;
        let (packing, dtype, record, extra) = match (format.values, format.scales) {
            (values, GroupScales::Plain { group, dtype: dtype @ (ScaleDType::F16 | ScaleDType::Bf16), offset })
                if group.is_multiple_of(GROUP) && k.is_multiple_of(group) =>
            {
                let (packing, extra) = match (values, offset) {
                    (V::Int { bits: 4 }, Offset::None) => (P::Int4Plain, 0),
                    (V::Int { bits: 4 }, Offset::Zero) => (P::Int4Zero, 8),
                    (V::Int { bits: 4 }, Offset::Min) => (P::Int4Min, 16),
                    (V::Int { bits: 5 }, Offset::None) => (P::Int5Plain, 0),
                    (V::Int { bits: 5 }, Offset::Min) => (P::Int5Min, 16),
                    (V::Int { bits: 8 }, Offset::None) => (P::Int8Plain, 0),
                    (V::Iq4, Offset::None) => (P::Iq4Plain, 0),
                    _ => return None,
                };
                (packing, dtype, 16, extra)
            }
            (V::Int { bits: 4 }, GroupScales::K4) => (P::Int4K, none, 16, 0),
            (V::Int { bits: 5 }, GroupScales::K4) => (P::Int5K, none, 16, 0),
            (V::Int { bits: 6 }, GroupScales::K6) => (P::Int6K, none, 16, 2),
            (V::Iq4, GroupScales::Xs) => (P::Iq4Xs, none, 8, 2),
            (V::E2m1, GroupScales::E4m3) => (P::E2m1E4m3, none, 16, 0),
            (V::E2m1, GroupScales::E8m0) => (P::E2m1E8m0, none, 8, 0),
            _ => return None,
        };
        let units = n * (k / UNIT);
        // NVFP4 has a number for each row.
        let extra = if packing == P::E2m1E4m3 { n * size_of::<f32>() } else { units * extra };
        Some(Self { packing, dtype, group_shift: 0, groups: 0, records: units * record, extra })
    }

    /// Byte of the scales where what follows the records begins; 0 if there is nothing.
    pub fn extra_at(self) -> u64 {
        if self.extra > 0 { self.records as u64 } else { 0 }
    }

    /// Number of [`dtype`](Self::dtype) in csrc/common/groups.cuh.
    pub fn dtype_number(self) -> usize {
        match self.dtype {
            ScaleDType::F16 => 0,
            ScaleDType::Bf16 => 1,
            ScaleDType::F32 => 2,
        }
    }

    /// Whether groups have minima, which kernels multiply by sums of x.
    pub fn has_minima(self) -> bool {
        matches!(self.packing, Packing::Int4Min | Packing::Int4K | Packing::Int5Min | Packing::Int5K)
    }

    /// Whether groups are blocks of 128 columns.
    pub fn is_wide(self) -> bool {
        matches!(self.packing, Packing::Int4Wide | Packing::E4m3Wide)
    }
}
