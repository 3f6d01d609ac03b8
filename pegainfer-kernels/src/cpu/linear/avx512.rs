//! The AVX-512 path: w widened in registers, x widened once per call, two f32 FMAs per 32 elements of `k`.
//!
//! Why not `vdpbf16ps`: on Sapphire and Emerald Rapids it issues every second cycle (87 GFLOP/s a core measured at 2.9 GHz),
//! the f32 FMA twice a cycle (179 GFLOP/s). Widening costs one shift and one mask per 32 weights, shared by all rows of x in
//! the tile, and the f32 FMA rounds once per product where `vdpbf16ps` flushes denormals.

use super::{
    Problem, Scratch,
    grid::{Grid, even_parts},
};
use half::bf16;
use rayon::prelude::*;
use std::{arch::x86_64::*, ops::Range};

/// Elements of `k` per step: one 64-byte load of w.
const STEP: usize = 32;
/// Most rows of x in a tile: 4 x 6 accumulators, 4 widened w rows and an x row fit the 32 registers.
const M_TILE: usize = 6;

/// `out = x * w^T`. An output has one accumulator of 16 lanes. Step `s` adds first the products of the even elements of
/// `k = 32 s .. 32 s + 32` (lane `l`: element `32 s + 2 l`), then those of the odd ones, by FMA; missing elements of the last
/// step are zero. The lanes are then added in halves: 8, 4, 2, 1 apart.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
    let k_padded = p.k.next_multiple_of(STEP);
    let x = scratch.slice::<f32>(p.m * k_padded);
    widen(p, k_padded, x);
    let x = &*x;
    Grid::new(p.m, p.n, k_padded * 4, M_TILE, 8).for_each(|rows, cols| {
        // SAFETY: `linear` has checked that the CPU has AVX-512 F, BW and VL; the block lies inside the problem.
        unsafe { block(p, x, k_padded, rows, cols) }
    });
}

/// Widens x into `[m, k_padded / 32, 2, 16]` f32: per step the even elements, then the odd ones, zero-padded.
fn widen(p: &Problem<'_>, k_padded: usize, out: &mut [f32]) {
    /// Rows per task such that a task is worth its hand-over.
    const ELEMENTS_PER_TASK: usize = 16 << 10;
    if k_padded == 0 {
        return;
    }
    let rows = ELEMENTS_PER_TASK.div_ceil(k_padded);
    let rows_of = |(out, x): (&mut [f32], &[bf16])| {
        for (out, x) in out.chunks_exact_mut(k_padded).zip(x.chunks_exact(p.k)) {
            // SAFETY: `linear` has checked the CPU; `out` has room for the padded row.
            unsafe { widen_row(x, out) }
        }
    };
    if p.m <= rows {
        rows_of((out, p.x));
    } else {
        out.par_chunks_mut(rows * k_padded).zip(p.x.par_chunks(rows * p.k)).for_each(rows_of);
    }
}

/// # Safety
/// The CPU has AVX-512 F and BW; `out` holds `x.len()` rounded up to a multiple of 32.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn widen_row(x: &[bf16], out: &mut [f32]) {
    for (x, out) in x.chunks(STEP).zip(out.as_chunks_mut::<STEP>().0) {
        // SAFETY: the mask keeps the load inside `x`; `out` has 32 elements.
        unsafe {
            let raw = _mm512_maskz_loadu_epi16(first(x.len()), x.as_ptr().cast());
            _mm512_storeu_ps(out.as_mut_ptr(), even(raw));
            _mm512_storeu_ps(out.as_mut_ptr().add(16), odd(raw));
        }
    }
}

/// One task: w rows `cols` against x rows `rows`, which stay in L2. Each w tile is read once from memory and then from L1.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL; the block lies inside the problem and belongs to the calling task; `x` is what
/// [`widen`] made.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn block(p: &Problem<'_>, x: &[f32], k_padded: usize, rows: Range<usize>, cols: Range<usize>) {
    let n_tile = if rows.len() <= 3 { 8 } else { 4 };
    let mut col = cols.start;
    while col < cols.end {
        let tile_cols = col..(col + n_tile).min(cols.end);
        // The first pass over a w tile fetches the next one: every line is asked for one tile ahead.
        let mut ahead = n_tile * p.k;
        for tile_rows in even_parts(rows.clone(), M_TILE) {
            let t = Tile {
                p,
                x: &x[tile_rows.start * k_padded..],
                k_padded,
                row: tile_rows.start,
                cols: &tile_cols,
                ahead,
            };
            // SAFETY: by the caller's promise.
            unsafe {
                match (n_tile, tile_rows.len()) {
                    (8, 1) => t.run::<8, 1>(),
                    (8, 2) => t.run::<8, 2>(),
                    (8, 3) => t.run::<8, 3>(),
                    (4, 1) => t.run::<4, 1>(),
                    (4, 2) => t.run::<4, 2>(),
                    (4, 3) => t.run::<4, 3>(),
                    (4, 4) => t.run::<4, 4>(),
                    (4, 5) => t.run::<4, 5>(),
                    (4, M_TILE) => t.run::<4, M_TILE>(),
                    shape => unreachable!("no tile of shape {shape:?}"),
                }
            }
            ahead = 0;
        }
        col += n_tile;
    }
}

