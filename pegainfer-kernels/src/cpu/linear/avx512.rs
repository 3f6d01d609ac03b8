//! The AVX-512 path: w widened in registers, x widened once per call, two f32 FMAs per 32 elements of `k`.
//!
//! `vdpbf16ps` is not used: on Emerald Rapids it issues every second cycle (88 GFLOP/s per core measured at 2.9 GHz),
//! the f32 FMA twice per cycle (179). Widening takes a shift and a mask per 32 weights, shared by all rows of x in the
//! tile, which lowers the bound to 153. On a quiet machine 150 per core were measured, `[512, 2560]` against `[9728,
//! 2560]`, with the same instructions in another order. It also needs no bf16 extension. On Zen 5 both issue twice per
//! cycle, so `vdpbf16ps` would do twice the work, with different rounding; 215 GFLOP/s per core were measured here,
//! `[256, 1024]` against `[6144, 1024]`.

mod fp8;

use super::grid::{Grid, RowGroups};
use super::problem::Problem;
use crate::cpu::disjoint::Disjoint;
pub(super) use fp8::run as run_fp8;
use half::bf16;
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;
use std::{arch::x86_64::*, ops::Range};

/// Elements of `k` per step: one 64-byte load of w.
const STEP: usize = 32;
/// Rows of w in a tile.
const N_TILE: usize = 4;
/// Maximum number of rows of x in a tile: 6 x 4 accumulators, 4 widened w rows, an x row and a mask fit the 32
/// registers.
const M_TILE: usize = 6;

/// `out = x * w^T`. An output has one accumulator of 16 lanes. Step `s` adds first the products of the even elements
/// of `k = 32 s .. 32 s + 32` (lane `l`: element `32 s + 2 l`), then those of the odd ones, by FMA; missing elements
/// of the last step are zero. The lanes are then added in halves: 8, 4, 2, 1 apart.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
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

/// Widens x into groups of `[k_padded / 32, 2, rows, 16]` f32, so that a tile reads its x rows as one stream: per step
/// the even elements of all rows, then the odd ones, zero-padded.
fn widen<W: Sync>(p: &Problem<'_, W>, groups: RowGroups, k_padded: usize, out: &mut [f32]) {
    let out = Disjoint::new(out);
    team::for_each(groups.count(), |i| {
        let rows = groups.rows(i);
        let x = &p.x[rows.start * p.k..rows.end * p.k];
        // SAFETY: groups are disjoint; `linear` has checked the CPU.
        unsafe { widen_group(x, p.k, out.slice(rows.start * k_padded, rows.len() * k_padded)) }
    });
}

/// # Safety
/// The CPU has AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn widen_group(x: &[bf16], k: usize, out: &mut [f32]) {
    let rows = x.len().checked_div(k).unwrap_or(0);
    for (r, x) in x.chunks_exact(k.max(1)).enumerate() {
        for (x, out) in x.chunks(STEP).zip(out.chunks_exact_mut(rows * STEP)) {
            let (even_out, odd_out) = out.split_at_mut(rows * 16);
            // SAFETY: the mask keeps the load inside `x`; the slices have 16 elements.
            unsafe {
                let raw = _mm512_maskz_loadu_epi16(first(x.len()), x.as_ptr().cast());
                let [even, odd] = widen_pairs(raw);
                _mm512_storeu_ps(even_out[r * 16..][..16].as_mut_ptr(), even);
                _mm512_storeu_ps(odd_out[r * 16..][..16].as_mut_ptr(), odd);
            }
        }
    }
}

/// Operands and layout that the tasks of one GEMM share.
struct Block<'a> {
    p: &'a Problem<'a>,
    groups: RowGroups,
    /// Output of [`widen`].
    x: &'a [f32],
    k_padded: usize,
}

