//! FP8 weights: a tile of four rows is widened to bf16 in a buffer, which all x rows then read.

use super::super::grid::{Grid, RowGroups};
use super::super::problem::{Fp8, Problem};
use super::{M_TILE, N_TILE, STEP, reduce, step, widen_rows};
use crate::cpu::weights::{BLOCK, widen_e4m3};
use half::bf16;
use pegainfer_core::scratch::Scratch;
use std::{arch::x86_64::*, ops::Range};

/// `out = x * w^T`; the sum of a block is that of `run` for bf16.
pub(crate) fn run(p: &Problem<'_, Fp8<'_>>, scratch: &mut Scratch) {
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

/// Operands and layout that the tasks of one GEMM share.
struct Block<'a> {
    p: &'a Problem<'a, Fp8<'a>>,
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
        let k = self.p.k;
        let mut w = vec![bf16::ZERO; N_TILE * self.k_padded];
        for col in cols.clone().step_by(N_TILE) {
            let cols = col..(col + N_TILE).min(cols.end);
            for (col, w) in cols.clone().zip(w.chunks_exact_mut(self.k_padded)) {
                widen_e4m3(&self.p.w.codes[col * k..][..k], w);
            }
            for group in groups.clone() {
                let rows = self.groups.rows(group);
                // SAFETY: by the caller's promise.
                unsafe {
                    match rows.len() {
                        1 => self.tile::<1>(rows.start, &cols, &w),
                        _ => self.tile::<M_TILE>(rows.start, &cols, &w),
                    }
                }
            }
        }
    }

    /// Computes and stores the `R` x rows from `row` on against 4 rows of `w`; those beyond `cols` are not stored.
    ///
    /// # Safety
    /// As for [`Block::run`]; the tile lies inside the block; `w` has 4 rows of `k_padded`.
    #[target_feature(enable = "avx2,fma")]
    #[inline(never)]
    unsafe fn tile<const R: usize>(&self, row: usize, cols: &Range<usize>, w: &[bf16]) {
        let x: [*const f32; R] = std::array::from_fn(|r| self.x[(row + r) * self.k_padded..].as_ptr());
        let mut sums = [_mm_setzero_ps(); R];
        for (b, first) in (0..self.k_padded).step_by(BLOCK).enumerate() {
            let mut acc = [[_mm256_setzero_ps(); N_TILE]; R];
            for at in (first..(first + BLOCK).min(self.k_padded)).step_by(STEP) {
                for (j, w) in w.chunks_exact(self.k_padded).enumerate() {
                    // SAFETY: `at + 16 <= k_padded`, which is the length of the rows of x and w.
                    acc = unsafe { step(acc, j, _mm256_loadu_si256(w.as_ptr().add(at).cast()), x, at) };
                }
            }
            let scale = _mm_set1_ps(self.p.w.scale(cols.start, b, self.p.k));
            for (sum, acc) in sums.iter_mut().zip(acc) {
                *sum = _mm_fmadd_ps(reduce(acc), scale, *sum);
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            // SAFETY: the elements lie inside the tile.
            unsafe { self.p.sink.put4((row + r) * self.p.stride + cols.start, sum, cols.len()) };
        }
    }
}
