//! FP8 weights: codes are widened to bf16 in registers and written to the panel that tiles are loaded from, a block of
//! 128 along `k` at a time. The tile sums of a block are scaled and added to f32 sums in memory.
//!
//! With one x tile, as in decode steps, the next block is widened between the tile operations of this one and hides
//! their latency: tiles are never loaded from lines that were just stored. Measured on a 2-core Emerald Rapids virtual
//! machine with other load: one row against 84 matrices of `[6144, 1024]` in 35 to 39 ms, in bf16 48 to 52 ms.

use super::super::grid::Grid;
use super::super::problem::{Fp8, Problem};
use super::tile::{N_TILE, STEP, TILE};
use super::{Aligned, M_TILE, MAX_TILES, pack, store};
use crate::cpu::weights::BLOCK;
use pegainfer_core::scratch::Scratch;
use std::arch::{asm, x86_64::*};
use std::ops::Range;

/// Steps of a block along `k`.
const STEPS: usize = BLOCK / STEP;
/// Rows of a panel that are widened after each step of the block before.
const ROWS: usize = N_TILE / STEPS;
/// Blocks between a row's prefetch and its use.
const AHEAD: usize = 2;
/// Codes of a cache line.
const LINE: usize = 64;

/// One step of a panel: 32 w rows, 32 k, bf16.
type Step = [[u16; STEP]; N_TILE];

/// A block of `k` of a panel, from which the left tiles are loaded.
#[repr(C, align(64))]
struct Panel([Step; STEPS]);

impl Panel {
    const EMPTY: Self = Self([[[0; STEP]; N_TILE]; STEPS]);
}

/// `out = x * w^T`; the sum of a block is that of `run` for bf16.
pub(crate) fn run(p: &Problem<'_, Fp8<'_>>, scratch: &mut Scratch) {
    let steps = p.k.div_ceil(STEP);
    let tiles = p.m.div_ceil(M_TILE);
    let x = scratch.slice::<u32>(tiles * steps * TILE);
    pack(p, steps, x);
    let task = Task { p, x, steps };
    Grid::new(tiles, steps * TILE * 4, MAX_TILES, p.n, N_TILE).for_each(|tiles, cols| {
        // SAFETY: `linear` has checked that the CPU has AMX and AVX-512 and that the process may use tiles; the block
        // lies inside the problem.
        unsafe {
            match tiles.len() {
                1 => task.run_one(tiles.start, cols),
                _ => task.run(tiles, cols),
            }
        }
    });
}

/// Operands and layout that the tasks of one GEMM share.
struct Task<'a> {
    p: &'a Problem<'a, Fp8<'a>>,
    /// Output of [`pack`].
    x: &'a [u32],
    /// Steps that cover `k`.
    steps: usize,
}

