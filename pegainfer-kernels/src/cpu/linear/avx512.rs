//! The AVX-512 path: w widened in registers, x widened once per call, two f32 FMAs per 32 elements of `k`.
//!
//! Why not `vdpbf16ps`: on Emerald Rapids it issues every second cycle (88 GFLOP/s a core measured at 2.9 GHz), the
//! f32 FMA twice a cycle (179). Widening takes a shift and a mask per 32 weights, shared by all rows of x in the tile,
//! so the bound is 153; 150 a core was measured on a quiet machine, `[512, 2560]` against `[9728, 2560]`. It also
//! needs no bf16 extension.

mod fp8;

use super::grid::{Grid, RowGroups};
use super::problem::Problem;
use crate::cpu::disjoint::Disjoint;
pub(super) use fp8::run as run_fp8;
use half::bf16;
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;
use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

/// Elements of `k` per step: one 64-byte load of w.
const STEP: usize = 32;
/// Rows of w in a tile.
const N_TILE: usize = 4;
/// Most rows of x in a tile: 6 x 4 accumulators, 4 widened w rows, an x row and a mask fit the 32 registers.
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
                let odd = _mm512_maskz_mov_epi16(ODD, raw);
                _mm512_storeu_ps(even_out[r * 16..][..16].as_mut_ptr(), widen_even(raw));
                _mm512_storeu_ps(odd_out[r * 16..][..16].as_mut_ptr(), _mm512_castsi512_ps(odd));
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
            // The first pass over a w tile fetches the next one: every line is asked for one tile ahead.
            let mut ahead = N_TILE * self.p.k;
            for group in groups.clone() {
                let rows = self.groups.rows(group);
                // SAFETY: by the caller's promise.
                unsafe { self.tile(rows, &cols, ahead) };
                ahead = 0;
            }
        }
    }

    /// Computes and stores one group of x rows against up to 4 rows of w. Of a ragged tile the last w row stands in
    /// for the missing ones and the surplus is not stored. `ahead`: prefetch distance in elements of w.
    ///
    /// # Safety
    /// As for [`Block::run`]; the tile lies inside the block.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn tile(&self, rows: Range<usize>, cols: &Range<usize>, ahead: usize) {
        let k = self.p.k;
        let w = std::array::from_fn(|j| self.p.w[(cols.start + j).min(cols.end - 1) * k..].as_ptr());
        let x = self.x[rows.start * self.k_padded..][..rows.len() * self.k_padded].as_ptr();
        let mut acc = Accumulators([[[0.0; 16]; N_TILE]; M_TILE]);
        let whole = k / STEP;
        // SAFETY: the rows of w have `whole` steps, those of x a padded one more.
        unsafe {
            if whole > 0 {
                add_products(rows.len(), w, x, whole, ahead, &mut acc);
            }
            if !k.is_multiple_of(STEP) {
                let tail = w.map(|w| {
                    let mut padded = [bf16::ZERO; STEP];
                    w.add(whole * STEP).copy_to_nonoverlapping(padded.as_mut_ptr(), k % STEP);
                    padded
                });
                let tail = std::array::from_fn(|j| tail[j].as_ptr());
                add_products(rows.len(), tail, x.add(rows.len() * whole * STEP), 1, 0, &mut acc);
            }
        }
        for (row, acc) in rows.zip(&acc.0) {
            // SAFETY: the elements lie inside the tile.
            unsafe { self.p.sink.put4(row * self.p.stride + cols.start, reduce(acc), cols.len()) };
        }
    }
}

/// 16 lanes for each pair of an x row and a w row of a tile.
#[repr(align(64))]
struct Accumulators([[[f32; 16]; N_TILE]; M_TILE]);

/// Adds the products of `steps` (at least 1) steps to the accumulators of the first `rows` x rows.
///
/// # Safety
/// The CPU has AVX-512 F; `rows` is at most [`M_TILE`]; `w` point to `[steps, 32]` bf16, `x` to `[steps, 2, rows, 16]`
/// f32.
unsafe fn add_products(
    rows: usize,
    w: [*const bf16; N_TILE],
    x: *const f32,
    steps: usize,
    ahead: usize,
    acc: &mut Accumulators,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        match rows {
            1 => add_products_1(w, x, steps, ahead, acc),
            2 => add_products_2(w, x, steps, ahead, acc),
            3 => add_products_3(w, x, steps, ahead, acc),
            4 => add_products_4(w, x, steps, ahead, acc),
            5 => add_products_5(w, x, steps, ahead, acc),
            _ => add_products_6(w, x, steps, ahead, acc),
        }
    }
}

