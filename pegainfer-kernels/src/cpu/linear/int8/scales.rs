//! Decoding of the scales of a tile.

use super::layout::Layout;
use super::panel::{COLUMNS, Line, Panel, ROWS, RUN, RUNS};
use super::vector::Tile;
use pegainfer_core::small_floats::e8m0;
use pegainfer_core::weights::grouped::{GroupScales, Offset, ScaleDType};
use std::ops::Range;

/// Scales of a tile.
pub(super) struct Scales<'a> {
    layout: &'a Layout,
    /// Sixteen rows of scales.
    bytes: &'a [u8],
    /// Groups of 16 with plain scales: `[rows, k / group]` scales, then as many offsets.
    decoded: Vec<f32>,
}

impl<'a> Scales<'a> {
    pub fn new(layout: &'a Layout) -> Self {
        let numbers = match layout.format.scales {
            GroupScales::Plain { group: 16, .. } => 2 * ROWS * layout.k / 16,
            _ => 0,
        };
        Self { layout, bytes: &[], decoded: vec![0.0; numbers] }
    }

    /// Continues with a tile.
    pub fn set_tile(&mut self, bytes: &'a [u8]) {
        assert_eq!(bytes.len(), ROWS * self.layout.scale_bytes);
        self.bytes = bytes;
        if self.decoded.is_empty() {
            return;
        }
        let Layout { format, k, unit, .. } = *self.layout;
        let groups = k / format.group();
        let (s, o) = self.decoded.split_at_mut(ROWS * groups);
        let rows = s.chunks_exact_mut(groups).zip(o.chunks_exact_mut(groups));
        for (bytes, (s, o)) in bytes.chunks_exact(self.layout.scale_bytes).zip(rows) {
            format.scales(bytes, k, s, o);
            s.iter_mut().for_each(|s| *s *= unit);
        }
    }

    /// Decodes the scales of panel `index` of the tile, which has `runs` runs.
    #[inline(always)]
    pub fn decode<T: Tile>(&self, t: T, index: usize, runs: usize, panel: &mut Panel) {
        self.prefetch(t, index);
        match self.layout.format.scales {
            GroupScales::K4 => self.k4(t, index, panel),
            GroupScales::K6 => self.k6(t, index, panel),
            GroupScales::Plain { group, dtype, offset } if self.decoded.is_empty() => {
                self.plain(t, (group, dtype, offset), index * RUNS..index * RUNS + runs, panel);
            }
            GroupScales::Plain { .. } => self.copy(index * RUNS, runs, panel),
            GroupScales::Xs => self.xs(t, index, panel),
            GroupScales::E4m3 => self.e4m3(t, index, runs, panel),
            GroupScales::E8m0 => self.e8m0(index * RUNS, runs, panel),
        }
    }

    /// Prefetches a part of the scales of the tile that is next in this place.
    #[inline(always)]
    fn prefetch<T: Tile>(&self, t: T, index: usize) {
        let (bytes, panels) = (self.bytes.len(), self.layout.k.div_ceil(COLUMNS));
        for at in (bytes * index / panels..bytes * (index + 1) / panels).step_by(64) {
            t.prefetch(self.bytes.as_ptr().wrapping_add(bytes * T::TILES + at));
        }
    }

    /// Q4_K and Q5_K: a lane has the 16 bytes of a row in four vectors.
    #[inline(always)]
    fn k4<T: Tile>(&self, t: T, index: usize, panel: &mut Panel) {
        let bytes = &self.bytes[index * 16..];
        assert!(bytes.len() >= (ROWS - 1) * self.layout.scale_bytes + 16);
        // SAFETY: each row has 16 bytes of the panel, as asserted for the last one.
        let [halves, a, b, c] = unsafe { t.columns(bytes.as_ptr(), self.layout.scale_bytes) };
        let (d, dmin) = (t.f16_to_f32(halves), t.f16_to_f32(t.shr::<16>(halves)));
        let six = t.splat(0x3f3f_3f3f);
        let scales = [t.and(a, six), upper_groups(t, c, a)];
        let mins = [t.and(b, six), upper_groups(t, t.shr::<4>(c), b)];
        for half in 0..2 {
            let (s, m) = (bytes_to_f32(t, scales[half]), bytes_to_f32(t, mins[half]));
            for j in 0..4 {
                t.store_f32(t.mul(d, s[j]), &mut panel.s[4 * half + j][0].0);
                t.store_f32(t.mul(dmin, m[j]), &mut panel.o[4 * half + j].0);
            }
        }
    }

