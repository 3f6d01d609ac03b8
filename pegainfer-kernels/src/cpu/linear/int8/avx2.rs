//! [`Tile`] on AVX2 with FMA and F16C.

use super::panel::ROWS;
use super::vector::{Kernel, Tile};
use crate::cpu::isa::Isa;
use std::arch::x86_64::*;

/// Two registers of 8 lanes. Only [`Avx2::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The path, if this CPU has AVX2, FMA and F16C.
    pub fn detect() -> Option<Self> {
        (Isa::Avx2.is_available() && is_x86_feature_detected!("f16c")).then_some(Self(()))
    }

    /// Runs `kernel` compiled for this path.
    pub fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kernel>(t: Avx2, kernel: K) {
            kernel.run(t);
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

/// Applies an 8-lane operation, whose features `self` proves, to both halves.
macro_rules! both {
    (|$i:ident| $e:expr) => {
        // SAFETY: as the macro says; loads and stores go through references to arrays of their size.
        unsafe {
            let lower = {
                let $i = 0;
                $e
            };
            let $i = 1;
            [lower, $e]
        }
    };
}

/// 16 bytes of each of eight rows; see [`Tile::columns`].
///
/// # Safety
/// The bytes are readable, and the CPU has AVX2.
#[inline(always)]
unsafe fn eight_rows(at: *const u8, stride: usize) -> [__m256i; 4] {
    // SAFETY: by the caller's promise.
    unsafe {
        // Rows `r` and `r + 4`, so that the interleaving inside of 128 bits orders the rows.
        let mut two = [_mm256_setzero_si256(); 4];
        for (r, two) in two.iter_mut().enumerate() {
            let lower = _mm256_castsi128_si256(_mm_loadu_si128(at.add(r * stride).cast()));
            *two = _mm256_inserti128_si256::<1>(lower, _mm_loadu_si128(at.add((r + 4) * stride).cast()));
        }
        let [a, b, c, d] = two;
        let [low_ab, high_ab] = [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)];
        let [low_cd, high_cd] = [_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)];
        [
            _mm256_unpacklo_epi64(low_ab, low_cd),
            _mm256_unpackhi_epi64(low_ab, low_cd),
            _mm256_unpacklo_epi64(high_ab, high_cd),
            _mm256_unpackhi_epi64(high_ab, high_cd),
        ]
    }
}

