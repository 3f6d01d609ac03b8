//! [`Lanes`] on AVX2 with FMA.

use std::arch::x86_64::*;

use half::bf16;

use super::vector::{Kernel, Lanes};
use crate::cpu::isa::Isa;

/// Two 8-lane registers. Only [`Avx2::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The path, if this CPU has AVX2 and FMA.
    pub(super) fn detect() -> Option<Self> {
        Isa::Avx2.is_available().then_some(Self(()))
    }

    /// Runs `kernel` compiled for this path.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma")]
        fn compiled<K: Kernel>(s: Avx2, kernel: K) -> K::Out {
            kernel.run(s)
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

// The methods use the path's instructions, and `self` proves that the CPU has them (see `detect`). The loads and stores
// are unaligned and go through references to arrays of the size they touch.

/// Applies an 8-lane operation to both halves.
macro_rules! both {
    ($f:ident($($v:expr),*)) => {
        // SAFETY: the caller's `self` proves the features.
        unsafe { [$f($($v[0]),*), $f($($v[1]),*)] }
    };
}

/// The upper half of these bits is `v` rounded to bf16, to nearest even.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn rounded(v: __m256) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000)), nan)
    }
}

impl Lanes for Avx2 {
    type V = [__m256; 2];
    const REGISTERS: usize = 8; // sixteen of 8 lanes

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn prefetch<T>(self, from: &T) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(from).cast()) }
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
    fn widen_e4m3(self, from: &[u8; 16]) -> [__m256; 2] {
        // SAFETY: `self` proves the features; the reference covers the two times 8 bytes read.
        unsafe {
            // The bits of an f32 that is smaller by the difference of the biases, 2^120.
            let half = |at: usize| {
                let eight = _mm_loadl_epi64(from.as_ptr().add(at).cast());
                let codes = _mm256_slli_epi32::<20>(_mm256_cvtepi8_epi32(eight));
                let small = _mm256_and_si256(codes, _mm256_set1_epi32(0x87f0_0000u32 as i32));
                _mm256_mul_ps(_mm256_castsi256_ps(small), _mm256_set1_ps(f32::from_bits(247 << 23)))
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
    fn narrow(self, v: [__m256; 2], to: &mut [bf16; 16]) {
        // SAFETY: `self` proves the features; the reference covers the 32 bytes written.
        unsafe {
            let half = |v| _mm256_srli_epi32::<16>(rounded(v));
            // The pack works within 128-bit halves and leaves the quarters in the order 0 2 1 3.
            let packed = _mm256_packus_epi32(half(v[0]), half(v[1]));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    fn round(self, v: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe {
            let half = |v| _mm256_castsi256_ps(_mm256_and_si256(rounded(v), _mm256_set1_epi32(!0xffff)));
            [half(v[0]), half(v[1])]
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
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_div_ps(a, b))
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
    fn where_below(self, x: [__m256; 2], limit: f32, yes: [__m256; 2], no: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves the features.
        unsafe {
            let limit = _mm256_set1_ps(limit);
            let half = |x, yes, no| _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(x, limit));
            [half(x[0], yes[0], no[0]), half(x[1], yes[1], no[1])]
        }
    }
    #[inline(always)]
    fn sum(self, v: [__m256; 2]) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let eight = _mm256_add_ps(v[0], v[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