impl Task<'_> {
    /// One task: w rows `cols` against some x tiles, which stay in L2. Codes are read once, [`AHEAD`] blocks after they
    /// were fetched.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and AMX with permission; the block lies inside the problem and belongs to the
    /// calling task; at most [`MAX_TILES`] x tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run(&self, tiles: Range<usize>, cols: Range<usize>) {
        let (mut panel, mut sums, mut part) =
            (Panel::EMPTY, Aligned([[0.0; 2 * TILE]; MAX_TILES]), Aligned([[0.0; 2 * TILE]; 2]));
        let (sums, [a, b]) = (&mut sums.0[..tiles.len()], &mut part.0);
        // SAFETY: by the caller's promise.
        unsafe { super::tile::configure() };
        self.fetch_first(&cols);
        for col in cols.clone().step_by(N_TILE) {
            let panel_cols = col..(col + N_TILE).min(cols.end);
            sums.fill([0.0; 2 * TILE]);
            for block in 0..self.blocks() {
                let (steps, scale) = (self.steps_of(block), self.p.w.scale(col, block, self.p.k));
                let x = |tile: usize| self.x[(tile * self.steps + block * STEPS) * TILE..][..steps * TILE].as_ptr();
                // SAFETY: by the caller's promise; tiles of x and the panel have the steps.
                unsafe {
                    self.stage(&mut panel, (&panel_cols, block), 0..N_TILE);
                    for (i, sums) in sums.chunks_mut(2).enumerate() {
                        let tile = tiles.start + 2 * i;
                        match sums {
                            [_, _] => products_2(&panel.0, [x(tile), x(tile + 1)], steps, [&mut *a, &mut *b]),
                            _ => products_1(&panel.0, x(tile), steps, a),
                        }
                        sums.iter_mut().zip([&*a, &*b]).for_each(|(sums, part)| add_scaled(sums, part, scale));
                    }
                }
            }
            for (tile, sums) in tiles.clone().zip(&*sums) {
                // SAFETY: by the caller's promise.
                unsafe { store(self.p, tile, &panel_cols, sums) };
            }
        }
        // SAFETY: nothing is left in a tile.
        unsafe { super::tile::release() };
    }

    /// Variant of [`run`](Self::run) for one x tile.
    ///
    /// # Safety
    /// See [`run`](Self::run).
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run_one(&self, tile: usize, cols: Range<usize>) {
        let (mut panels, mut sums, mut part) =
            ([Panel::EMPTY, Panel::EMPTY], Aligned([0.0; 2 * TILE]), Aligned([0.0; 2 * TILE]));
        let ([panel, next], sums, part) = (&mut panels, &mut sums.0, &mut part.0);
        let (mut panel, mut next) = (panel, next);
        // SAFETY: by the caller's promise.
        unsafe { super::tile::configure() };
        self.fetch_first(&cols);
        let blocks = self.blocks();
        // Block `t` of the task: w rows, and number along `k`.
        let place = |t: usize| {
            let col = cols.start + t / blocks * N_TILE;
            (col..(col + N_TILE).min(cols.end), t % blocks)
        };
        let count = cols.len().div_ceil(N_TILE) * blocks;
        if count > 0 {
            // SAFETY: by the caller's promise.
            unsafe { self.stage(panel, (&place(0).0, 0), 0..N_TILE) };
        }
        for t in 0..count {
            let ((panel_cols, block), following) = (place(t), (t + 1 < count).then(|| place(t + 1)));
            let x = &self.x[(tile * self.steps + block * STEPS) * TILE..][..self.steps_of(block) * TILE];
            // SAFETY: by the caller's promise; the tiles of sums are zero before the first step and stored after the
            // last.
            unsafe {
                zero_sums();
                for step in 0..STEPS {
                    if let Some(x) = x.as_chunks::<TILE>().0.get(step) {
                        add_step(&panel.0[step], x);
                    }
                    if let Some((cols, block)) = &following {
                        self.stage(next, (cols, *block), step * ROWS..(step + 1) * ROWS);
                    }
                }
                store_sums(part);
            }
            add_scaled(sums, part, self.p.w.scale(panel_cols.start, block, self.p.k));
            if block + 1 == blocks {
                // SAFETY: by the caller's promise.
                unsafe { store(self.p, tile, &panel_cols, sums) };
                sums.fill(0.0);
            }
            std::mem::swap(&mut panel, &mut next);
        }
        // SAFETY: nothing is left in a tile.
        unsafe { super::tile::release() };
    }

    /// Blocks along `k`.
    fn blocks(&self) -> usize {
        self.steps.div_ceil(STEPS)
    }

    /// Steps of a block along `k`.
    fn steps_of(&self, block: usize) -> usize {
        STEPS.min(self.steps - block * STEPS)
    }

    /// Asks for the first codes of a task.
    fn fetch_first(&self, cols: &Range<usize>) {
        for row in cols.clone().take(N_TILE) {
            (0..AHEAD * BLOCK / LINE)
                .for_each(|line| fetch(self.p.w.codes[row * self.p.k..].as_ptr().wrapping_add(line * LINE)));
        }
    }

    /// Address to prefetch while a block of the panel from w row `col` on is widened: [`AHEAD`] blocks further in its
    /// first row, or in the next panel after the end of the row.
    fn ahead(&self, col: usize, block: usize) -> *const u8 {
        let (k, blocks, ahead) = (self.p.k, self.blocks(), block + AHEAD);
        let offset =
            if ahead < blocks { col * k + ahead * BLOCK } else { (col + N_TILE) * k + (ahead - blocks) * BLOCK };
        self.p.w.codes.as_ptr().wrapping_add(offset)
    }

    /// Widens some rows of a block of the w rows `cols` into the panel, padded with zeros, and prefetches as many codes
    /// of later blocks.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn stage(&self, panel: &mut Panel, (cols, block): (&Range<usize>, usize), rows: Range<usize>) {
        let (k, start) = (self.p.k, block * BLOCK);
        let len = BLOCK.min(k - start);
        let whole = len == BLOCK && cols.len() == N_TILE;
        let ahead = self.ahead(cols.start, block);
        for row in rows {
            let of_row = if row < cols.len() { len } else { 0 };
            let w = self.p.w.codes[(cols.start + row).min(cols.end - 1) * k + start..].as_ptr();
            for line in 0..BLOCK / LINE {
                fetch(ahead.wrapping_add(row * k + line * LINE));
                let codes = w.wrapping_add(line * LINE);
                // SAFETY: `of_row` codes from `w` on lie inside the row; a row of the panel has 64 bytes.
                unsafe {
                    let codes = if whole {
                        _mm512_loadu_si512(codes.cast())
                    } else {
                        load(codes, of_row.saturating_sub(line * LINE).min(LINE))
                    };
                    let (low, high) = widen(codes);
                    _mm512_storeu_si512(panel.0[2 * line][row].as_mut_ptr().cast(), low);
                    _mm512_storeu_si512(panel.0[2 * line + 1][row].as_mut_ptr().cast(), high);
                }
            }
        }
    }
}

