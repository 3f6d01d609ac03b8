//! [`Tile`] on ARM's NEON with dot products of bytes (`sdot`).

use super::panel::ROWS;
use super::vector::{Kernel, Tile};
use crate::cpu::isa::Isa;
use std::arch::aarch64::*;
use std::arch::asm;

/// Four registers of 4 lanes. Only [`Neon::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// The path, if this CPU has dot products.
    pub fn detect() -> Option<Self> {
        Isa::Neon.is_available().then_some(Self(()))
    }

    /// Runs `kernel` compiled for this path.
    pub fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "neon,dotprod")]
        fn compiled<K: Kernel>(t: Neon, kernel: K) {
            kernel.run(t);
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

type I = [uint32x4_t; 4];
type F = [float32x4_t; 4];

/// An operation on each of the four registers.
macro_rules! each {
    (|$i:ident| $e:expr) => {
        // SAFETY: NEON is in the baseline of the target, `Neon` proves dot products; loads and stores go through
        // references to arrays of their size.
        unsafe { [{ let $i = 0; $e }, { let $i = 1; $e }, { let $i = 2; $e }, { let $i = 3; $e }] }
    };
}

/// Methods that are an operation on each of the four registers.
macro_rules! methods {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = |$i:ident| $e:expr;)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: $type),*) -> $result {
            each!(|$i| $e)
        })*
    };
}

/// `sum` plus the products of each lane's four signed bytes. Rust has no stable intrinsic for it.
///
/// # Safety
/// The CPU has dot products.
#[inline(always)]
unsafe fn sdot(mut sum: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    // SAFETY: by the caller's promise; the instruction touches registers only.
    unsafe {
        asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sum, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

impl Tile for Neon {
    type I = I;
    type F = F;
    const TILES: usize = 1;
    const MAX_ROWS: [usize; 2] = [4, 2]; // 16 of the 32 registers
    const INT16: bool = true; // codes above 127, of which not even one fits, are not for `sdot`

    methods! {
        load(from: &[u32; ROWS]) -> I = |i| vld1q_u32(from[4 * i..][..4].as_ptr());
        splat(x: u32) -> I = |_i| vdupq_n_u32(x);
        and(a: I, b: I) -> I = |i| vandq_u32(a[i], b[i]);
        or(a: I, b: I) -> I = |i| vorrq_u32(a[i], b[i]);
        xor(a: I, b: I) -> I = |i| veorq_u32(a[i], b[i]);
        lookup(v: I, table: [u8; 16]) -> I =
            |i| vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_u32(v[i])));
        to_f32(v: I) -> F = |i| vcvtq_f32_s32(vreinterpretq_s32_u32(v[i]));
        bits_to_f32(v: I) -> F = |i| vreinterpretq_f32_u32(v[i]);
        f16_to_f32(v: I) -> F = |i| vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(v[i])));
        splat_f32(x: f32) -> F = |_i| vdupq_n_f32(x);
        load_f32(from: &[f32; ROWS]) -> F = |i| vld1q_f32(from[4 * i..][..4].as_ptr());
        mul(a: F, b: F) -> F = |i| vmulq_f32(a[i], b[i]);
        sub(a: F, b: F) -> F = |i| vsubq_f32(a[i], b[i]);
        fma(a: F, b: F, c: F) -> F = |i| vfmaq_f32(c[i], a[i], b[i]);
        fnma(a: F, b: F, c: F) -> F = |i| vfmsq_f32(c[i], a[i], b[i]);
    }

    #[inline(always)]
    unsafe fn columns(self, at: *const u8, stride: usize) -> [I; 4] {
        let mut all = [self.splat(0); 4];
        for four in 0..4 {
            // SAFETY: the reads by the caller's promise; NEON is in the baseline of the target.
            unsafe {
                let row = |r| vreinterpretq_u32_u8(vld1q_u8(at.add((4 * four + r) * stride)));
                let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
                let [even, odd] = [[vtrn1q_u32(a, b), vtrn1q_u32(c, d)], [vtrn2q_u32(a, b), vtrn2q_u32(c, d)]];
                for (i, pairs) in [even, odd].into_iter().enumerate() {
                    let [ab, cd] = [vreinterpretq_u64_u32(pairs[0]), vreinterpretq_u64_u32(pairs[1])];
                    all[i][four] = vreinterpretq_u32_u64(vtrn1q_u64(ab, cd));
                    all[i + 2][four] = vreinterpretq_u32_u64(vtrn2q_u64(ab, cd));
                }
            }
        }
        all
    }
    #[inline(always)]
    fn store(self, v: I, to: &mut [u32; ROWS]) {
        each!(|i| vst1q_u32(to[4 * i..][..4].as_mut_ptr(), v[i]));
    }
    #[inline(always)]
    fn store_f32(self, v: F, to: &mut [f32; ROWS]) {
        each!(|i| vst1q_f32(to[4 * i..][..4].as_mut_ptr(), v[i]));
    }
    #[inline(always)]
    fn shl<const N: u32>(self, v: I) -> I {
        each!(|i| vshlq_u32(v[i], vdupq_n_s32(N.cast_signed())))
    }
    #[inline(always)]
    fn shr<const N: u32>(self, v: I) -> I {
        each!(|i| vshlq_u32(v[i], vdupq_n_s32(-N.cast_signed())))
    }
    #[inline(always)]
    fn fifth_bits(self, v: I, i: usize) -> I {
        // Each byte gets the byte that has its bit; byte `b` tests bit `4 (i % 2) + b` of it.
        let (bits, byte) = (0x0804_0201u32 << (4 * (i % 2)), 0x0101_0101 * (i as u32 / 2));
        let from = [byte, byte + 0x0404_0404, byte + 0x0808_0808, byte + 0x0c0c_0c0c];
        each!(|i| {
            let from = vreinterpretq_u8_u32(vld1q_u32(from.as_ptr()));
            let bytes = vqtbl1q_u8(vreinterpretq_u8_u32(v[i]), from);
            let set = vtstq_u8(bytes, vreinterpretq_u8_u32(vdupq_n_u32(bits)));
            vreinterpretq_u32_u8(vandq_u8(set, vdupq_n_u8(16)))
        })
    }
    #[inline(always)]
    fn dot<const QUADS: usize>(self, sum: I, w: I, x: I) -> I {
        if QUADS > 0 {
            return each!(|i| sdot(sum[i], w[i], x[i]));
        }
        // The products with codes less 128, and twice those with 64.
        each!(|i| {
            let (half, signed) = (vdupq_n_u32(0x4040_4040), veorq_u32(w[i], vdupq_n_u32(0x8080_8080)));
            sdot(sdot(sdot(sum[i], signed, x[i]), half, x[i]), half, x[i])
        })
    }
}
