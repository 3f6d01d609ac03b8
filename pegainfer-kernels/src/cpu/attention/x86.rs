//! [`Lanes`] on AVX2 with FMA and on AVX-512.

use std::arch::x86_64::*;

use half::bf16;

use super::kernel::{Tile, run_item, run_tile};
use super::lanes::Lanes;
use super::state::{Call, Item, Scratch};
use crate::cpu::isa::Isa;

/// Two 8-lane registers. Only [`Avx2::detect`] makes one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

/// One 16-lane register. Only [`Avx512::detect`] makes one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx2 {
    /// The path, if this CPU has AVX2 and FMA.
    pub(crate) fn detect() -> Option<Self> {
        Isa::Avx2.is_available().then_some(Self(()))
    }
}

impl Avx512 {
    /// The path, if this CPU has AVX-512 F, BW and VL.
    pub(crate) fn detect() -> Option<Self> {
        Isa::Avx512.is_available().then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn item_avx512(s: Avx512, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch) {
    run_item(s, call, item, scratch);
}

#[target_feature(enable = "avx2,fma")]
fn item_avx2(s: Avx2, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch) {
    run_item(s, call, item, scratch);
}

// In both impls: the methods use the path's instructions, and `self` proves that the CPU has them (see `detect`). The
// loads and stores are unaligned and go through references to arrays of the size they touch.

impl Lanes for Avx512 {
    type V = __m512;
    const LINES: usize = 12;

    fn item(self, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch) {
        // SAFETY: `self` proves the features.
        unsafe { item_avx512(self, call, item, scratch) }
    }
    #[inline(always)]
    fn tile(self, call: &Call<'_>, tile: &Tile<'_>, scratch: &mut Scratch) {
        // Accumulators, 16-column operands and one broadcast fill the 32 registers.
        match tile.lines {
            0 | 1 => run_tile::<Self, 1, 4>(self, call, tile, scratch),
            2 => run_tile::<Self, 2, 4>(self, call, tile, scratch),
            3 | 4 => run_tile::<Self, 4, 4>(self, call, tile, scratch),
            5 | 6 => run_tile::<Self, 6, 4>(self, call, tile, scratch),
            7 | 8 => run_tile::<Self, 8, 2>(self, call, tile, scratch),
            _ => run_tile::<Self, 12, 2>(self, call, tile, scratch),
        }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn prefetch(self, from: &[bf16; 16]) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m512 {
        // SAFETY: `self` proves the features; the reference covers the 64 bytes read.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> __m512 {
        // SAFETY: `self` proves the features; the reference covers the 32 bytes read.
        unsafe {
            let half = _mm256_loadu_si256(from.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; 16]) {
        // SAFETY: `self` proves the features; the reference covers the 64 bytes written.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_reduce_max_ps(v) }
    }
    #[inline(always)]
    fn first(self, v: __m512, n: usize, fill: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mask_blend_ps(((1u32 << n) - 1) as __mmask16, _mm512_set1_ps(fill), v) }
    }
    #[inline(always)]
    fn scale_exponent(self, p: __m512, t: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), n))
        }
    }
    #[inline(always)]
    fn zero_where_below(self, v: __m512, x: __m512, limit: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit)), v) }
    }
}

/// Applies an 8-lane operation to both halves.
macro_rules! both {
    ($f:ident($($v:expr),*)) => {
        // SAFETY: the caller's `self` proves the features.
        unsafe { [$f($($v[0]),*), $f($($v[1]),*)] }
    };
}

impl Lanes for Avx2 {
    type V = [__m256; 2];
    const LINES: usize = 6;

    fn item(self, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch) {
        // SAFETY: `self` proves the features.
        unsafe { item_avx2(self, call, item, scratch) }
    }
    #[inline(always)]
    fn tile(self, call: &Call<'_>, tile: &Tile<'_>, scratch: &mut Scratch) {
        // Sixteen registers of 8 lanes.
        match tile.lines {
            0 | 1 => run_tile::<Self, 1, 2>(self, call, tile, scratch),
            2 => run_tile::<Self, 2, 2>(self, call, tile, scratch),
            3 | 4 => run_tile::<Self, 4, 1>(self, call, tile, scratch),
            _ => run_tile::<Self, 6, 1>(self, call, tile, scratch),
        }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn prefetch(self, from: &[bf16; 16]) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [__m256; 2] {
        // SAFETY: `self` proves the features; the reference covers the 64 bytes read.
        unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> [__m256; 2] {
        // SAFETY: `self` proves the features; the reference covers the two times 16 bytes read.
        unsafe {
            let half = |at: usize| {
                let eight = _mm_loadu_si128(from.as_ptr().add(at).cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight)))
            };
            [half(0), half(8)]
        }
    }
    #[inline(always)]
    fn store(self, v: [__m256; 2], to: &mut [f32; 16]) {
        // SAFETY: `self` proves the features; the reference covers the 64 bytes written.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1]);
        }
    }
    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn largest(self, v: [__m256; 2]) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let eight = _mm256_max_ps(v[0], v[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn first(self, v: [__m256; 2], n: usize, fill: f32) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe {
            let count = _mm256_set1_epi32(n as i32);
            let half = |v, lanes| {
                let keep = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lanes));
                _mm256_blendv_ps(_mm256_set1_ps(fill), v, keep)
            };
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            [half(v[0], lanes), half(v[1], _mm256_add_epi32(lanes, _mm256_set1_epi32(8)))]
        }
    }
    #[inline(always)]
    fn scale_exponent(self, p: [__m256; 2], t: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe {
            let half = |p, t| {
                let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n))
            };
            [half(p[0], t[0]), half(p[1], t[1])]
        }
    }
    #[inline(always)]
    fn zero_where_below(self, v: [__m256; 2], x: [__m256; 2], limit: f32) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe {
            let limit = _mm256_set1_ps(limit);
            let half = |v, x| _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit), v);
            [half(v[0], x[0]), half(v[1], x[1])]
        }
    }
}
