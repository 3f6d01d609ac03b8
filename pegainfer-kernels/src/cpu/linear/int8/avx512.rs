//! [`Tile`] on AVX-512 with VNNI.

use super::panel::ROWS;
use super::vector::{Kernel, Tile};
use crate::cpu::isa::Isa;
use std::arch::x86_64::*;

/// One register of 16 lanes. Only [`Vnni::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vnni(());

impl Vnni {
    /// The path, if this CPU has AVX-512 F, BW, VL and VNNI.
    pub fn detect() -> Option<Self> {
        (Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni")).then_some(Self(()))
    }

    /// Runs `kernel` compiled for this path.
    pub fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
        fn compiled<K: Kernel>(t: Vnni, kernel: K) {
            kernel.run(t);
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

/// Calls intrinsics, whose features `self` proves. Loads and stores go through references to arrays of their size.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: as the macro says.
        unsafe { $e }
    };
}

impl Tile for Vnni {
    type I = __m512i;
    type F = __m512;
    const TILES: usize = 2; // so that a load of x serves two products: loads would be the limit otherwise
    const MAX_ROWS: [usize; 2] = [8, 4]; // 16 of the 32 registers
    const INT16: bool = false;

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
    }
    #[inline(always)]
    unsafe fn columns(self, at: *const u8, stride: usize) -> [__m512i; 4] {
        // SAFETY: the reads by the caller's promise, the features by `self`.
        unsafe {
            // Rows `r`, `r + 4`, `r + 8` and `r + 12`, so that the interleaving inside of 128 bits orders the rows.
            let mut four = [_mm512_setzero_si512(); 4];
            for (r, four) in four.iter_mut().enumerate() {
                let at = at.add(r * stride);
                let v = _mm512_castsi128_si512(_mm_loadu_si128(at.cast()));
                let v = _mm512_inserti32x4::<1>(v, _mm_loadu_si128(at.add(4 * stride).cast()));
                let v = _mm512_inserti32x4::<2>(v, _mm_loadu_si128(at.add(8 * stride).cast()));
                *four = _mm512_inserti32x4::<3>(v, _mm_loadu_si128(at.add(12 * stride).cast()));
            }
            let [a, b, c, d] = four;
            let [low_ab, high_ab] = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
            let [low_cd, high_cd] = [_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d)];
            [
                _mm512_unpacklo_epi64(low_ab, low_cd),
                _mm512_unpackhi_epi64(low_ab, low_cd),
                _mm512_unpacklo_epi64(high_ab, high_cd),
                _mm512_unpackhi_epi64(high_ab, high_cd),
            ]
        }
    }
    #[inline(always)]
    fn load(self, from: &[u32; ROWS]) -> __m512i {
        op!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store(self, v: __m512i, to: &mut [u32; ROWS]) {
        op!(_mm512_storeu_si512(to.as_mut_ptr().cast(), v));
    }
    #[inline(always)]
    fn splat(self, x: u32) -> __m512i {
        op!(_mm512_set1_epi32(x.cast_signed()))
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn shl<const N: u32>(self, v: __m512i) -> __m512i {
        op!(_mm512_slli_epi32::<N>(v))
    }
    #[inline(always)]
    fn shr<const N: u32>(self, v: __m512i) -> __m512i {
        op!(_mm512_srli_epi32::<N>(v))
    }
    #[inline(always)]
    fn lookup(self, v: __m512i, table: [u8; 16]) -> __m512i {
        op!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v))
    }
    #[inline(always)]
    fn fifth_bits(self, v: __m512i, i: usize) -> __m512i {
        // Each byte gets the byte that has its bit; byte `b` tests bit `4 (i % 2) + b` of it.
        let byte = 0x0101_0101 * (i as u32 / 2);
        let from = [byte, byte + 0x0404_0404, byte + 0x0808_0808, byte + 0x0c0c_0c0c];
        let bits = 0x0804_0201u32 << (4 * (i % 2));
        op!({
            let from = _mm512_broadcast_i32x4(_mm_loadu_si128(from.as_ptr().cast()));
            let bytes = _mm512_shuffle_epi8(v, from);
            let set = _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(bits.cast_signed()));
            _mm512_maskz_mov_epi8(set, _mm512_set1_epi8(16))
        })
    }
    #[inline(always)]
    fn dot<const QUADS: usize>(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        op!(_mm512_dpbusd_epi32(sum, w, x))
    }
    #[inline(always)]
    fn to_f32(self, v: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    fn bits_to_f32(self, v: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(v))
    }
    #[inline(always)]
    fn f16_to_f32(self, v: __m512i) -> __m512 {
        op!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)))
    }
    #[inline(always)]
    fn splat_f32(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load_f32(self, from: &[f32; ROWS]) -> __m512 {
        op!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store_f32(self, v: __m512, to: &mut [f32; ROWS]) {
        op!(_mm512_storeu_ps(to.as_mut_ptr(), v));
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fnmadd_ps(a, b, c))
    }
}
