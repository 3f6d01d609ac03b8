//! FP8 weights: the scheme of the AVX-512 path with 8 lanes. With one group of x rows, codes are widened to f32 in
//! registers for the FMAs. With more, a block of 128 along `k` of a tile of four w rows is widened into a buffer in L1,
//! which all groups then read.

use super::super::grid::{Grid, RowGroups};
use super::super::problem::{Fp8, Problem};
use super::{M_TILE, N_TILE, STEP, reduce, widen_rows};
use crate::cpu::weights::BLOCK;
use pegainfer_core::scratch::Scratch;
use std::{arch::x86_64::*, ops::Range};

/// Codes, at least, between the prefetch of a cache line and its use; rounded up to whole tiles of w.
const AHEAD: usize = 16 << 10;
/// Codes of a cache line.
const LINE: usize = 64;

/// A step of a tile of w as f32: the even elements of its four rows, then the odd ones.
type Step = [[[f32; 8]; N_TILE]; 2];

/// A block of `k` of a tile of w.
#[repr(C, align(64))]
struct Panel([Step; BLOCK / STEP]);

impl Panel {
    /// The even and the odd elements of a step of row `j`.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn load(&self, step: usize, j: usize) -> [__m256; 2] {
        let [even, odd] = &self.0[step];
        // SAFETY: 8 f32 each, at multiples of 32 bytes.
        unsafe { [_mm256_load_ps(even[j].as_ptr()), _mm256_load_ps(odd[j].as_ptr())] }
    }
}

/// `out = x * w^T`; the sum of a block is that of `run` for bf16.
pub(crate) fn run(p: &Problem<'_, Fp8<'_>>, scratch: &mut Scratch) {
    let k_padded = p.k.next_multiple_of(STEP);
    let groups = RowGroups::new(p.m, M_TILE);
    let x = scratch.slice::<f32>(p.m * k_padded);
    widen_rows(p, k_padded, x);
    let task = Task { p, groups, x, k_padded };
    Grid::new(groups.count(), groups.rows(0).len() * k_padded * 4, usize::MAX, p.n, N_TILE).for_each(|groups, cols| {
        // SAFETY: `linear` has checked that the CPU has AVX2 and FMA; the block lies inside the problem.
        unsafe { task.run(groups, cols) }
    });
}

/// Operands and layout that the tasks of one GEMM share.
struct Task<'a> {
    p: &'a Problem<'a, Fp8<'a>>,
    groups: RowGroups,
    /// Widened x, `[m, k_padded / 16, 2, 8]`.
    x: &'a [f32],
    k_padded: usize,
}

impl Task<'_> {
    /// One task: w rows `cols` against some groups of x rows. Codes are read once from memory.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA; the block lies inside the problem and belongs to the calling task.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn run(&self, groups: Range<usize>, cols: Range<usize>) {
        let k = self.p.k;
        let ahead = AHEAD.next_multiple_of(N_TILE * k);
        let rows = self.groups.rows(groups.start).start..self.groups.rows(groups.end - 1).end;
        let mut panel = Panel([[[[0.0; 8]; N_TILE]; 2]; BLOCK / STEP]);
        let mut sums = vec![_mm_setzero_ps(); rows.len()];
        for col in cols.clone().step_by(N_TILE) {
            let cols = col..(col + N_TILE).min(cols.end);
            sums.fill(_mm_setzero_ps());
            for start in (0..k).step_by(BLOCK) {
                // The last w row stands in for the missing ones of a ragged tile.
                let w = std::array::from_fn(|j| self.p.w.codes[(col + j).min(cols.end - 1) * k + start..].as_ptr());
                let block = Block { w, start, len: BLOCK.min(k - start), scale: self.p.w.scale(col, start / BLOCK, k) };
                block.fetch(ahead);
                // SAFETY: by the caller's promise; the rows of w have `len` codes from `start` on.
                unsafe {
                    if groups.len() == 1 && block.len == BLOCK {
                        self.add_group(&block, rows.clone(), |step, j| block.load(step, j), &mut sums);
                    } else {
                        block.stage(&mut panel);
                        for group in groups.clone() {
                            let group = self.groups.rows(group);
                            let sums = &mut sums[group.start - rows.start..][..group.len()];
                            self.add_group(&block, group, |step, j| panel.load(step, j), sums);
                        }
                    }
                }
            }
            for (row, sums) in rows.clone().zip(&sums) {
                // SAFETY: the elements belong to this task.
                unsafe { self.p.sink.put4(row * self.p.stride + col, *sums, cols.len()) };
            }
        }
    }

    /// Adds the scaled products of a block with a group of x rows to their `sums`, one per row. `load(step, j)`: even
    /// and odd elements of a step of row `j` of the tile.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA; the rows are those of a group.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn add_group(
        &self,
        block: &Block,
        rows: Range<usize>,
        load: impl Fn(usize, usize) -> [__m256; 2],
        sums: &mut [__m128],
    ) {
        let x = |row: usize| {
            let x = &self.x[row * self.k_padded + block.start..][..block.len.next_multiple_of(STEP)];
            x.as_chunks::<STEP>().0
        };
        match rows.len() {
            1 => add_scaled([x(rows.start)], load, block.scale, sums),
            _ => add_scaled([x(rows.start), x(rows.start + 1)], load, block.scale, sums),
        }
    }
}

