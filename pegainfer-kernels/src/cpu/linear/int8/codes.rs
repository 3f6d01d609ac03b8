//! Decoding of the codes of a tile.

use super::layout::{Codes, Layout};
use super::panel::{COLUMNS, Line, Panel, QUADS, ROWS, RUN, RUNS};
use super::vector::{Tile, vectors};
use std::marker::PhantomData;

/// Panels between the prefetch of their codes and their use, of all tiles together. A panel of Q4_K has 2 KiB of codes.
const AHEAD: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Codes of a tile at a panel.
pub(super) struct Source<'a> {
    codes: Codes,
    /// Codes of the first row: the lower 4 bits, or all 8, of the panel.
    low: *const u8,
    /// The further bits of the first row.
    high: *const u8,
    /// `low` and `high` of the panel to prefetch.
    ahead: [*const u8; 2],
    /// Bytes per run of `low` and of `high`.
    run_bytes: [usize; 2],
    /// Bytes of a row.
    stride: usize,
    /// Runs of the panel.
    runs: usize,
    tile: PhantomData<&'a [u8]>,
}

impl<'a> Source<'a> {
    /// The codes of panel `panel` of the sixteen rows `tile`.
    pub fn new<T: Tile>(layout: &Layout, tile: &'a [u8], panel: usize) -> Self {
        let run_bytes = match layout.codes {
            Codes::Four | Codes::Table(_) => [16, 0],
            Codes::Five => [16, 4],
            Codes::Six => [16, 8],
            Codes::Eight => [32, 0],
        };
        assert_eq!(tile.len(), ROWS * layout.code_bytes, "sixteen rows");
        let tile = tile.as_ptr();
        let at = |tile: *const u8, panel: usize| {
            let low = tile.wrapping_add(panel * RUNS * run_bytes[0]);
            [low, tile.wrapping_add(layout.k / 2 + panel * RUNS * run_bytes[1])]
        };
        let panels = layout.k.div_ceil(COLUMNS);
        let later = panel + AHEAD / T::TILES;
        let tiles = later / panels * T::TILES;
        let ahead = at(tile.wrapping_add(tiles * ROWS * layout.code_bytes), later % panels);
        let [low, high] = at(tile, panel);
        let runs = RUNS.min(layout.k / RUN - panel * RUNS);
        Self { codes: layout.codes, low, high, ahead, run_bytes, stride: layout.code_bytes, runs, tile: PhantomData }
    }

    /// Prefetches an eighth of the codes of a later panel: two rows. Spread over the runs, because a core has only 16
    /// buffers for lines that it waits for.
    #[inline(always)]
    fn prefetch<T: Tile>(&self, t: T, run: usize) {
        for row in [2 * run, 2 * run + 1] {
            for (ahead, bytes) in self.ahead.iter().zip(self.run_bytes) {
                for at in (0..RUNS * bytes).step_by(LINE) {
                    t.prefetch(ahead.wrapping_add(row * self.stride + at));
                }
            }
        }
    }

    /// Decodes the codes.
    #[inline(always)]
    pub fn decode<T: Tile>(&self, t: T, panel: &mut Panel) {
        macro_rules! each_run {
            ($run:ident => $decoded:expr) => {
                for ($run, out) in panel.codes[..self.runs].iter_mut().enumerate() {
                    self.prefetch(t, $run);
                    // SAFETY: the panel has the run.
                    let decoded: [T::I; QUADS] = unsafe { $decoded };
                    for (i, out) in out.iter_mut().enumerate() {
                        t.store(decoded[i], &mut out.0);
                    }
                }
            };
        }
        match self.codes {
            Codes::Four => each_run!(run => self.nibbles(t, run)),
            Codes::Table(table) => each_run!(run => {
                let low = self.nibbles(t, run);
                vectors!(t, i => t.lookup(low[i], table))
            }),
            Codes::Five => {
                let high = self.high_bits(t);
                each_run!(run => {
                    let (low, bits) = (self.nibbles(t, run), t.load(&high[run].0));
                    vectors!(t, i => t.or(low[i], t.fifth_bits(bits, i)))
                });
            }
            Codes::Six => {
                let high = self.high_bits(t);
                each_run!(run => {
                    let bits = [t.load(&high[2 * run].0), t.load(&high[2 * run + 1].0)];
                    six_bits(t, self.nibbles(t, run), bits)
                });
            }
            Codes::Eight => each_run!(run => {
                let at = self.low.add(run * 32);
                let halves = [t.columns(at, self.stride), t.columns(at.add(16), self.stride)];
                vectors!(t, i => t.xor(halves[i / 4][i % 4], t.splat(0x8080_8080)))
            }),
        }
    }

    /// The lower 4 bits of the codes of a run.
    ///
    /// # Safety
    /// The panel has the run.
    #[inline(always)]
    unsafe fn nibbles<T: Tile>(&self, t: T, run: usize) -> [T::I; QUADS] {
        // SAFETY: each row has 16 bytes of the run.
        let bytes = unsafe { t.columns(self.low.add(run * 16), self.stride) };
        let mask = t.splat(0x0f0f_0f0f);
        vectors!(t, i => if i < 4 { t.and(bytes[i], mask) } else { t.and(t.shr::<4>(bytes[i - 4]), mask) })
    }

    /// The further bits of all runs: a vector per run for 5 bits, two for 6 bits.
    #[inline(always)]
    fn high_bits<T: Tile>(&self, t: T) -> [Line<u32>; 2 * RUNS] {
        let mut lines = [Line([0; ROWS]); 2 * RUNS];
        let bytes = self.runs * self.run_bytes[1];
        for (i, four) in lines.as_chunks_mut::<4>().0.iter_mut().take(bytes.div_ceil(16)).enumerate() {
            // SAFETY: 5-bit and 6-bit formats in the last bytes of a row may have less than 16; the last 16 bytes of
            // the row, which has at least as many before, are then shifted to their place.
            let vectors: [T::I; 4] = unsafe {
                let left = bytes - 16 * i;
                if left >= 16 {
                    t.columns(self.high.add(16 * i), self.stride)
                } else {
                    let all = t.columns(self.high.add(16 * i).sub(16 - left), self.stride);
                    vectors!(t, j => all[(j + (16 - left) / 4) % 4])
                }
            };
            for (j, line) in four.iter_mut().enumerate() {
                t.store(vectors[j], &mut line.0);
            }
        }
        lines
    }
}

/// Codes of 6 bits of a run from their lower 4 bits and the two vectors of upper ones, whose byte `l` has the bits of
/// columns `l`, `l + 8`, `l + 16` and `l + 24`.
#[inline(always)]
fn six_bits<T: Tile>(t: T, low: [T::I; QUADS], high: [T::I; 2]) -> [T::I; QUADS] {
    let mask = t.splat(0x3030_3030);
    vectors!(t, i => {
        let bits = high[i % 2];
        let bits = match i / 2 {
            0 => t.shl::<4>(bits),
            1 => t.shl::<2>(bits),
            2 => bits,
            _ => t.shr::<2>(bits),
        };
        t.or(low[i], t.and(bits, mask))
    })
}
