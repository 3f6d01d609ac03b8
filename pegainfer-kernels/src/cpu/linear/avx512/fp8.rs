//! FP8 weights: a tile of four rows is widened to bf16 in a buffer, which all x rows then read.

use super::super::grid::{Grid, RowGroups};
use super::super::problem::{Fp8, Problem};
use super::{Accumulators, M_TILE, N_TILE, STEP, add_products, reduce, widen};
use crate::cpu::weights::{BLOCK, widen_e4m3};
use half::bf16;
use pegainfer_core::scratch::Scratch;
use std::{arch::x86_64::*, ops::Range};

/// `out = x * w^T`; the sum of a block is that of `run` for bf16.
pub(crate) fn run(p: &Problem<'_, Fp8<'_>>, scratch: &mut Scratch) {
    let k_padded = p.k.next_multiple_of(STEP);
    let groups = RowGroups::new(p.m, M_TILE);
    let x = scratch.slice::<f32>(p.m * k_padded);
    widen(p, groups, k_padded, x);
    let block = Block { p, groups, x, k_padded };
    Grid::new(groups.count(), groups.rows(0).len() * k_padded * 4, usize::MAX, p.n, N_TILE).for_each(|groups, cols| {
        // SAFETY: `linear` has checked that the CPU has AVX-512 F, BW and VL; the block lies inside the problem.
        unsafe { block.run(groups, cols) }
    });
}

/// Operands and layout that the tasks of one GEMM share.
struct Block<'a> {
    p: &'a Problem<'a, Fp8<'a>>,
    groups: RowGroups,
    /// Output of [`widen`].
    x: &'a [f32],
    k_padded: usize,
}

impl Block<'_> {
    /// One task: w rows `cols` against some groups of x rows, which stay in L2.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL; the block lies inside the problem and belongs to the calling task.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
    unsafe fn run(&self, groups: Range<usize>, cols: Range<usize>) {
        let k = self.p.k;
        let mut w = vec![bf16::ZERO; N_TILE * self.k_padded];
        for col in cols.clone().step_by(N_TILE) {
            let cols = col..(col + N_TILE).min(cols.end);
            for (col, w) in cols.clone().zip(w.chunks_exact_mut(self.k_padded)) {
                widen_e4m3(&self.p.w.codes[col * k..][..k], w);
            }
            for group in groups.clone() {
                // SAFETY: by the caller's promise.
                unsafe { self.tile(self.groups.rows(group), &cols, &w) };
            }
        }
    }

    /// Computes and stores one group of x rows against 4 rows of `w`; those beyond `cols` are not stored.
    ///
    /// # Safety
    /// As for [`Block::run`]; the tile lies inside the block; `w` has 4 rows of `k_padded`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
    unsafe fn tile(&self, rows: Range<usize>, cols: &Range<usize>, w: &[bf16]) {
        let x = &self.x[rows.start * self.k_padded..][..rows.len() * self.k_padded];
        let mut sums = [_mm_setzero_ps(); M_TILE];
        for (b, first) in (0..self.k_padded).step_by(BLOCK).enumerate() {
            let (steps, x) = (BLOCK.min(self.k_padded - first) / STEP, x[rows.len() * first..].as_ptr());
            let w = std::array::from_fn(|j| w[j * self.k_padded + first..].as_ptr());
            let mut acc = Accumulators([[[0.0; 16]; N_TILE]; M_TILE]);
            // SAFETY: rows of x and w have these steps from `first` on, at least one.
            unsafe { add_products(rows.len(), w, x, steps, 0, &mut acc) };
            let scale = _mm_set1_ps(self.p.w.scale(cols.start, b, self.p.k));
            for (sum, acc) in sums.iter_mut().zip(&acc.0[..rows.len()]) {
                *sum = _mm_fmadd_ps(reduce(acc), scale, *sum);
            }
        }
        for (row, sum) in rows.zip(sums) {
            // SAFETY: the elements lie inside the tile.
            unsafe { self.p.sink.put4(row * self.p.stride + cols.start, sum, cols.len()) };
        }
    }
}
