//! The AVX2 path: the scheme of the AVX-512 path with 8 lanes, for desktops and older servers.

use super::{
    Problem, Scratch,
    grid::{Grid, even_parts},
};
use half::bf16;
use rayon::prelude::*;
use std::{arch::x86_64::*, ops::Range};

/// Elements of `k` per step: one 32-byte load of w.
const STEP: usize = 16;
/// Rows of w in a tile.
const N_TILE: usize = 4;
/// Most rows of x in a tile: 4 x 3 accumulators and a widened w row fit the 16 registers, x comes from memory operands.
const M_TILE: usize = 3;

/// `out = x * w^T`. An output has one accumulator of 8 lanes. Step `s` adds first the products of the even elements of
/// `k = 16 s .. 16 s + 16` (lane `l`: element `16 s + 2 l`), then those of the odd ones, by FMA; missing elements of the last
/// step are zero. The lanes are then added 4, 1 and 2 apart.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
    let k_padded = p.k.next_multiple_of(STEP);
    let x = scratch.slice::<f32>(p.m * k_padded);
    if k_padded > 0 {
        x.par_chunks_exact_mut(k_padded).zip(p.x.par_chunks_exact(p.k)).for_each(|(out, x)| widen_row(x, out));
    }
    let x = &*x;
    Grid::new(p.m, p.n, k_padded * 4, M_TILE, N_TILE).for_each(|rows, cols| {
        // SAFETY: `linear` has checked that the CPU has AVX2 and FMA; the block lies inside the problem.
        unsafe { block(p, x, k_padded, rows, cols) }
    });
}

/// Widens a row into `[k_padded / 16, 2, 8]` f32: per step the even elements, then the odd ones, zero-padded.
fn widen_row(x: &[bf16], out: &mut [f32]) {
    for (x, out) in x.chunks(STEP).zip(out.as_chunks_mut::<STEP>().0) {
        *out = [0.0; STEP];
        for (i, x) in x.iter().enumerate() {
            out[i % 2 * 8 + i / 2] = x.to_f32();
        }
    }
}

/// One task: w rows `cols` against x rows `rows`.
///
/// # Safety
/// The CPU has AVX2 and FMA; the block lies inside the problem and belongs to the calling task; `x` is widened.
#[target_feature(enable = "avx2,fma")]
unsafe fn block(p: &Problem<'_>, x: &[f32], k_padded: usize, rows: Range<usize>, cols: Range<usize>) {
    for col in cols.clone().step_by(N_TILE) {
        let tile_cols = col..(col + N_TILE).min(cols.end);
        for tile_rows in even_parts(rows.clone(), M_TILE) {
            let t = Tile { p, x: &x[tile_rows.start * k_padded..], k_padded, row: tile_rows.start, cols: &tile_cols };
            // SAFETY: by the caller's promise.
            unsafe {
                match tile_rows.len() {
                    1 => t.run::<1>(),
                    2 => t.run::<2>(),
                    _ => t.run::<M_TILE>(),
                }
            }
        }
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
}

impl Tile<'_> {
    /// Computes and stores `R` rows of x against 4 rows of w. Of a ragged tile the last w row stands in for the missing
    /// ones and the surplus is not stored.
    ///
    /// # Safety
    /// As for [`block`]; the tile lies inside the block and has `R` rows.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn run<const R: usize>(&self) {
        let k = self.p.k;
        let w: [*const bf16; N_TILE] =
            std::array::from_fn(|j| self.p.w[(self.cols.start + j).min(self.cols.end - 1) * k..].as_ptr());
        let mut acc = [[_mm256_setzero_ps(); N_TILE]; R];
        for step in 0..k / STEP {
            let at = step * STEP;
            for (j, w) in w.iter().enumerate() {
                // SAFETY: `at + 16 <= k`; x has R rows of k_padded elements; a prefetch may point anywhere.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(at + N_TILE * k).cast());
                    self.step(&mut acc, j, _mm256_loadu_si256(w.add(at).cast()), at);
                }
            }
        }
        if !k.is_multiple_of(STEP) {
            let at = k - k % STEP;
            for (j, w) in w.iter().enumerate() {
                let mut padded = [bf16::ZERO; STEP];
                // SAFETY: copies the `k - at` elements that are left of the row; x is padded with zeros to whole steps.
                unsafe {
                    w.add(at).copy_to_nonoverlapping(padded.as_mut_ptr(), k - at);
                    self.step(&mut acc, j, _mm256_loadu_si256(padded.as_ptr().cast()), at);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            // SAFETY: the elements lie inside the tile.
            unsafe { self.p.sink.put4((self.row + r) * self.p.n + self.cols.start, reduce(acc), self.cols.len()) };
        }
    }

    /// Adds the products of 16 elements of `k` from `at` on for w row `j` of the tile.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA; x has `R` rows of `k_padded` elements and `at + 16 <= k_padded`.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn step<const R: usize>(&self, acc: &mut [[__m256; N_TILE]; R], j: usize, raw: __m256i, at: usize) {
        let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw));
        let odd = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(0xffff_0000u32.cast_signed())));
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: in bounds by the caller's promise.
            let (x_even, x_odd) = unsafe {
                let x = self.x.as_ptr().add(r * self.k_padded + at);
                (_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8)))
            };
            acc[j] = _mm256_fmadd_ps(even, x_even, acc[j]);
            acc[j] = _mm256_fmadd_ps(odd, x_odd, acc[j]);
        }
    }
}

/// The lane sums of four accumulators, each by the same tree: lanes 4, 1 and 2 apart.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce(acc: &[__m256; N_TILE]) -> __m128 {
    let [a, b, c, d] = *acc;
    let ab = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
    let cd = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
    let pairs = _mm256_hadd_ps(ab, cd);
    let sums = _mm256_hadd_ps(pairs, pairs); // [a, c, a, c | b, d, b, d]
    _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
}
