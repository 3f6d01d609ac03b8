//! The AVX2 path: the scheme of the AVX-512 path with 8 lanes, for desktops and older servers.

mod fp8;

use super::grid::{Grid, RowGroups};
use super::problem::Problem;
pub(super) use fp8::run as run_fp8;
use half::bf16;
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;
use std::{arch::x86_64::*, ops::Range};

/// Elements of `k` per step: one 32-byte load of w.
const STEP: usize = 16;
/// Rows of w in a tile.
const N_TILE: usize = 4;
/// Maximum number of rows of x in a tile: 4 x 2 accumulators, 2 widened x rows and a widened w row fit the 16
/// registers.
const M_TILE: usize = 2;

/// `out = x * w^T`. An output has one accumulator of 8 lanes. Step `s` adds first the products of the even elements of
/// `k = 16 s .. 16 s + 16` (lane `l`: element `16 s + 2 l`), then those of the odd ones, by FMA; missing elements of
/// the last step are zero. The lanes are then added 4, 1 and 2 apart.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
    let k_padded = p.k.next_multiple_of(STEP);
    let groups = RowGroups::new(p.m, M_TILE);
    let x = scratch.slice::<f32>(p.m * k_padded);
    widen_rows(p, k_padded, x);
    let block = Block { p, groups, x, k_padded };
    Grid::new(groups.count(), groups.rows(0).len() * k_padded * 4, usize::MAX, p.n, N_TILE).for_each(|groups, cols| {
        // SAFETY: `linear` has checked that the CPU has AVX2 and FMA; the block lies inside the problem.
        unsafe { block.run(groups, cols) }
    });
}

/// Widens the rows of x, to `k_padded` elements each.
fn widen_rows<W: Sync>(p: &Problem<'_, W>, k_padded: usize, out: &mut [f32]) {
    if k_padded > 0 {
        team::for_each_chunk(out, k_padded, |row, out| widen_row(&p.x[row * p.k..][..p.k], out));
    }
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

/// Operands and layout that the tasks of one GEMM share.
struct Block<'a> {
    p: &'a Problem<'a>,
    groups: RowGroups,
    /// Widened x, `[m, k_padded / 16, 2, 8]`.
    x: &'a [f32],
    k_padded: usize,
}

impl Block<'_> {
    /// One task: w rows `cols` against some groups of x rows.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA; the block lies inside the problem and belongs to the calling task.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn run(&self, groups: Range<usize>, cols: Range<usize>) {
        for col in cols.clone().step_by(N_TILE) {
            let cols = col..(col + N_TILE).min(cols.end);
            for group in groups.clone() {
                let rows = self.groups.rows(group);
                // SAFETY: by the caller's promise.
                unsafe {
                    match rows.len() {
                        1 => self.tile::<1>(rows.start, &cols),
                        _ => self.tile::<M_TILE>(rows.start, &cols),
                    }
                }
            }
        }
    }

    /// Computes and stores the `R` x rows from `row` on against 4 rows of w. In a ragged tile the last w row replaces
    /// missing ones, and surplus results are not stored.
    ///
    /// # Safety
    /// See [`Block::run`]; the tile lies inside the block.
    #[target_feature(enable = "avx2,fma")]
    #[inline(never)]
    unsafe fn tile<const R: usize>(&self, row: usize, cols: &Range<usize>) {
        let k = self.p.k;
        let w: [*const bf16; N_TILE] =
            std::array::from_fn(|j| self.p.w[(cols.start + j).min(cols.end - 1) * k..].as_ptr());
        let x: [*const f32; R] = std::array::from_fn(|r| self.x[(row + r) * self.k_padded..].as_ptr());
        let mut acc = [[_mm256_setzero_ps(); N_TILE]; R];
        let mut at = 0;
        while at + STEP <= k {
            for (j, &w) in w.iter().enumerate() {
                // SAFETY: `at + 16 <= k`; the x rows have k_padded elements; a prefetch may point anywhere.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(at + N_TILE * k).cast());
                    acc = step(acc, j, _mm256_loadu_si256(w.add(at).cast()), x, at);
                }
            }
            at += STEP;
        }
        if at < k {
            for (j, &w) in w.iter().enumerate() {
                let mut padded = [bf16::ZERO; STEP];
                // SAFETY: copies the `k - at` elements that are left of the row; x is padded with zeros to whole
                // steps.
                unsafe {
                    w.add(at).copy_to_nonoverlapping(padded.as_mut_ptr(), k - at);
                    acc = step(acc, j, _mm256_loadu_si256(padded.as_ptr().cast()), x, at);
                }
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            // SAFETY: the elements lie inside the tile.
            unsafe { self.p.sink.put4((row + r) * self.p.stride + cols.start, reduce(acc), cols.len()) };
        }
    }
}

/// Adds the products of 16 elements of `k` from `at` on for w row `j` of the tile. Arrays are passed by value so that
/// they stay in registers.
///
/// # Safety
/// The CPU has AVX2 and FMA; the x rows have `at + 16` elements.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn step<const R: usize>(
    mut acc: [[__m256; N_TILE]; R],
    j: usize,
    raw: __m256i,
    x: [*const f32; R],
    at: usize,
) -> [[__m256; N_TILE]; R] {
    let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw));
    let odd = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(0xffff_0000u32.cast_signed())));
    for r in 0..R {
        // SAFETY: in bounds by the caller's promise.
        unsafe {
            acc[r][j] = _mm256_fmadd_ps(even, _mm256_loadu_ps(x[r].add(at)), acc[r][j]);
            acc[r][j] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(x[r].add(at + 8)), acc[r][j]);
        }
    }
    acc
}

/// The lane sums of four accumulators, each by the same tree: lanes 4, 1 and 2 apart.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce([a, b, c, d]: [__m256; N_TILE]) -> __m128 {
    let ab = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
    let cd = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
    let pairs = _mm256_hadd_ps(ab, cd);
    let sums = _mm256_hadd_ps(pairs, pairs); // [a, c, a, c | b, d, b, d]
    _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
}
