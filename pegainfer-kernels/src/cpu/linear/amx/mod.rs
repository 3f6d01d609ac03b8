//! The AMX path: bf16 tile multiply-adds, `[16 w rows, 32 k] x [32 k, 16 x rows]`, summed in f32 tiles.
//!
//! W rows are the left operand, which is plain row-major: the checkpoint's layout serves as it is. X is the right
//! operand, whose layout (VNNI: pairs of `k` side by side) it gets once per call. One x row or sixteen cost the same,
//! but decode waits for memory anyway, and one path for all `m` keeps the bits of a row the same in every batch.
//!
//! `tdpbf16ps` flushes denormals. Measured on a 16-core Sapphire or Emerald Rapids virtual machine (noisy): 512 rows
//! of x against `[9728, 2560]` weights at 1.3 to 1.4 TFLOP/s on 2 threads, 6.5 to 7.0 on 16; one row against a
//! gigabyte of weights at 1.2 to 1.35 times a plain read on 2 threads, 0.74 on 16.

mod tile;
mod transpose;

use self::{
    tile::{BLOCK_STEPS, Left, N_TILE, Panel, STEP, TILE},
    transpose::transpose,
};
use super::avx512::first;
use super::grid::Grid;
use super::problem::Problem;
use half::bf16;
use pegainfer_core::scratch::Scratch;
use rayon::prelude::*;
use std::{arch::x86_64::*, ops::Range};

/// Columns of an x tile, which are rows of x.
const M_TILE: usize = 16;
/// Most x tiles per task: bounds the sums that a task keeps on its stack (2 KiB per x tile).
const MOST_TILES: usize = 16;

/// `out = x * w^T`. Step `s` adds the products of `k = 32 s .. 32 s + 32` to an f32 sum, in the order that `tdpbf16ps`
/// fixes (pair after pair); missing elements of the last step are zero. The sum lives in a tile register or, between
/// blocks of `k`, in memory, which changes no bit.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
    let steps = p.k.div_ceil(STEP);
    let tiles = p.m.div_ceil(M_TILE);
    let x = scratch.slice::<u32>(tiles * steps * TILE);
    pack(p, steps, x);
    let task = Task { p, x, steps };
    Grid::new(tiles, steps * TILE * 4, MOST_TILES, p.n, N_TILE).for_each(|tiles, cols| {
        // SAFETY: `linear` has checked that the CPU has AMX and AVX-512 and that the process may use tiles; the block
        // lies inside the problem.
        unsafe { task.run(tiles, cols) }
    });
}