impl Tile for Avx2 {
    type I = [__m256i; 2];
    type F = [__m256; 2];
    const TILES: usize = 1;
    const MAX_ROWS: [usize; 2] = [6, 2]; // 12 of the 16 registers
    const INT16: bool = true;

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: SSE is in the x86-64 baseline, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[inline(always)]
    unsafe fn columns(self, at: *const u8, stride: usize) -> [[__m256i; 2]; 4] {
        // SAFETY: the reads by the caller's promise, the features by `self`.
        let [[a, b, c, d], [e, f, g, h]] = unsafe { [eight_rows(at, stride), eight_rows(at.add(8 * stride), stride)] };
        [[a, e], [b, f], [c, g], [d, h]]
    }
    #[inline(always)]
    fn load(self, from: &[u32; ROWS]) -> [__m256i; 2] {
        both!(|i| _mm256_loadu_si256(from[8 * i..][..8].as_ptr().cast()))
    }
    #[inline(always)]
    fn store(self, v: [__m256i; 2], to: &mut [u32; ROWS]) {
        for (to, v) in to.as_chunks_mut::<8>().0.iter_mut().zip(v) {
            // SAFETY: 8 numbers; `self` proves the features.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), v) };
        }
    }
    #[inline(always)]
    fn splat(self, x: u32) -> [__m256i; 2] {
        both!(|_i| _mm256_set1_epi32(x.cast_signed()))
    }
    #[inline(always)]
    fn and(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i| _mm256_and_si256(a[i], b[i]))
    }
    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i| _mm256_or_si256(a[i], b[i]))
    }
    #[inline(always)]
    fn xor(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i| _mm256_xor_si256(a[i], b[i]))
    }
    #[inline(always)]
    fn shl<const N: u32>(self, v: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i| _mm256_sll_epi32(v[i], _mm_cvtsi32_si128(N.cast_signed())))
    }
    #[inline(always)]
    fn shr<const N: u32>(self, v: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i| _mm256_srl_epi32(v[i], _mm_cvtsi32_si128(N.cast_signed())))
    }
    #[inline(always)]
    fn lookup(self, v: [__m256i; 2], table: [u8; 16]) -> [__m256i; 2] {
        both!(|i| _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), v[i]))
    }
    #[inline(always)]
    fn fifth_bits(self, v: [__m256i; 2], i: usize) -> [__m256i; 2] {
        // Each byte gets the byte that has its bit; byte `b` tests bit `4 (i % 2) + b` of it.
        let byte = 0x0101_0101 * (i as u32 / 2);
        let from = [byte, byte + 0x0404_0404, byte + 0x0808_0808, byte + 0x0c0c_0c0c];
        let bits = 0x0804_0201u32 << (4 * (i % 2));
        both!(|i| {
            let from = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.as_ptr().cast()));
            let bits = _mm256_set1_epi32(bits.cast_signed());
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(v[i], from), bits), bits);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        })
    }
    #[inline(always)]
    fn begin<const QUADS: usize>(self, acc: [__m256i; 2]) -> [__m256i; 2] {
        if QUADS == 0 { acc } else { both!(|_i| _mm256_setzero_si256()) }
    }
    #[inline(always)]
    fn dot<const QUADS: usize>(self, sum: [__m256i; 2], w: [__m256i; 2], x: [__m256i; 2]) -> [__m256i; 2] {
        both!(|i| {
            if QUADS > 0 {
                _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(w[i], x[i]))
            } else {
                // `vpmaddubsw` would saturate: products of even and of odd bytes, widened to int16.
                let even = _mm256_and_si256(w[i], _mm256_set1_epi16(255));
                let odd = _mm256_srli_epi16::<8>(w[i]);
                let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x[i]));
                let x_odd = _mm256_srai_epi16::<8>(x[i]);
                let products = _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd));
                _mm256_add_epi32(sum[i], products)
            }
        })
    }
    #[inline(always)]
    fn end<const QUADS: usize>(self, acc: [__m256i; 2], sum: [__m256i; 2]) -> [__m256i; 2] {
        if QUADS == 0 {
            return sum;
        }
        both!(|i| _mm256_add_epi32(acc[i], _mm256_madd_epi16(sum[i], _mm256_set1_epi16(1))))
    }
    #[inline(always)]
    fn to_f32(self, v: [__m256i; 2]) -> [__m256; 2] {
        both!(|i| _mm256_cvtepi32_ps(v[i]))
    }
    #[inline(always)]
    fn bits_to_f32(self, v: [__m256i; 2]) -> [__m256; 2] {
        both!(|i| _mm256_castsi256_ps(v[i]))
    }
    #[inline(always)]
    fn f16_to_f32(self, v: [__m256i; 2]) -> [__m256; 2] {
        both!(|i| {
            let low = _mm256_and_si256(v[i], _mm256_set1_epi32(0xffff));
            let packed = _mm256_packus_epi32(low, low);
            _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed)))
        })
    }
    #[inline(always)]
    fn splat_f32(self, x: f32) -> [__m256; 2] {
        both!(|_i| _mm256_set1_ps(x))
    }
    #[inline(always)]
    fn load_f32(self, from: &[f32; ROWS]) -> [__m256; 2] {
        both!(|i| _mm256_loadu_ps(from[8 * i..][..8].as_ptr()))
    }
    #[inline(always)]
    fn store_f32(self, v: [__m256; 2], to: &mut [f32; ROWS]) {
        for (to, v) in to.as_chunks_mut::<8>().0.iter_mut().zip(v) {
            // SAFETY: 8 numbers; `self` proves the features.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) };
        }
    }
    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(|i| _mm256_mul_ps(a[i], b[i]))
    }
    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(|i| _mm256_sub_ps(a[i], b[i]))
    }
    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(|i| _mm256_fmadd_ps(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn fnma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(|i| _mm256_fnmadd_ps(a[i], b[i], c[i]))
    }
}
