//! The loops of one task: some rows of w against some rows of x.

use super::codes::Source;
use super::layout::Layout;
use super::panel::{COLUMNS, Line, Panel, QUADS, ROWS, RUN, RUNS};
use super::rounding::{BIAS, Run, SCALE, SUM};
use super::scales::Scales;
use super::vector::{Kernel, MAX_TILES, Tile};
use crate::cpu::lanes::chunk_mut;
use crate::cpu::linear::grid::RowGroups;
use crate::cpu::linear::output::Sink;
use std::hint::black_box;
use std::ops::Range;

/// The f32 sums of a row of x, for the rows of each tile.
type Sums = [Line<f32>; MAX_TILES];

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
        if T::INT16 {
            match self.layout.quads_in_int16() {
                8.. => self.run_in::<T, 8>(t),
                4.. => self.run_in::<T, 4>(t),
                2.. => self.run_in::<T, 2>(t),
                _ => self.run_in::<T, 0>(t),
            }
        } else {
            self.run_in::<T, 0>(t);
        }
    }
}

impl Task<'_> {
    /// `Q`: see [`Tile::begin`].
    #[inline(always)]
    fn run_in<T: Tile, const Q: usize>(self, t: T) {
        match (self.layout.halves, self.layout.offset) {
            (true, _) => self.tiles::<T, Q, true, false>(t),
            (false, true) => self.tiles::<T, Q, false, true>(t),
            (false, false) => self.tiles::<T, Q, false, false>(t),
        }
    }

    #[inline(always)]
    fn tiles<T: Tile, const Q: usize, const HALVES: bool, const OFFSET: bool>(self, t: T) {
        let (layout, runs) = (self.layout, self.layout.k / RUN);
        let rows = self.groups.rows(self.of_task.start).start..self.groups.rows(self.of_task.end - 1).end;
        let mut panels = [Panel::new(), Panel::new()];
        let mut scales = [Scales::new(layout), Scales::new(layout)];
        let mut sums: Vec<Sums> = vec![[Line([0.0; ROWS]); MAX_TILES]; rows.len()];
        for col in self.cols.clone().step_by(T::TILES * ROWS) {
            // The last tiles of the matrix overlap those before; the rows that they repeat are not stored.
            let first = |tile: usize| (col + tile * ROWS).min(self.n.saturating_sub(ROWS));
            for (tile, scales) in scales.iter_mut().enumerate().take(T::TILES) {
                scales.set_tile(&self.scales[first(tile) * layout.scale_bytes..][..ROWS * layout.scale_bytes]);
            }
            sums.fill([Line([0.0; ROWS]); MAX_TILES]);
            for (index, start) in (0..runs).step_by(RUNS).enumerate() {
                let count = RUNS.min(runs - start);
                for tile in 0..T::TILES {
                    let codes = &self.codes[first(tile) * layout.code_bytes..][..ROWS * layout.code_bytes];
                    Source::new::<T>(layout, codes, index).decode(t, &mut panels[tile]);
                    scales[tile].decode(t, index, count, &mut panels[tile]);
                }
                for group in self.of_task.clone() {
                    let of_group = self.groups.rows(group);
                    let x = &self.x[of_group.start * runs + start * of_group.len()..][..count * of_group.len()];
                    let sums = &mut sums[of_group.start - rows.start..][..of_group.len()];
                    add_rows::<T, Q, HALVES, OFFSET>(t, &panels, x, sums);
                }
            }
            for tile in 0..T::TILES {
                let start = col + tile * ROWS;
                if start >= self.cols.end {
                    break;
                }
                let (count, (sink, stride)) = (ROWS.min(self.cols.end - start), self.out);
                for (row, sums) in rows.clone().zip(&sums) {
                    // SAFETY: the elements belong to this task.
                    unsafe { sink.put(row * stride + start, &sums[tile].0[start - first(tile)..][..count]) };
                }
            }
        }
    }
}