/// `sums[r] += scale * (x[r] * w^T)` for `R` rows of x, `[steps, 2, 8]`, and the four rows of a tile of w.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_scaled<const R: usize>(
    x: [&[[f32; STEP]]; R],
    load: impl Fn(usize, usize) -> [__m256; 2],
    scale: f32,
    sums: &mut [__m128],
) {
    let mut acc = [[_mm256_setzero_ps(); N_TILE]; R];
    for (step, _) in x[0].iter().enumerate() {
        let x = x.map(|x| {
            let (even, odd) = x[step].split_at(STEP / 2);
            // SAFETY: 8 f32 each.
            unsafe { [_mm256_loadu_ps(even.as_ptr()), _mm256_loadu_ps(odd.as_ptr())] }
        });
        let add = |j: usize| {
            let [even, odd] = load(step, j);
            acc.iter_mut().zip(x).for_each(|(acc, [x_even, x_odd])| {
                acc[j] = _mm256_fmadd_ps(odd, x_odd, _mm256_fmadd_ps(even, x_even, acc[j]));
            });
        };
        (0..N_TILE).for_each(add);
    }
    for (sum, acc) in sums.iter_mut().zip(acc) {
        *sum = _mm_fmadd_ps(reduce(acc), _mm_set1_ps(scale), *sum);
    }
}

/// A block of `k` of a tile of w.
struct Block {
    /// Codes of the four rows from `start` on.
    w: [*const u8; N_TILE],
    start: usize,
    /// Codes of a row.
    len: usize,
    scale: f32,
}

impl Block {
    /// Prefetches the cache lines `ahead` codes after those of a whole block.
    fn fetch(&self, ahead: usize) {
        for w in self.w {
            for line in (0..BLOCK).step_by(LINE) {
                // SAFETY: a prefetch may point anywhere and has no visible effect; SSE is available.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead + line).cast()) };
            }
        }
    }

    /// The even and the odd elements of a whole step of row `j`.
    ///
    /// # Safety
    /// The CPU has AVX2; the row has the step.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn load(&self, step: usize, j: usize) -> [__m256; 2] {
        // SAFETY: by the caller's promise.
        widen_codes(unsafe { _mm_loadu_si128(self.w[j].add(step * STEP).cast()) })
    }

    /// Widens the block into a panel, padded with zeros.
    ///
    /// # Safety
    /// The CPU has AVX2; the rows have the codes.
    #[target_feature(enable = "avx2")]
    unsafe fn stage(&self, panel: &mut Panel) {
        for (j, w) in self.w.into_iter().enumerate() {
            for (step, out) in panel.0.iter_mut().enumerate() {
                let len = self.len.saturating_sub(step * STEP).min(STEP);
                // SAFETY: a whole block has every step; otherwise `len` codes lie inside the row; an element of the
                // panel has 8 f32.
                unsafe {
                    let [even, odd] = if self.len == BLOCK {
                        self.load(step, j)
                    } else {
                        let mut padded = [0u8; STEP];
                        w.wrapping_add(step * STEP).copy_to_nonoverlapping(padded.as_mut_ptr(), len);
                        widen_codes(_mm_loadu_si128(padded.as_ptr().cast()))
                    };
                    _mm256_store_ps(out[0][j].as_mut_ptr(), even);
                    _mm256_store_ps(out[1][j].as_mut_ptr(), odd);
                }
            }
        }
    }
}

/// The even and the odd ones of 16 codes, none of them NaN, as f32, exactly.
#[target_feature(enable = "avx2")]
#[inline]
fn widen_codes(codes: __m128i) -> [__m256; 2] {
    let pairs = _mm256_cvtepi8_epi16(codes);
    [_mm256_slli_epi32::<20>(pairs), _mm256_slli_epi32::<4>(pairs)].map(|bits| {
        // The sign and, as the upper bits of an f32, the code: its exponent is smaller by the difference of the biases.
        // The product is exact also for subnormals.
        let bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x87f0_0000u32.cast_signed()));
        _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(_mm256_set1_epi32((127 + 127 - 7) << 23)))
    })
}
