//! The AMX path: bf16 tile multiply-adds, `[16 w rows, 32 k] x [32 k, 16 x rows]`, summed in f32 tiles.
//!
//! W rows are the left operand, which is plain row-major, so the checkpoint's layout is used directly. X is the right
//! operand and is converted to its layout (VNNI: adjacent pairs of `k`) once per call. One x row costs as much as
//! sixteen, but decode is bound by memory anyway, and one path for all `m` keeps the bits of a row the same in every
//! batch.
//!
//! `tdpbf16ps` flushes denormals. Measured on a 16-core Sapphire or Emerald Rapids virtual machine (noisy): 512 rows
//! of x against `[9728, 2560]` weights at 1.3 to 1.4 TFLOP/s on 2 threads, 6.5 to 7.0 on 16. Measured on a 2-core
//! Emerald Rapids virtual machine: one row against a gigabyte of weights at 26 to 28 GB/s, a plain read with AVX-512
//! loads at 26.5.

mod fp8;
mod tile;
mod transpose;

use self::{
    tile::{BLOCK_STEPS, N_TILE, Panel, Rows, STEP, TILE, TILE_ROWS},
    transpose::transpose,
};
use super::avx512::first;
use super::grid::Grid;
use super::problem::Problem;
pub(super) use fp8::run as run_fp8;
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;
use std::{arch::x86_64::*, ops::Range};

/// Columns of an x tile, which are rows of x.
const M_TILE: usize = 16;
/// Most x tiles per task: bounds the sums that a task keeps on its stack (2 KiB per x tile).
const MAX_TILES: usize = 16;
/// Most x tiles of a task that reads w in place.
const MAX_TILES_IN_PLACE: usize = 2;

/// `out = x * w^T`. Step `s` adds the products of `k = 32 s .. 32 s + 32` to an f32 sum, in the fixed order of
/// `tdpbf16ps` (pair after pair); missing elements of the last step are zero. The sum is in a tile register or, between
/// blocks of `k`, in memory, with the same bits.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
    let steps = p.k.div_ceil(STEP);
    let tiles = p.m.div_ceil(M_TILE);
    let x = scratch.slice::<u32>(tiles * steps * TILE);
    pack(p, steps, x);
    let task = Task { p, x, steps };
    Grid::new(tiles, steps * TILE * 4, MAX_TILES, p.n, N_TILE).for_each(|tiles, cols| {
        // SAFETY: `linear` has checked that the CPU has AMX and AVX-512 and that the process may use tiles; the block
        // lies inside the problem.
        unsafe { task.run(tiles, cols) }
    });
}

/// Packs x into tiles, `[m / 16, steps, 16 pairs of k, 16 rows of x]` pairs of bf16, zero-padded.
fn pack<W: Sync>(p: &Problem<'_, W>, steps: usize, out: &mut [u32]) {
    if steps == 0 {
        return;
    }
    team::for_each_chunk(out, steps * TILE, |i, out| {
        let x = &p.x[i * M_TILE * p.k..p.x.len().min((i + 1) * M_TILE * p.k)];
        for (step, tile) in out.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
            let len = (p.k - step * STEP).min(STEP);
            // SAFETY: the CPU has AVX-512; the masks keep the loads inside the rows.
            unsafe {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (row, x) in rows.iter_mut().zip(x.chunks_exact(p.k)) {
                    *row = _mm512_maskz_loadu_epi16(first(len), x[step * STEP..].as_ptr().cast());
                }
                for (pairs, tile) in transpose(rows).into_iter().zip(tile.as_chunks_mut::<16>().0) {
                    _mm512_storeu_si512(tile.as_mut_ptr().cast(), pairs);
                }
            }
        }
    });
}

/// Operands and layout that the tasks of one GEMM share.
struct Task<'a> {
    p: &'a Problem<'a>,
    /// Output of [`pack`].
    x: &'a [u32],
    /// Steps that cover `k`.
    steps: usize,
}

/// Sums that begin at a cache line: for each x tile `[w rows, 16 x rows]` f32.
#[repr(C, align(64))]
struct Aligned<T>(T);