/// Asks for a cache line that is soon needed.
fn fetch(line: *const u8) {
    // SAFETY: a prefetch may point anywhere and has no visible effect; SSE is available.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

/// The first `len` (up to 64) codes, then zeros.
///
/// # Safety
/// The CPU has AVX-512 F and BW; there are `len` codes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn load(codes: *const u8, len: usize) -> __m512i {
    let lane_mask = if len == LINE { !0 } else { (1u64 << len) - 1 };
    // SAFETY: the mask keeps the load inside the codes.
    unsafe { _mm512_maskz_loadu_epi8(lane_mask, codes.cast()) }
}

/// The bf16 numbers of 64 codes, none of them NaN: first half and second half.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn widen(line: __m512i) -> (__m512i, __m512i) {
    // An e4m3 code, its sign extended and shifted by 4, is a bf16 whose exponent is smaller by the difference of the
    // biases.
    let low = _mm512_slli_epi16::<4>(_mm512_cvtepi8_epi16(_mm512_castsi512_si256(line)));
    let high = _mm512_slli_epi16::<4>(_mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(line)));
    let fields = _mm512_set1_epi16(0x87f0u16.cast_signed());
    let bias = _mm512_set1_epi16((127 - 7) << 7);
    let wide_low = _mm512_add_epi16(_mm512_and_si512(low, fields), bias);
    let wide_high = _mm512_add_epi16(_mm512_and_si512(high, fields), bias);
    // Zeros and subnormals are rare: 1 in 10,000 of normally distributed weights.
    if _mm512_testn_epi8_mask(line, _mm512_set1_epi8(0x78)) == 0 {
        return (wide_low, wide_high);
    }
    (subnormals(low, wide_low), subnormals(high, wide_high))
}

/// `wide` with lanes of codes with an exponent field of 0 replaced; `extended` has the codes from bit 4 on.
#[target_feature(enable = "avx512f,avx512bw")]
#[cold]
fn subnormals(extended: __m512i, wide: __m512i) -> __m512i {
    /// bf16 bits of the multiples 0 to 7 of 2^-9.
    const VALUES: [i16; 8] = [0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60];
    // SAFETY: 8 elements of 16 bits.
    let values = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(VALUES.as_ptr().cast()) });
    let number = _mm512_and_si512(_mm512_srli_epi16::<4>(extended), _mm512_set1_epi16(7));
    let sign = _mm512_and_si512(extended, _mm512_set1_epi16(i16::MIN));
    let is_subnormal = _mm512_testn_epi16_mask(extended, _mm512_set1_epi16(0x780));
    let exact = _mm512_or_si512(_mm512_permutexvar_epi16(number, values), sign);
    _mm512_mask_mov_epi16(wide, is_subnormal, exact)
}