    /// Q6_K: sixteen int8 and an f16 per row.
    #[inline(always)]
    fn k6<T: Tile>(&self, t: T, index: usize, panel: &mut Panel) {
        let stride = self.layout.scale_bytes;
        let bytes = &self.bytes[index * 18..];
        assert!(bytes.len() >= (ROWS - 1) * stride + 18);
        // SAFETY: each row has 18 bytes of the panel, as asserted for the last one.
        let signed = unsafe { t.columns(bytes.as_ptr(), stride) };
        let d = t.f16_to_f32(t.load(&halves(&bytes[16..], stride)));
        for (i, v) in signed.into_iter().enumerate() {
            let values = bytes_to_f32(t, t.xor(v, t.splat(0x8080_8080)));
            for (j, value) in values.into_iter().enumerate() {
                let s = t.mul(d, t.sub(value, t.splat_f32(128.0)));
                t.store_f32(s, &mut panel.s[2 * i + j / 2][j % 2].0);
            }
        }
    }

    /// IQ4_XS: an f16, eight times two upper bits and eight times four lower bits per row.
    #[inline(always)]
    fn xs<T: Tile>(&self, t: T, index: usize, panel: &mut Panel) {
        let (bytes, stride) = (&self.bytes[index * 8..], self.layout.scale_bytes);
        let head = t.load(&in_each_row(bytes, stride).map(u32::from_le_bytes));
        let mut low = t.load(&in_each_row(&bytes[4..], stride).map(u32::from_le_bytes));
        let (d, mut high) = (t.f16_to_f32(head), t.shr::<16>(head));
        for s in &mut panel.s {
            let code = t.or(t.and(low, t.splat(0x0f)), t.and(t.shl::<4>(high), t.splat(0x30)));
            t.store_f32(t.mul(d, t.sub(t.to_f32(code), t.splat_f32(32.0))), &mut s[0].0);
            (low, high) = (t.shr::<4>(low), t.shr::<2>(high));
        }
    }

    /// NVFP4: an f32 per row, then an e4m3 for each group of 16.
    #[inline(always)]
    fn e4m3<T: Tile>(&self, t: T, index: usize, runs: usize, panel: &mut Panel) {
        let (bytes, stride) = (&self.bytes[4 + index * 16..], self.layout.scale_bytes);
        let of_row = t.bits_to_f32(t.load(&in_each_row(self.bytes, stride).map(u32::from_le_bytes)));
        // The codes of two runs in each vector.
        let mut codes = [t.splat(0); 4];
        if runs == RUNS {
            assert!(bytes.len() >= (ROWS - 1) * stride + 16);
            // SAFETY: each row has 16 bytes of the panel, as asserted for the last one.
            codes = unsafe { t.columns(bytes.as_ptr(), stride) };
        }
        for (run, s) in panel.s[..runs].iter_mut().enumerate() {
            let two = match (runs, run % 2) {
                (RUNS, 0) => codes[run / 2],
                (RUNS, _) => t.shr::<16>(codes[run / 2]),
                _ => t.load(&halves(&bytes[2 * run..], stride)),
            };
            for (code, s) in [two, t.shr::<8>(two)].into_iter().zip(s) {
                let number = t.mul(e4m3_to_f32(t, code), of_row);
                t.store_f32(t.mul(number, t.splat_f32(self.layout.unit)), &mut s.0);
            }
        }
    }

    /// MXFP4: an exponent for each group of 32.
    #[inline(always)]
    fn e8m0(&self, first: usize, runs: usize, panel: &mut Panel) {
        for (run, s) in panel.s[..runs].iter_mut().enumerate() {
            let of_rows = in_each_row(&self.bytes[first + run..], self.layout.scale_bytes);
            s[0] = Line(of_rows.map(|[exponent]| e8m0(exponent) * self.layout.unit));
        }
    }

    /// Numbers per group of a multiple of 32 columns.
    #[inline(always)]
    fn plain<T: Tile>(
        &self,
        t: T,
        (group, dtype, offset): (usize, ScaleDType, Offset),
        runs: Range<usize>,
        panel: &mut Panel,
    ) {
        let (first, stride) = (runs.start, self.layout.scale_bytes);
        let second = self.layout.k / group * dtype.size();
        if group == RUN && dtype != ScaleDType::F32 && runs.len() == RUNS && offset != Offset::Zero {
            let at = first * dtype.size();
            let (s, o) =
                (self.eight(t, dtype, at), self.eight(t, dtype, if offset == Offset::Min { second } else { 0 } + at));
            for run in 0..RUNS {
                t.store_f32(s[run], &mut panel.s[run][0].0);
                t.store_f32(t.mul(o[run], t.splat_f32(-1.0)), &mut panel.o[run].0);
            }
            return;
        }
        let mut of_group = usize::MAX;
        let (mut s, mut o) = (t.splat_f32(0.0), t.splat_f32(0.0));
        for run in runs {
            if of_group != run * RUN / group {
                of_group = run * RUN / group;
                s = self.number(t, dtype, &self.bytes[of_group * dtype.size()..]);
                o = match offset {
                    Offset::None => o,
                    Offset::Zero => {
                        let zeros: [[u8; 1]; ROWS] = in_each_row(&self.bytes[second + of_group..], stride);
                        t.mul(s, t.to_f32(t.load(&zeros.map(|[zero]| zero.into()))))
                    }
                    Offset::Min => {
                        let min = self.number(t, dtype, &self.bytes[second + of_group * dtype.size()..]);
                        t.mul(min, t.splat_f32(-1.0))
                    }
                };
            }
            t.store_f32(s, &mut panel.s[run - first][0].0);
            t.store_f32(o, &mut panel.o[run - first].0);
        }
    }

