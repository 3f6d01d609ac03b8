//! [`Lanes`] in plain Rust.

use half::bf16;

use super::vector::Lanes;
use crate::cpu::formats::decode_e4m3;

/// Plain Rust for any target. Fused multiply-add only if it is an instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 16] {
    std::array::from_fn(f)
}

/// Bits of the bf16 nearest to `x`, ties to even; without a branch, so that loops vectorise.
#[inline(always)]
fn round_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    // A NaN with its payload in the low half must not become an infinity, nor carry into the sign.
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

impl Lanes for Portable {
    type V = [f32; 16];
    const REGISTERS: usize = 4; // sixteen of 4 lanes: SSE2

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn prefetch<T>(self, _from: &T) {}
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }
    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> [f32; 16] {
        each(|i| f32::from_bits(u32::from(from[i].to_bits()) << 16))
    }
    #[inline(always)]
    fn widen_e4m3(self, from: &[u8; 16]) -> [f32; 16] {
        each(|i| decode_e4m3(from[i]))
    }
    #[inline(always)]
    fn store(self, v: [f32; 16], to: &mut [f32; 16]) {
        *to = v;
    }
    #[inline(always)]
    fn narrow(self, v: [f32; 16], to: &mut [bf16; 16]) {
        for (to, x) in to.iter_mut().zip(v) {
            *to = bf16::from_bits(round_bits(x));
        }
    }
    #[inline(always)]
    fn round(self, v: [f32; 16]) -> [f32; 16] {
        each(|i| f32::from_bits(u32::from(round_bits(v[i])) << 16))
    }
    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            each(|i| a[i].mul_add(b[i], c[i]))
        } else {
            each(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn largest(self, v: [f32; 16]) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn first(self, v: [f32; 16], n: usize, fill: f32) -> [f32; 16] {
        each(|i| if i < n { v[i] } else { fill })
    }
    #[inline(always)]
    fn scale_exponent(self, p: [f32; 16], t: [f32; 16]) -> [f32; 16] {
        each(|i| f32::from_bits(p[i].to_bits().wrapping_add(t[i].to_bits() << 23)))
    }
    #[inline(always)]
    fn where_below(self, x: [f32; 16], limit: f32, yes: [f32; 16], no: [f32; 16]) -> [f32; 16] {
        each(|i| if x[i] < limit { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn sum(self, mut v: [f32; 16]) -> f32 {
        for i in 0..8 {
            v[i] += v[i + 8];
        }
        for i in 0..4 {
            v[i] += v[i + 4];
        }
        (v[0] + v[2]) + (v[1] + v[3])
    }
}