/// A tile of outputs that is summed in registers.
struct Tile<'a> {
    p: &'a Problem<'a>,
    /// Widened x from the tile's first row on.
    x: &'a [f32],
    k_padded: usize,
    row: usize,
    cols: &'a Range<usize>,
    /// Prefetch distance in w, in elements.
    ahead: usize,
}

impl Tile<'_> {
    /// Computes and stores `R` rows of x against `W` rows of w (a multiple of 4). Of a ragged tile the last w row stands in
    /// for the missing ones and the surplus is not stored.
    ///
    /// # Safety
    /// As for [`block`]; the tile lies inside the block.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run<const W: usize, const R: usize>(&self) {
        let k = self.p.k;
        let w: [*const bf16; W] =
            std::array::from_fn(|j| self.p.w[(self.cols.start + j).min(self.cols.end - 1) * k..].as_ptr());
        let mut acc = [[_mm512_setzero_ps(); W]; R];
        let mut raw = [_mm512_setzero_si512(); W];
        for step in 0..k / STEP {
            let at = step * STEP;
            for (raw, w) in raw.iter_mut().zip(w) {
                // SAFETY: `at + 32 <= k`; a prefetch may point anywhere.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(at + self.ahead).cast());
                    *raw = _mm512_loadu_si512(w.add(at).cast());
                }
            }
            // SAFETY: x has R rows of k_padded elements.
            unsafe { self.step(&mut acc, &raw, at) };
        }
        if !k.is_multiple_of(STEP) {
            let at = k - k % STEP;
            for (raw, w) in raw.iter_mut().zip(w) {
                // SAFETY: the mask keeps the load inside the row.
                *raw = unsafe { _mm512_maskz_loadu_epi16(first(k - at), w.add(at).cast()) };
            }
            // SAFETY: as above; x is padded with zeros to whole steps.
            unsafe { self.step(&mut acc, &raw, at) };
        }
        for (r, acc) in acc.iter().enumerate() {
            for (col, acc) in self.cols.clone().step_by(4).zip(acc.as_chunks::<4>().0) {
                // SAFETY: the elements lie inside the tile.
                unsafe { self.p.sink.put4((self.row + r) * self.p.n + col, reduce(acc), (self.cols.end - col).min(4)) };
            }
        }
    }

    /// Adds the products of 32 elements of `k` from `at` on.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; x has `R` rows of `k_padded` elements and `at + 32 <= k_padded`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn step<const W: usize, const R: usize>(&self, acc: &mut [[__m512; W]; R], raw: &[__m512i; W], at: usize) {
        let mut w = [_mm512_setzero_ps(); W];
        for (w, &raw) in w.iter_mut().zip(raw) {
            *w = even(raw);
        }
        // SAFETY: in bounds by the caller's promise.
        unsafe { self.add_products(acc, &w, at) };
        for (w, &raw) in w.iter_mut().zip(raw) {
            *w = odd(raw);
        }
        // SAFETY: as above.
        unsafe { self.add_products(acc, &w, at + 16) };
    }

    /// Adds the products of one widened half step; `at` is where its x elements are.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; x has `R` rows of `k_padded` elements and `at + 16 <= k_padded`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn add_products<const W: usize, const R: usize>(
        &self,
        acc: &mut [[__m512; W]; R],
        w: &[__m512; W],
        at: usize,
    ) {
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: in bounds by the caller's promise.
            let x = unsafe { _mm512_loadu_ps(self.x.as_ptr().add(r * self.k_padded + at)) };
            for (acc, &w) in acc.iter_mut().zip(w) {
                *acc = _mm512_fmadd_ps(w, x, *acc);
            }
        }
    }
}

/// Mask of the first `len` (up to 32) 16-bit lanes.
fn first(len: usize) -> __mmask32 {
    (((1u64) << len) - 1) as __mmask32
}

/// The even bf16 elements as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn even(raw: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16))
}

/// The odd bf16 elements as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn odd(raw: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(0xffff_0000u32.cast_signed())))
}

/// The lane sums of four accumulators, each by the same tree: lanes 8, 4, 2 and 1 apart.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn reduce(acc: &[__m512; 4]) -> __m128 {
    let [a, b, c, d] = *acc;
    // Lanes 8 apart: [a | b] and [c | d], 8 lanes each.
    let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
    // 4 apart: [a | b | c | d], 4 lanes each; then 2 and 1 apart inside these.
    let abcd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
    let pairs = _mm512_add_ps(abcd, _mm512_permute_ps::<0x4e>(abcd));
    let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0xb1>(pairs));
    _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums))
}