/// `sums += part * scale`.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_scaled(sums: &mut [f32; 2 * TILE], part: &[f32; 2 * TILE], scale: f32) {
    let scale = _mm512_set1_ps(scale);
    for (sums, part) in sums.as_chunks_mut::<16>().0.iter_mut().zip(part.as_chunks::<16>().0) {
        // SAFETY: 16 f32 each.
        unsafe {
            let sum = _mm512_fmadd_ps(_mm512_loadu_ps(part.as_ptr()), scale, _mm512_loadu_ps(sums.as_ptr()));
            _mm512_storeu_ps(sums.as_mut_ptr(), sum);
        }
    }
}

/// Zeroes the tiles of sums, 0 and 1. The compiler does not use tile registers, so their contents survive between these
/// functions.
///
/// # Safety
/// The tiles are configured.
unsafe fn zero_sums() {
    // SAFETY: touches tile registers only.
    unsafe { asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags)) };
}

/// Adds the products of a step of a panel with an x tile to the tiles of sums.
///
/// # Safety
/// The tiles are configured.
unsafe fn add_step(w: &Step, x: &[u32; TILE]) {
    // SAFETY: reads the operands inside their bounds; touches tile registers only.
    unsafe {
        asm!(
            "tileloadd tmm6, [{x} + {row}*1]",
            "tileloadd tmm4, [{w} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{w} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            w = in(reg) w.as_ptr(),
            x = in(reg) x.as_ptr(),
            row = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}

/// Stores the tiles of sums.
///
/// # Safety
/// The tiles are configured.
unsafe fn store_sums(out: &mut [f32; 2 * TILE]) {
    // SAFETY: writes the output inside its bounds.
    unsafe {
        asm!(
            "tilestored [{s} + {row}*1], tmm0",
            "tilestored [{s} + {row}*1 + 1024], tmm1",
            s = in(reg) out.as_mut_ptr(),
            row = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}

/// The products of the first `steps` (at least 1) of `panel` with two x tiles.
///
/// # Safety
/// The tiles are configured; the x tiles have `steps` steps, the panel at least as many.
unsafe fn products_2(panel: &[Step], x: [*const u32; 2], steps: usize, out: [&mut [f32; 2 * TILE]; 2]) {
    let [out0, out1] = out;
    // SAFETY: reads the operands inside their bounds and writes the outputs.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
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
            w = inout(reg) panel.as_ptr() => _,
            x0 = inout(reg) x[0] => _,
            x1 = inout(reg) x[1] => _,
            steps = inout(reg) steps => _,
            s0 = in(reg) out0.as_mut_ptr(),
            s1 = in(reg) out1.as_mut_ptr(),
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Variant of [`products_2`] for one x tile.
///
/// # Safety
/// See [`products_2`].
unsafe fn products_1(panel: &[Step], x: *const u32, steps: usize, out: &mut [f32; 2 * TILE]) {
    // SAFETY: reads the operands inside their bounds and writes the output.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
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
            w = inout(reg) panel.as_ptr() => _,
            x = inout(reg) x => _,
            steps = inout(reg) steps => _,
            s = in(reg) out.as_mut_ptr(),
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::formats::e4m3;
    use half::bf16;

    #[test]
    fn every_code_widens_to_its_value_wherever_the_row_ends() {
        if !crate::cpu::isa::Isa::Amx.is_available() {
            return;
        }
        let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
        for (codes, len) in codes.chunks(LINE).flat_map(|codes| [0, 1, 31, 32, 33, LINE].map(|len| (codes, len))) {
            let len = len.min(codes.len());
            let mut wide = [bf16::NAN; LINE];
            // SAFETY: the CPU has AVX-512; there are `len` codes, and two halves of 64 bytes.
            unsafe {
                let (low, high) = widen(load(codes.as_ptr(), len));
                _mm512_storeu_si512(wide.as_mut_ptr().cast(), low);
                _mm512_storeu_si512(wide[32..].as_mut_ptr().cast(), high);
            }
            for (i, wide) in wide.iter().enumerate() {
                let expected = if i < len { e4m3(codes[i]) } else { 0.0 };
                assert_eq!(wide.to_f32().to_bits(), expected.to_bits(), "{i} of {len}");
            }
        }
    }
}