impl Task<'_> {
    /// One task: w rows `cols` against some x tiles, which stay in L2. W is read once from memory.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and AMX with permission; the block lies inside the problem and belongs to the
    /// calling task; at most [`MAX_TILES`] x tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run(&self, tiles: Range<usize>, cols: Range<usize>) {
        // SAFETY: by the caller's promise; nothing is left in a tile at the end.
        unsafe {
            tile::configure();
            if tiles.len() <= MAX_TILES_IN_PLACE && self.p.k > 0 && self.p.k.is_multiple_of(STEP) {
                self.run_in_place(&tiles, cols);
            } else {
                self.run_staged(&tiles, cols);
            }
            tile::release();
        }
    }

    /// A task of few x tiles, for which copying w would not pay off.
    ///
    /// # Safety
    /// See [`run`](Self::run); in addition, the tiles are configured and `k` is a multiple of [`STEP`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run_in_place(&self, tiles: &Range<usize>, cols: Range<usize>) {
        let x = [tiles.start, tiles.end - 1].map(|tile| self.x[tile * self.steps * TILE..].as_ptr());
        let whole = cols.start..cols.end - cols.len() % TILE_ROWS;
        let rest = whole.end..cols.end;
        for col in whole.clone().step_by(TILE_ROWS) {
            let rows = Rows::new(&self.p.w[col * self.p.k..], self.p.k);
            if col == whole.start {
                rows.fetch();
            }
            let mut sums = Aligned([[0.0; TILE]; MAX_TILES_IN_PLACE]);
            let sums = &mut sums.0[..tiles.len()];
            // SAFETY: by the caller's promise; tiles of x have the steps.
            unsafe {
                rows.add_products(x, self.steps, sums);
                for (tile, sums) in tiles.clone().zip(&*sums) {
                    store(self.p, tile, &(col..col + TILE_ROWS), sums);
                }
            }
        }
        if !rest.is_empty() {
            // SAFETY: by the caller's promise.
            unsafe { self.run_staged(tiles, rest) };
        }
    }

    /// A task of any number of x tiles: each panel of w is copied to the L1 cache, one panel ahead of its use on the
    /// way from memory.
    ///
    /// # Safety
    /// See [`run`](Self::run); the tiles are configured.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run_staged(&self, tiles: &Range<usize>, cols: Range<usize>) {
        let mut panel = Panel([[[0; STEP]; N_TILE]; BLOCK_STEPS]);
        let mut sums = Aligned([[0.0; 2 * TILE]; MAX_TILES]);
        let sums = &mut sums.0[..tiles.len()];
        self.fetch(cols.start..(cols.start + N_TILE).min(cols.end));
        for col in cols.clone().step_by(N_TILE) {
            let panel_cols = col..(col + N_TILE).min(cols.end);
            let next = panel_cols.end..(panel_cols.end + N_TILE).min(cols.end);
            sums.fill([0.0; 2 * TILE]);
            for first_step in (0..self.steps).step_by(BLOCK_STEPS) {
                let steps = first_step..(first_step + BLOCK_STEPS).min(self.steps);
                // SAFETY: by the caller's promise; tiles of x and the panel have the steps.
                unsafe {
                    self.stage(&mut panel, &panel_cols, &steps, &next);
                    self.add_products(&panel, tiles, steps, sums);
                }
            }
            for (tile, sums) in tiles.clone().zip(&*sums) {
                // SAFETY: by the caller's promise.
                unsafe { store(self.p, tile, &panel_cols, sums) };
            }
        }
    }

    /// Adds the products of `steps` of a panel with all x tiles of the task, two at a time.
    ///
    /// # Safety
    /// The tiles are configured.
    unsafe fn add_products(
        &self,
        panel: &Panel,
        tiles: &Range<usize>,
        steps: Range<usize>,
        sums: &mut [[f32; 2 * TILE]],
    ) {
        for (i, sums) in sums.chunks_mut(2).enumerate() {
            let x = |tile: usize| self.x[(tile * self.steps + steps.start) * TILE..][..steps.len() * TILE].as_ptr();
            let tile = tiles.start + 2 * i;
            // SAFETY: by the caller's promise.
            unsafe {
                match sums {
                    [a, b] => tile::add_panel_2(panel, x(tile), x(tile + 1), steps.len(), a, b),
                    sums => tile::add_panel_1(panel, x(tile), steps.len(), &mut sums[0]),
                }
            }
        }
    }

    /// Asks for the first panel of a task, in the order of memory.
    fn fetch(&self, cols: Range<usize>) {
        for line in self.p.w[cols.start * self.p.k..cols.end * self.p.k].chunks(32) {
            // SAFETY: a prefetch has no visible effect; SSE is available.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }

    /// Copies a block of `k` of the w rows `cols` to the panel and prefetches as much of the `next` rows, in memory
    /// order. The copy makes tile loads aligned and free of cache-set conflicts for any `k` and file offset, and pads
    /// with zeros.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and BW.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn stage(&self, panel: &mut Panel, cols: &Range<usize>, steps: &Range<usize>, next: &Range<usize>) {
        let k = self.p.k;
        let next = &self.p.w[next.start * k..next.end * k];
        let mut fetch = next.chunks(32).skip(steps.start * N_TILE);
        let zeros = _mm512_setzero_si512();
        for row in 0..N_TILE {
            if row >= cols.len() {
                for step in &mut panel.0[..steps.len()] {
                    // SAFETY: a row of the panel has 64 bytes.
                    unsafe { _mm512_storeu_si512(step[row].as_mut_ptr().cast(), zeros) };
                }
                continue;
            }
            let w = self.p.w[(cols.start + row) * k..][..k].as_ptr();
            for (step, out) in steps.clone().zip(&mut panel.0) {
                let mask = first((k - step * STEP).min(STEP));
                // SAFETY: the mask keeps the load inside the row, which has an element at `step * 32`; a row of the
                // panel has 64 bytes.
                unsafe {
                    if let Some(line) = fetch.next() {
                        _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
                    }
                    let w = _mm512_maskz_loadu_epi16(mask, w.add(step * STEP).cast());
                    _mm512_storeu_si512(out[row].as_mut_ptr().cast(), w);
                }
            }
        }
    }
}

/// Stores the sums of an x tile with w rows: `[w rows, 16 x rows]`, in whole tiles.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL; the elements belong to the calling task.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store<W>(p: &Problem<'_, W>, tile: usize, cols: &Range<usize>, sums: &[f32]) {
    for (half, sums) in sums.as_chunks::<TILE>().0.iter().enumerate() {
        let col = cols.start + half * TILE_ROWS;
        let count = cols.end.saturating_sub(col).min(TILE_ROWS);
        let mut by_w = [_mm512_setzero_si512(); 16];
        for (lanes, sums) in by_w.iter_mut().zip(sums.as_chunks::<16>().0) {
            // SAFETY: 16 f32.
            *lanes = unsafe { _mm512_loadu_si512(sums.as_ptr().cast()) };
        }
        let rows = tile * M_TILE..((tile + 1) * M_TILE).min(p.m);
        for (row, lanes) in rows.zip(transpose(by_w)) {
            // SAFETY: by the caller's promise.
            unsafe { p.sink.put16(row * p.stride + col, _mm512_castsi512_ps(lanes), count) };
        }
    }
}
