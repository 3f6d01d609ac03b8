//! The AMX path: bf16 tile products, `[16 w rows, 32 k] x [32 k, 16 x rows]`, summed in f32 tiles.
//!
//! W rows are the left operand, which is plain row-major: the checkpoint's layout serves as it is. X is the right operand,
//! whose layout (VNNI: pairs of `k` side by side) it gets once per call. One x row or sixteen cost the same, but decode waits
//! for memory anyway, and one path for all `m` keeps the bits of a row the same in every batch.
//!
//! `tdpbf16ps` is written in assembly: the intrinsics are not stable. It flushes denormals.

use super::{Problem, Scratch, avx512::first, grid::Grid};
use rayon::prelude::*;
use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

/// Elements of `k` per tile product.
const STEP: usize = 32;
/// Steps per block of `k`: a staged panel then takes 32 KiB of the 48 KiB L1 and is reused by all x tiles of the task.
const BLOCK_STEPS: usize = 16;
/// Rows of w per panel: two tiles, so that each x tile that is loaded is used twice.
const N_TILE: usize = 32;
/// Columns of an x tile, which are rows of x.
const M_TILE: usize = 16;
/// u32 or f32 elements of a tile.
const TILE: usize = 256;
/// Most x tiles per task: bounds the sums that a task keeps on its stack (2 KiB per x tile).
const MOST_TILES: usize = 16;