/// Packs x into tiles, `[m / 16, steps, 16 pairs of k, 16 rows of x]` pairs of bf16, zero-padded.
fn pack(p: &Problem<'_>, steps: usize, out: &mut [u32]) {
    if steps == 0 {
        return;
    }
    let groups = out.par_chunks_exact_mut(steps * TILE).zip(p.x.par_chunks(M_TILE * p.k));
    groups.for_each(|(out, x)| {
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

/// The sums of a panel: for each x tile `[2, 16 w rows, 16 x rows]` f32.
#[repr(C, align(64))]
struct Sums([[f32; 2 * TILE]; MOST_TILES]);

impl Task<'_> {
    /// One task: w rows `cols` against some x tiles, which stay in L2. W is read once, in the order of memory, one
    /// panel ahead of its use.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and AMX with permission; the block lies inside the problem and belongs to the
    /// calling task; at most [`MOST_TILES`] x tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run(&self, tiles: Range<usize>, cols: Range<usize>) {
        let mut panel = Panel([[[0; STEP]; N_TILE]; BLOCK_STEPS]);
        let mut sums = Sums([[0.0; 2 * TILE]; MOST_TILES]);
        let sums = &mut sums.0[..tiles.len()];
        // SAFETY: by the caller's promise.
        unsafe { tile::configure() };
        self.fetch(cols.start..(cols.start + N_TILE).min(cols.end));
        for col in cols.clone().step_by(N_TILE) {
            let panel_cols = col..(col + N_TILE).min(cols.end);
            let next = panel_cols.end..(panel_cols.end + N_TILE).min(cols.end);
            sums.fill([0.0; 2 * TILE]);
            // With few x tiles a copy of the panel is not worth its time; what is left of `k` is padded in one.
            let direct = if tiles.len() <= 2 && panel_cols.len() == N_TILE { self.p.k / STEP } else { 0 };
            // SAFETY: by the caller's promise; tiles of x and the panel have the steps.
            unsafe {
                if direct > 0 {
                    let w = Left::rows(&self.p.w[col * self.p.k..], self.p.k);
                    let next =
                        if next.is_empty() { std::ptr::null() } else { self.p.w[next.start * self.p.k..].as_ptr() };
                    self.add_products(w, &tiles, 0..direct, next, sums);
                }
                for first_step in (direct..self.steps).step_by(BLOCK_STEPS) {
                    let steps = first_step..(first_step + BLOCK_STEPS).min(self.steps);
                    self.stage(&mut panel, &panel_cols, &steps, &next);
                    self.add_products(Left::panel(&panel), &tiles, steps, std::ptr::null(), sums);
                }
                for (tile, sums) in tiles.clone().zip(&*sums) {
                    self.store(tile, &panel_cols, sums);
                }
            }
        }
        // SAFETY: nothing is left in a tile.
        unsafe { tile::release() };
    }

    /// Adds the products of `steps` of a panel with all x tiles of the task, two at a time. `next`: what to fetch
    /// meanwhile, 2 KiB a step, or null.
    ///
    /// # Safety
    /// The tiles are configured; `w` has 32 rows of `steps`.
    unsafe fn add_products(
        &self,
        w: Left,
        tiles: &Range<usize>,
        steps: Range<usize>,
        next: *const bf16,
        sums: &mut [[f32; 2 * TILE]],
    ) {
        for (i, sums) in sums.chunks_mut(2).enumerate() {
            let x = |tile: usize| self.x[(tile * self.steps + steps.start) * TILE..][..steps.len() * TILE].as_ptr();
            let tile = tiles.start + 2 * i;
            // SAFETY: by the caller's promise.
            unsafe {
                match (sums, next.is_null()) {
                    ([a, b], true) => tile::add_products_2(w, x(tile), x(tile + 1), steps.len(), next, a, b),
                    ([a, b], false) => tile::add_products_2_and_fetch(w, x(tile), x(tile + 1), steps.len(), next, a, b),
                    (sums, true) => tile::add_products_1(w, x(tile), steps.len(), next, &mut sums[0]),
                    (sums, false) => tile::add_products_1_and_fetch(w, x(tile), steps.len(), next, &mut sums[0]),
                }
            }
        }
    }

    /// Asks for the first panel of a task, in the order of memory.
    fn fetch(&self, cols: Range<usize>) {
        for line in self.p.w[cols.start * self.p.k..cols.end * self.p.k].chunks(32) {
            // SAFETY: a prefetch changes no state that a program sees; SSE is there.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }

    /// Copies a block of `k` of the w rows `cols` to the panel and fetches as much of the `next` rows, in the order of
    /// memory. The copy makes tile loads aligned and free of cache-set conflicts whatever `k` and the file offset are,
    /// and pads with zeros.
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

    /// Stores the sums of an x tile.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL; the elements belong to the calling task.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(&self, tile: usize, cols: &Range<usize>, sums: &[f32; 2 * TILE]) {
        for (half, sums) in sums.as_chunks::<TILE>().0.iter().enumerate() {
            let col = cols.start + half * 16;
            let count = cols.end.saturating_sub(col).min(16);
            let mut by_w = [_mm512_setzero_si512(); 16];
            for (lanes, sums) in by_w.iter_mut().zip(sums.as_chunks::<16>().0) {
                // SAFETY: 16 f32.
                *lanes = unsafe { _mm512_loadu_si512(sums.as_ptr().cast()) };
            }
            let rows = tile * M_TILE..((tile + 1) * M_TILE).min(self.p.m);
            for (row, lanes) in rows.zip(transpose(by_w)) {
                // SAFETY: by the caller's promise.
                unsafe { self.p.sink.put16(row * self.p.n + col, _mm512_castsi512_ps(lanes), count) };
            }
        }
    }
}
