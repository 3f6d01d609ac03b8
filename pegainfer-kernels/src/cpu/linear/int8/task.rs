//! The loops of one task: some rows of w against some rows of x.

use super::codes::Source;
use super::layout::Layout;
use super::panel::{COLUMNS, Line, Panel, QUADS, ROWS, RUN, RUNS};
use super::rounding::{BIAS, Run, SCALE, SUM};
use super::scales::Scales;
use super::vector::{Kernel, Tile, vectors};
use crate::cpu::lanes::chunk_mut;
use crate::cpu::linear::grid::RowGroups;
use crate::cpu::linear::output::Sink;
use std::hint::black_box;
use std::ops::Range;

/// One task. x rows stay in L2, codes of w are read once.
pub(super) struct Task<'a> {
    pub layout: &'a Layout,
    /// `[n, code_bytes]`, at least sixteen rows.
    pub codes: &'a [u8],
    /// `[n, scale_bytes]`, at least sixteen rows.
    pub scales: &'a [u8],
    pub n: usize,
    /// For each group of rows of x: `[k / 32, rows]`.
    pub x: &'a [Run],
    pub groups: RowGroups,
    /// Groups of x rows of this task.
    pub of_task: Range<usize>,
    /// Rows of w of this task.
    pub cols: Range<usize>,
    /// The output and its row stride.
    pub out: (Sink, usize),
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<T: Tile>(self, t: T) {
        let layout = self.layout;
        match (layout.halves, layout.offset, T::SPLITS_WIDE && layout.wide()) {
            (true, _, true) => self.tiles::<T, true, false, true>(t),
            (true, _, false) => self.tiles::<T, true, false, false>(t),
            (false, true, true) => self.tiles::<T, false, true, true>(t),
            (false, true, false) => self.tiles::<T, false, true, false>(t),
            (false, false, true) => self.tiles::<T, false, false, true>(t),
            (false, false, false) => self.tiles::<T, false, false, false>(t),
        }
    }
}

impl Task<'_> {
    #[inline(always)]
    fn tiles<T: Tile, const HALVES: bool, const OFFSET: bool, const WIDE: bool>(self, t: T) {
        let (layout, runs) = (self.layout, self.layout.k / RUN);
        let rows = self.groups.rows(self.of_task.start).start..self.groups.rows(self.of_task.end - 1).end;
        let mut panel = Panel::new();
        let mut sums = vec![Line([0.0; ROWS]); rows.len()];
        let mut scales = Scales::new(layout);
        for col in self.cols.clone().step_by(ROWS) {
            // The last tile of the matrix overlaps the one before; the rows that it repeats are not stored.
            let first = col.min(self.n.saturating_sub(ROWS));
            let codes = &self.codes[first * layout.code_bytes..][..ROWS * layout.code_bytes];
            scales.set_tile(&self.scales[first * layout.scale_bytes..][..ROWS * layout.scale_bytes]);
            sums.fill(Line([0.0; ROWS]));
            for (index, start) in (0..runs).step_by(RUNS).enumerate() {
                let count = RUNS.min(runs - start);
                Source::new(layout, codes, index).decode(t, &mut panel);
                scales.decode(t, index, count, &mut panel);
                for group in self.of_task.clone() {
                    let of_group = self.groups.rows(group);
                    let x = &self.x[of_group.start * runs + start * of_group.len()..][..count * of_group.len()];
                    let sums = &mut sums[of_group.start - rows.start..][..of_group.len()];
                    add_rows::<T, HALVES, OFFSET, WIDE>(t, &panel, x, sums);
                }
            }
            let count = ROWS.min(self.cols.end - col);
            for (row, sums) in rows.clone().zip(&sums) {
                let (sink, stride) = self.out;
                // SAFETY: the elements belong to this task.
                unsafe { sink.put(row * stride + col, &sums.0[col - first..][..count]) };
            }
        }
    }
}

/// Adds the products of a panel with a group of x rows, `[runs, rows]`, to their `sums`, one per row.
#[inline(always)]
fn add_rows<T: Tile, const HALVES: bool, const OFFSET: bool, const WIDE: bool>(
    t: T,
    panel: &Panel,
    x: &[Run],
    sums: &mut [Line<f32>],
) {
    match sums.len() {
        1 => add::<T, 1, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        2 => add::<T, 2, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        3 => add::<T, 3, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        _ if T::MAX_ROWS <= 4 => add::<T, 4, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        4 => add::<T, 4, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        5 => add::<T, 5, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        6 => add::<T, 6, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        7 => add::<T, 7, HALVES, OFFSET, WIDE>(t, panel, x, sums),
        _ => add::<T, 8, HALVES, OFFSET, WIDE>(t, panel, x, sums),
    }
}

/// Variant of [`add_rows`] for `R` rows, whose sums are in registers.
#[inline(always)]
fn add<T: Tile, const R: usize, const HALVES: bool, const OFFSET: bool, const WIDE: bool>(
    t: T,
    panel: &Panel,
    x: &[Run],
    sums: &mut [Line<f32>],
) {
    let sums = chunk_mut::<_, R>(sums);
    let x = x.as_chunks::<R>().0;
    let mut acc = [t.splat_f32(0.0); R];
    for r in 0..R {
        acc[r] = t.load_f32(&sums[r].0);
    }
    // A count that the compiler does not know: unrolled eight times, the loop would leave the cache of decoded
    // instructions.
    let runs = black_box(x.len()).min(RUNS);
    for (run, x) in x[..runs].iter().enumerate() {
        let w: [T::I; QUADS] = vectors!(t, i => t.load(&panel.codes[run][i].0));
        let s = &panel.s[run];
        for r in 0..R {
            let x = &x[r];
            let mut first = t.splat(x[BIAS]);
            for i in 0..QUADS / 2 {
                first = t.dot::<WIDE>(first, w[i], x[i]);
            }
            let mut second = if HALVES { t.splat(x[BIAS + 1]) } else { first };
            for i in QUADS / 2..QUADS {
                second = t.dot::<WIDE>(second, w[i], x[i]);
            }
            let mut sum = t.mul(t.to_f32(if HALVES { first } else { second }), t.load_f32(&s[0].0));
            if HALVES {
                sum = t.fma(t.to_f32(second), t.load_f32(&s[1].0), sum);
            }
            if OFFSET {
                sum = t.fnma(t.load_f32(&panel.o[run].0), t.splat_f32(f32::from_bits(x[SUM])), sum);
            }
            acc[r] = t.fma(sum, t.splat_f32(f32::from_bits(x[SCALE])), acc[r]);
        }
    }
    for r in 0..R {
        t.store_f32(acc[r], &mut sums[r].0);
    }
}

const _: () = assert!(COLUMNS == RUNS * RUN);