/// Adds the products of the panels with a group of x rows, `[runs, rows]`, to their `sums`, one per row.
#[inline(always)]
fn add_rows<T: Tile, const Q: usize, const HALVES: bool, const OFFSET: bool>(
    t: T,
    panels: &[Panel; MAX_TILES],
    x: &[Run],
    sums: &mut [Sums],
) {
    if T::MAX_ROWS[usize::from(HALVES)] <= 4 {
        match sums.len() {
            1 => add::<T, 1, Q, HALVES, OFFSET>(t, panels, x, sums),
            2 => add::<T, 2, Q, HALVES, OFFSET>(t, panels, x, sums),
            3 => add::<T, 3, Q, HALVES, OFFSET>(t, panels, x, sums),
            _ => add::<T, 4, Q, HALVES, OFFSET>(t, panels, x, sums),
        }
    } else {
        match sums.len() {
            1 => add::<T, 1, Q, HALVES, OFFSET>(t, panels, x, sums),
            2 => add::<T, 2, Q, HALVES, OFFSET>(t, panels, x, sums),
            3 => add::<T, 3, Q, HALVES, OFFSET>(t, panels, x, sums),
            4 => add::<T, 4, Q, HALVES, OFFSET>(t, panels, x, sums),
            5 => add::<T, 5, Q, HALVES, OFFSET>(t, panels, x, sums),
            6 => add::<T, 6, Q, HALVES, OFFSET>(t, panels, x, sums),
            7 => add::<T, 7, Q, HALVES, OFFSET>(t, panels, x, sums),
            _ => add::<T, 8, Q, HALVES, OFFSET>(t, panels, x, sums),
        }
    }
}

/// Variant of [`add_rows`] for `R` rows.
#[inline(always)]
fn add<T: Tile, const R: usize, const Q: usize, const HALVES: bool, const OFFSET: bool>(
    t: T,
    panels: &[Panel; MAX_TILES],
    x: &[Run],
    sums: &mut [Sums],
) {
    let sums = chunk_mut::<_, R>(sums);
    let x = x.as_chunks::<R>().0;
    // A count that the compiler does not know: unrolled eight times, the loop would leave the cache of decoded
    // instructions.
    let runs = black_box(x.len()).min(RUNS);
    for (run, x) in x[..runs].iter().enumerate() {
        let mut of_run = [[t.splat_f32(0.0); MAX_TILES]; R];
        for half in 0..if HALVES { 2 } else { 1 } {
            let dots = if HALVES {
                dots::<T, R, Q, { QUADS / 2 }>(t, panels, (run, half), x)
            } else {
                dots::<T, R, Q, QUADS>(t, panels, (run, half), x)
            };
            for tile in 0..T::TILES {
                let s = t.load_f32(&panels[tile].s[run][half].0);
                for r in 0..R {
                    let (dot, sum) = (t.to_f32(dots[r][tile]), of_run[r][tile]);
                    of_run[r][tile] = if half == 0 { t.mul(dot, s) } else { t.fma(dot, s, sum) };
                }
            }
        }
        for tile in 0..T::TILES {
            for r in 0..R {
                let mut sum = of_run[r][tile];
                if OFFSET {
                    let o = t.load_f32(&panels[tile].o[run].0);
                    sum = t.fnma(o, t.splat_f32(f32::from_bits(x[r][SUM])), sum);
                }
                let total = &mut sums[r][tile].0;
                let scale = t.splat_f32(f32::from_bits(x[r][SCALE]));
                t.store_f32(t.fma(sum, scale, t.load_f32(total)), total);
            }
        }
    }
}

/// The integer sums over the columns of part `part` of run `run`, which has `LEN` quads of columns. A word of x is
/// loaded once for all tiles, a vector of w once for all rows.
#[inline(always)]
fn dots<T: Tile, const R: usize, const Q: usize, const LEN: usize>(
    t: T,
    panels: &[Panel; MAX_TILES],
    (run, part): (usize, usize),
    x: &[Run; R],
) -> [[T::I; MAX_TILES]; R] {
    let mut acc = [[t.splat(0); MAX_TILES]; R];
    for r in 0..R {
        acc[r] = [t.splat(x[r][BIAS + part]); MAX_TILES];
    }
    let step = if Q == 0 { LEN } else { Q.min(LEN) };
    for first in (0..LEN).step_by(step) {
        let mut sums = acc;
        for r in 0..R {
            for tile in 0..T::TILES {
                sums[r][tile] = t.begin::<Q>(acc[r][tile]);
            }
        }
        for i in part * LEN + first..part * LEN + first + step {
            let mut w = [t.splat(0); MAX_TILES];
            for tile in 0..T::TILES {
                w[tile] = t.load(&panels[tile].codes[run][i].0);
            }
            for r in 0..R {
                let x = t.splat(x[r][i]);
                for tile in 0..T::TILES {
                    sums[r][tile] = t.dot::<Q>(sums[r][tile], w[tile], x);
                }
            }
        }
        for r in 0..R {
            for tile in 0..T::TILES {
                acc[r][tile] = t.end::<Q>(acc[r][tile], sums[r][tile]);
            }
        }
    }
    acc
}

const _: () = assert!(COLUMNS == RUNS * RUN);