    /// Eight numbers of 2 bytes from byte `at` of each row on: those of a panel in groups of 32.
    #[inline(always)]
    fn eight<T: Tile>(&self, t: T, dtype: ScaleDType, at: usize) -> [T::F; RUNS] {
        let (bytes, stride) = (&self.bytes[at..], self.layout.scale_bytes);
        assert!(bytes.len() >= (ROWS - 1) * stride + 16);
        // SAFETY: each row has 16 bytes, as asserted for the last one.
        let pairs = unsafe { t.columns(bytes.as_ptr(), stride) };
        let mut all = [t.splat_f32(0.0); RUNS];
        for (i, numbers) in all.iter_mut().enumerate() {
            let pair = pairs[i / 2];
            *numbers = match (dtype, i % 2) {
                (ScaleDType::F16, 0) => t.f16_to_f32(pair),
                (ScaleDType::F16, _) => t.f16_to_f32(t.shr::<16>(pair)),
                (_, 0) => t.bits_to_f32(t.shl::<16>(pair)),
                _ => t.bits_to_f32(t.and(pair, t.splat(0xffff_0000))),
            };
        }
        all
    }

    /// The number at the beginning of `bytes`, and in the same place of the other rows.
    #[inline(always)]
    fn number<T: Tile>(&self, t: T, dtype: ScaleDType, bytes: &[u8]) -> T::F {
        let stride = self.layout.scale_bytes;
        match dtype {
            ScaleDType::F16 => t.f16_to_f32(t.load(&halves(bytes, stride))),
            ScaleDType::Bf16 => t.bits_to_f32(t.shl::<16>(t.load(&halves(bytes, stride)))),
            ScaleDType::F32 => t.bits_to_f32(t.load(&in_each_row(bytes, stride).map(u32::from_le_bytes))),
        }
    }

    /// Copies decoded numbers into a panel.
    fn copy(&self, first: usize, runs: usize, panel: &mut Panel) {
        let group = self.layout.format.group();
        let groups = self.layout.k / group;
        let (s, o) = self.decoded.split_at(ROWS * groups);
        let of_rows =
            |numbers: &[f32], column: usize| Line(std::array::from_fn(|row| numbers[row * groups + column / group]));
        for run in 0..runs {
            let column = (first + run) * RUN;
            panel.s[run] = [of_rows(s, column), of_rows(s, column + RUN / 2)];
            panel.o[run] = of_rows(o, column);
        }
    }
}

/// The e4m3 number, not NaN, in the lowest byte of each lane.
#[inline(always)]
fn e4m3_to_f32<T: Tile>(t: T, v: T::I) -> T::F {
    // As the upper bits of an f32, the byte is smaller by the difference of the biases.
    let bits = t.or(t.shl::<20>(t.and(v, t.splat(0x7f))), t.shl::<24>(t.and(v, t.splat(0x80))));
    t.mul(t.bits_to_f32(bits), t.splat_f32(f32::from_bits((120 + 127) << 23)))
}

/// The 6-bit numbers of groups 4 to 7 of Q4_K: four bits of `low`, and the upper two bits of `high`.
#[inline(always)]
fn upper_groups<T: Tile>(t: T, low: T::I, high: T::I) -> T::I {
    t.or(t.and(low, t.splat(0x0f0f_0f0f)), t.and(t.shr::<2>(high), t.splat(0x3030_3030)))
}

/// The four bytes of each lane.
#[inline(always)]
fn bytes_to_f32<T: Tile>(t: T, v: T::I) -> [T::F; 4] {
    let byte = t.splat(255);
    let bytes = [t.and(v, byte), t.and(t.shr::<8>(v), byte), t.and(t.shr::<16>(v), byte), t.shr::<24>(v)];
    [t.to_f32(bytes[0]), t.to_f32(bytes[1]), t.to_f32(bytes[2]), t.to_f32(bytes[3])]
}

/// Two bytes at the beginning of `bytes`, and in the same place of the other rows.
#[inline(always)]
fn halves(bytes: &[u8], stride: usize) -> [u32; ROWS] {
    in_each_row(bytes, stride).map(|half| u16::from_le_bytes(half).into())
}

/// The bytes at the beginning of `bytes`, and in the same place of the other rows.
#[inline(always)]
fn in_each_row<const N: usize>(bytes: &[u8], stride: usize) -> [[u8; N]; ROWS] {
    assert!(bytes.len() >= (ROWS - 1) * stride + N);
    // SAFETY: each row has the bytes, as asserted for the last one; bytes have no alignment.
    std::array::from_fn(|row| unsafe { bytes.as_ptr().add(row * stride).cast::<[u8; N]>().read() })
}