/// `out = x * w^T`. Step `s` adds the products of `k = 32 s .. 32 s + 32` to an f32 sum, in the order that `tdpbf16ps` fixes (pair
/// after pair); missing elements of the last step are zero. The sum lives in a tile register or, between blocks of `k`, in
/// memory, which changes no bit.
pub(super) fn run(p: &Problem<'_>, scratch: &mut Scratch) {
    let steps = p.k.div_ceil(STEP);
    let tiles = p.m.div_ceil(M_TILE);
    let x = scratch.slice::<u32>(tiles * steps * TILE);
    pack(p, steps, x);
    let task = Task { p, x, steps };
    Grid::new(tiles, steps * TILE * 4, MOST_TILES, p.n, N_TILE).for_each(|tiles, cols| {
        // SAFETY: `linear` has checked that the CPU has AMX and AVX-512 and that the process may use tiles; the block lies
        // inside the problem.
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

/// What the tasks of one product share.
struct Task<'a> {
    p: &'a Problem<'a>,
    /// What [`pack`] made.
    x: &'a [u32],
    /// Steps that cover `k`.
    steps: usize,
}

/// A block of `k` of a panel, `[step, 32 w rows, 32 k]` bf16: what the left tiles are loaded from.
#[repr(C, align(64))]
struct Panel([[[u16; STEP]; N_TILE]; BLOCK_STEPS]);

/// The sums of a panel: for each x tile `[2, 16 w rows, 16 x rows]` f32.
#[repr(C, align(64))]
struct Sums([[f32; 2 * TILE]; MOST_TILES]);

impl Task<'_> {
    /// One task: w rows `cols` against some x tiles, which stay in L2. W is read once.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and AMX with permission; the block lies inside the problem and belongs to the calling
    /// task; at most [`MOST_TILES`] x tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run(&self, tiles: Range<usize>, cols: Range<usize>) {
        let mut panel = Panel([[[0; STEP]; N_TILE]; BLOCK_STEPS]);
        let mut sums = Sums([[0.0; 2 * TILE]; MOST_TILES]);
        // SAFETY: by the caller's promise.
        unsafe { configure_tiles() };
        for col in cols.clone().step_by(N_TILE) {
            let cols = col..(col + N_TILE).min(cols.end);
            sums.0[..tiles.len()].fill([0.0; 2 * TILE]);
            for first_step in (0..self.steps).step_by(BLOCK_STEPS) {
                let steps = first_step..(first_step + BLOCK_STEPS).min(self.steps);
                // SAFETY: by the caller's promise; tiles of x and the panel have the steps.
                unsafe {
                    self.stage(&mut panel, &cols, &steps);
                    for (i, sums) in sums.0[..tiles.len()].chunks_mut(2).enumerate() {
                        let x = |tile: usize| {
                            self.x[(tile * self.steps + steps.start) * TILE..][..steps.len() * TILE].as_ptr()
                        };
                        let tile = tiles.start + 2 * i;
                        match sums {
                            [a, b] => add_products_2(&panel, x(tile), x(tile + 1), steps.len(), a, b),
                            _ => add_products_1(&panel, x(tile), steps.len(), &mut sums[0]),
                        }
                    }
                }
            }
            for (tile, sums) in tiles.clone().zip(&sums.0) {
                // SAFETY: the elements belong to this task.
                unsafe { self.store(tile, &cols, sums) };
            }
        }
        // SAFETY: only gives the tile state back.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }

    /// Copies a block of `k` of the w rows `cols` to the panel and fetches the block that comes next. The copy makes tile
    /// loads aligned and free of cache-set conflicts whatever `k` and the file offset are, and pads with zeros.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and BW.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn stage(&self, panel: &mut Panel, cols: &Range<usize>, steps: &Range<usize>) {
        let k = self.p.k;
        // In elements from here: the same rows further on or, after the last block, the start of the next panel's rows.
        let ahead = if steps.end < self.steps { BLOCK_STEPS * STEP } else { N_TILE * k - steps.start * STEP };
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
                // SAFETY: the mask keeps the load inside the row, which has an element at `step * 32`; a prefetch may point
                // anywhere; a row of the panel has 64 bytes.
                unsafe {
                    let w = w.add(step * STEP);
                    _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add(ahead).cast());
                    _mm512_storeu_si512(out[row].as_mut_ptr().cast(), _mm512_maskz_loadu_epi16(mask, w.cast()));
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

/// Sets all eight tile registers to 16 rows of 64 bytes.
///
/// # Safety
/// The CPU has AMX and the process the permission to use it.
unsafe fn configure_tiles() {
    /// The operand of `ldtilecfg` (Intel SDM, vol. 1, 18.3).
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_per_row: [u16; 16],
        rows: [u8; 16],
    }
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
    config.bytes_per_row[..8].fill(64);
    config.rows[..8].fill(16);
    // SAFETY: reads the 64 bytes of the configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags)) };
}

/// Adds the products of a panel with two x tiles.
///
/// # Safety
/// The tiles are configured; the panel and the x tiles have `steps` (at least 1) steps.
unsafe fn add_products_2(
    panel: &Panel,
    x0: *const u32,
    x1: *const u32,
    steps: usize,
    sums0: &mut [f32; 2 * TILE],
    sums1: &mut [f32; 2 * TILE],
) {
    // SAFETY: reads the operands inside their bounds and updates the sums.
    unsafe {
        asm!(
            "tileloadd tmm0, [{s0} + {row}*1]",
            "tileloadd tmm1, [{s0} + {row}*1 + 1024]",
            "tileloadd tmm2, [{s1} + {row}*1]",
            "tileloadd tmm3, [{s1} + {row}*1 + 1024]",
            "2:",
            "tileloadd tmm4, [{w} + {row}*1]",
            "tileloadd tmm6, [{x0} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{w} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "tileloadd tmm7, [{x1} + {row}*1]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {w}, 2048",
            "add {x0}, 1024",
            "add {x1}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{s0} + {row}*1], tmm0",
            "tilestored [{s0} + {row}*1 + 1024], tmm1",
            "tilestored [{s1} + {row}*1], tmm2",
            "tilestored [{s1} + {row}*1 + 1024], tmm3",
            w = inout(reg) panel as *const Panel => _,
            x0 = inout(reg) x0 => _,
            x1 = inout(reg) x1 => _,
            steps = inout(reg) steps => _,
            s0 = in(reg) sums0.as_mut_ptr(),
            s1 = in(reg) sums1.as_mut_ptr(),
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Adds the products of a panel with one x tile.
///
/// # Safety
/// As for [`add_products_2`].
unsafe fn add_products_1(panel: &Panel, x: *const u32, steps: usize, sums: &mut [f32; 2 * TILE]) {
    // SAFETY: reads the operands inside their bounds and updates the sums.
    unsafe {
        asm!(
            "tileloadd tmm0, [{s} + {row}*1]",
            "tileloadd tmm1, [{s} + {row}*1 + 1024]",
            "2:",
            "tileloadd tmm6, [{x} + {row}*1]",
            "tileloadd tmm4, [{w} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{w} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "add {w}, 2048",
            "add {x}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{s} + {row}*1], tmm0",
            "tilestored [{s} + {row}*1 + 1024], tmm1",
            w = inout(reg) panel as *const Panel => _,
            x = inout(reg) x => _,
            steps = inout(reg) steps => _,
            s = in(reg) sums.as_mut_ptr(),
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// Transposes a 16 x 16 matrix of 32-bit elements.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut out = rows;
    // Inside 128-bit lanes: quads[4 i + j], lane b holds rows 4 i .. 4 i + 4 of column 4 b + j.
    let mut quads = rows;
    for (rows, quads) in rows.as_chunks::<4>().0.iter().zip(quads.as_chunks_mut::<4>().0) {
        let [a, b, c, d] = *rows;
        let (ab_low, cd_low) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        quads[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
        quads[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
        quads[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
        quads[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
    // A 4 x 4 transposition of the lanes.
    for j in 0..4 {
        let [a, b, c, d] = [quads[j], quads[4 + j], quads[8 + j], quads[12 + j]];
        let (ab_even, cd_even) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d));
        let (ab_odd, cd_odd) = (_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d));
        out[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transpose_swaps_rows_and_columns() {
        if !crate::cpu::isa::Isa::Avx512.is_available() {
            return;
        }
        let cell = |row: usize, col: usize| (row * 16 + col) as u32;
        let input: [[u32; 16]; 16] = std::array::from_fn(|row| std::array::from_fn(|col| cell(row, col)));
        let mut output = [[0u32; 16]; 16];
        // SAFETY: the CPU has AVX-512 F; every row has 64 bytes.
        unsafe {
            let rows = input.each_ref().map(|row| _mm512_loadu_si512(row.as_ptr().cast()));
            for (row, out) in transpose(rows).into_iter().zip(&mut output) {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), row);
            }
        }
        assert_eq!(output, std::array::from_fn(|row| std::array::from_fn(|col| cell(col, row))));
    }
}