/// Defines [`add_products`] for a number of x rows, given the accumulators of each. In assembly, because the compiler
/// (rustc 1.95) spills accumulators in every step when a tile needs most of the 32 registers: a third of the speed.
macro_rules! add_products {
    ($name:ident, $rows:literal, $([$r:literal $a:literal $b:literal $c:literal $d:literal])+) => {
        /// # Safety
        /// As for [`add_products`].
        unsafe fn $name(w: [*const bf16; N_TILE], x: *const f32, steps: usize, ahead: usize, acc: &mut Accumulators) {
            // SAFETY: reads w and x inside the bounds that the caller promises and the accumulators, which it writes
            // back; a prefetch may point anywhere.
            unsafe {
                asm!(
                    "mov {tmp:e}, 0xffff0000",
                    "vpbroadcastd zmm31, {tmp:e}",
                    $(
                        concat!("vmovaps zmm", $a, ", zmmword ptr [{acc} + 256*", $r, "]"),
                        concat!("vmovaps zmm", $b, ", zmmword ptr [{acc} + 256*", $r, " + 64]"),
                        concat!("vmovaps zmm", $c, ", zmmword ptr [{acc} + 256*", $r, " + 128]"),
                        concat!("vmovaps zmm", $d, ", zmmword ptr [{acc} + 256*", $r, " + 192]"),
                    )+
                    "2:",
                    "prefetcht0 byte ptr [{w0} + {ahead}]",
                    "prefetcht0 byte ptr [{w1} + {ahead}]",
                    "prefetcht0 byte ptr [{w2} + {ahead}]",
                    "prefetcht0 byte ptr [{w3} + {ahead}]",
                    // The even elements, moved up to where an f32 has its upper half.
                    "vpslld zmm24, zmmword ptr [{w0}], 16",
                    "vpslld zmm25, zmmword ptr [{w1}], 16",
                    "vpslld zmm26, zmmword ptr [{w2}], 16",
                    "vpslld zmm27, zmmword ptr [{w3}], 16",
                    $(
                        concat!("vmovaps zmm28, zmmword ptr [{x} + 64*", $r, "]"),
                        concat!("vfmadd231ps zmm", $a, ", zmm24, zmm28"),
                        concat!("vfmadd231ps zmm", $b, ", zmm25, zmm28"),
                        concat!("vfmadd231ps zmm", $c, ", zmm26, zmm28"),
                        concat!("vfmadd231ps zmm", $d, ", zmm27, zmm28"),
                    )+
                    // The odd elements, which are there already.
                    "vpandd zmm24, zmm31, zmmword ptr [{w0}]",
                    "vpandd zmm25, zmm31, zmmword ptr [{w1}]",
                    "vpandd zmm26, zmm31, zmmword ptr [{w2}]",
                    "vpandd zmm27, zmm31, zmmword ptr [{w3}]",
                    $(
                        concat!("vmovaps zmm28, zmmword ptr [{x} + 64*", $rows, " + 64*", $r, "]"),
                        concat!("vfmadd231ps zmm", $a, ", zmm24, zmm28"),
                        concat!("vfmadd231ps zmm", $b, ", zmm25, zmm28"),
                        concat!("vfmadd231ps zmm", $c, ", zmm26, zmm28"),
                        concat!("vfmadd231ps zmm", $d, ", zmm27, zmm28"),
                    )+
                    "add {w0}, 64",
                    "add {w1}, 64",
                    "add {w2}, 64",
                    "add {w3}, 64",
                    concat!("add {x}, 128*", $rows),
                    "dec {steps}",
                    "jnz 2b",
                    $(
                        concat!("vmovaps zmmword ptr [{acc} + 256*", $r, "], zmm", $a),
                        concat!("vmovaps zmmword ptr [{acc} + 256*", $r, " + 64], zmm", $b),
                        concat!("vmovaps zmmword ptr [{acc} + 256*", $r, " + 128], zmm", $c),
                        concat!("vmovaps zmmword ptr [{acc} + 256*", $r, " + 192], zmm", $d),
                    )+
                    w0 = inout(reg) w[0] => _, w1 = inout(reg) w[1] => _, w2 = inout(reg) w[2] => _, w3 = inout(reg) w[3] => _,
                    x = inout(reg) x => _, steps = inout(reg) steps => _,
                    ahead = in(reg) ahead * size_of::<bf16>(), acc = in(reg) acc, tmp = out(reg) _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm31") _,
                    options(nostack),
                );
            }
        }
    };
}

add_products!(add_products_1, 1, [0 0 1 2 3]);
add_products!(add_products_2, 2, [0 0 1 2 3] [1 4 5 6 7]);
add_products!(add_products_3, 3, [0 0 1 2 3] [1 4 5 6 7] [2 8 9 10 11]);
add_products!(add_products_4, 4, [0 0 1 2 3] [1 4 5 6 7] [2 8 9 10 11] [3 12 13 14 15]);
add_products!(add_products_5, 5, [0 0 1 2 3] [1 4 5 6 7] [2 8 9 10 11] [3 12 13 14 15] [4 16 17 18 19]);
add_products!(add_products_6, 6, [0 0 1 2 3] [1 4 5 6 7] [2 8 9 10 11] [3 12 13 14 15] [4 16 17 18 19] [5 20 21 22 23]);

/// The odd lanes of a step: bf16 in the upper half of a 32-bit lane is the f32 of the same value.
const ODD: __mmask32 = 0xaaaa_aaaa;

/// Mask of the first `len` (up to 32) 16-bit lanes.
pub(super) fn first(len: usize) -> __mmask32 {
    (((1u64) << len) - 1) as __mmask32
}

/// The even bf16 elements as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn widen_even(raw: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16))
}

/// The lane sums of four accumulators, each by the same tree: lanes 8, 4, 2 and 1 apart.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn reduce(acc: &[[f32; 16]; N_TILE]) -> __m128 {
    // SAFETY: loads of 16 f32 each.
    let [a, b, c, d] = acc.each_ref().map(|lanes| unsafe { _mm512_loadu_ps(lanes.as_ptr()) });
    // Lanes 8 apart: [a | b] and [c | d], 8 lanes each.
    let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
    // 4 apart: [a | b | c | d], 4 lanes each; then 2 and 1 apart inside these.
    let abcd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
    let pairs = _mm512_add_ps(abcd, _mm512_permute_ps::<0x4e>(abcd));
    let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0xb1>(pairs));
    _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums))
}