impl Block<'_> {
    /// One task: w rows `cols` against some groups of x rows, which stay in L2. Each w tile is read once from memory
    /// and then from L1.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL; the block lies inside the problem and belongs to the calling task.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run(&self, groups: Range<usize>, cols: Range<usize>) {
        for col in cols.clone().step_by(N_TILE) {
            let cols = col..(col + N_TILE).min(cols.end);
            for (i, group) in groups.clone().enumerate() {
                // The groups share the prefetches of the next w tile: every line is fetched once, one tile ahead.
                let fetchers = groups.len().min(N_TILE);
                let ahead = std::array::from_fn(|j| if j * fetchers / N_TILE == i { N_TILE * self.p.k } else { 0 });
                let rows = self.groups.rows(group);
                // SAFETY: by the caller's promise.
                unsafe {
                    match rows.len() {
                        1 => self.tile::<1>(rows.start, &cols, ahead),
                        2 => self.tile::<2>(rows.start, &cols, ahead),
                        3 => self.tile::<3>(rows.start, &cols, ahead),
                        4 => self.tile::<4>(rows.start, &cols, ahead),
                        5 => self.tile::<5>(rows.start, &cols, ahead),
                        _ => self.tile::<M_TILE>(rows.start, &cols, ahead),
                    }
                }
            }
        }
    }

    /// Computes and stores the group of `R` x rows from `row` on against up to 4 rows of w. In a ragged tile the last w
    /// row replaces missing ones, and surplus results are not stored. `ahead`: prefetch distance of each row in
    /// elements of w.
    ///
    /// # Safety
    /// See [`Block::run`]; the tile lies inside the block.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn tile<const R: usize>(&self, row: usize, cols: &Range<usize>, ahead: [usize; N_TILE]) {
        let k = self.p.k;
        let w: [*const bf16; N_TILE] =
            std::array::from_fn(|j| self.p.w[(cols.start + j).min(cols.end - 1) * k..].as_ptr());
        let x = &self.x[row * self.k_padded..][..R * self.k_padded];
        let (x, x_tail) = x.split_at(R * (k - k % STEP));
        let load = |step: usize, j: usize| {
            // SAFETY: the row has the step; a prefetch may point anywhere.
            unsafe {
                let w = w[j].add(step * STEP);
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead[j]).cast());
                widen_pairs(_mm512_loadu_si512(w.cast()))
            }
        };
        // SAFETY: the mask keeps the load inside the row.
        let load_tail = |_: usize, j: usize| unsafe {
            widen_pairs(_mm512_maskz_loadu_epi16(first(k % STEP), w[j].add(k - k % STEP).cast()))
        };
        let acc = add_products([[_mm512_setzero_ps(); N_TILE]; R], x, load);
        let acc = add_products(acc, x_tail, load_tail);
        for (r, acc) in acc.into_iter().enumerate() {
            // SAFETY: the elements lie inside the tile.
            unsafe { self.p.sink.put4((row + r) * self.p.stride + cols.start, reduce(acc), cols.len()) };
        }
    }
}

/// Adds the products of `R` rows of x, `[steps, 2, R, 16]`, and the four rows of a tile of w to `acc`, which has 16
/// lanes for each pair of rows. `load(step, j)`: even and odd elements of a step of row `j` of w. Arrays are passed by
/// value, and the even halves of all w rows come before the odd ones, so that the compiler (rustc 1.95) keeps six rows
/// of accumulators in registers.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_products<const R: usize>(
    mut acc: [[__m512; N_TILE]; R],
    x: &[f32],
    load: impl Fn(usize, usize) -> [__m512; 2],
) -> [[__m512; N_TILE]; R] {
    for (step, x) in x.chunks_exact(2 * R * 16).enumerate() {
        let w: [[__m512; 2]; N_TILE] = std::array::from_fn(|j| load(step, j));
        for (half, x) in x.chunks_exact(R * 16).enumerate() {
            for (acc, x) in acc.iter_mut().zip(x.chunks_exact(16)) {
                // SAFETY: 16 f32.
                let x = unsafe { _mm512_loadu_ps(x.as_ptr()) };
                acc.iter_mut().zip(w).for_each(|(acc, w)| *acc = _mm512_fmadd_ps(w[half], x, *acc));
            }
        }
    }
    acc
}

/// Mask of the first `len` (up to 32) 16-bit lanes.
pub(super) fn first(len: usize) -> __mmask32 {
    (((1u64) << len) - 1) as __mmask32
}

/// The even and the odd ones of 32 bf16 elements as f32: bf16 in the upper half of a 32-bit lane is the f32 of the same
/// value.
#[target_feature(enable = "avx512f")]
#[inline]
fn widen_pairs(raw: __m512i) -> [__m512; 2] {
    let odd = _mm512_and_si512(raw, _mm512_set1_epi32(0xffff_0000u32.cast_signed()));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw)), _mm512_castsi512_ps(odd)]
}

/// The lane sums of four accumulators, each by the same tree: lanes 8, 4, 2 and 1 apart.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn reduce([a, b, c, d]: [__m512; N_TILE]) -> __m128 {
    // Lanes 8 apart: [a | b] and [c | d], 8 lanes each.
    let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
    // 4 apart: [a | b | c | d], 4 lanes each; then 2 and 1 apart inside these.
    let abcd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
    let pairs = _mm512_add_ps(abcd, _mm512_permute_ps::<0x4e>(abcd));
    let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0xb1>(pairs));
    _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums))
}
