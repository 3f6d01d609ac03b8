//! [`Lanes`] on AVX-512.

use std::arch::x86_64::*;

use half::bf16;

use super::vector::{Kernel, Lanes};
use crate::cpu::isa::Isa;

/// One 16-lane register. Only [`Avx512::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The path, if this CPU has AVX-512 F, BW and VL.
    pub(super) fn detect() -> Option<Self> {
        Isa::Avx512.is_available().then_some(Self(()))
    }

    /// Runs `kernel` compiled for this path.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        fn compiled<K: Kernel>(s: Avx512, kernel: K) -> K::Out {
            kernel.run(s)
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

// The methods use the path's instructions, and `self` proves that the CPU has them (see `detect`). The loads and stores
// are unaligned and go through references to arrays of the size they touch.

/// The upper half of these bits is `v` rounded to bf16, to nearest even.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn rounded(v: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // A NaN keeps its upper half and becomes quiet: a carry could make it anything.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000))
    }
}

impl Lanes for Avx512 {
    type V = __m512;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn prefetch<T>(self, from: &T) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(from).cast()) }
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
    fn widen_e4m3(self, from: &[u8; 16]) -> __m512 {
        // SAFETY: `self` proves the features; the reference covers the 16 bytes read.
        unsafe {
            // As f16, whose exponent has one more bit, a code is smaller by 2^8. An f32 built from the same bits would
            // be subnormal for subnormal codes and take the slow path of the CPU.
            let codes = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast())));
            let half = _mm256_and_si256(codes, _mm256_set1_epi16(0xbf80u16 as i16));
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        }
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; 16]) {
        // SAFETY: `self` proves the features; the reference covers the 64 bytes written.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn narrow(self, v: __m512, to: &mut [bf16; 16]) {
        // SAFETY: `self` proves the features; the reference covers the 32 bytes written.
        unsafe {
            let half = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded(v)));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), half);
        }
    }
    #[inline(always)]
    fn round(self, v: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_castsi512_ps(_mm512_and_si512(rounded(v), _mm512_set1_epi32(!0xffff))) }
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
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_div_ps(a, b) }
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
    fn where_below(self, x: __m512, limit: f32, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(limit)), yes) }
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), upper);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
