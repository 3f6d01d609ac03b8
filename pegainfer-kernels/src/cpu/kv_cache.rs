//! The paged KV cache of one layer in host memory: how a token is written, and how its elements are read. Layout:
//! [`HeadShape`]; formats: [`KvDType`].

use super::disjoint::Disjoint;
use super::formats::{E4M3_MAX, encode_e4m3};
use super::lanes::{Lanes, chunk};
use crate::heads::{BLOCK_SIZE, HeadShape, KvDType, MAX_HEAD_DIM, SCALE_ROWS};
use half::bf16;
use pegainfer_core::tensor::{Element, Tensor};

/// Keys and values of one layer, to be read.
#[derive(Debug, Clone, Copy)]
pub enum KvCache<'a> {
    /// bf16.
    Bf16(&'a [bf16], &'a [bf16]),
    /// Codes and scales.
    Fp8(&'a [u8], &'a [u8]),
}

impl<'a> KvCache<'a> {
    /// The cache in these two tensors.
    pub fn of((k, v): (&'a Tensor, &'a Tensor)) -> Self {
        match KvDType::of(k) {
            KvDType::Bf16 => Self::Bf16(k.host(), v.host()),
            KvDType::Fp8 => Self::Fp8(k.host(), v.host()),
        }
    }
}

/// Keys and values of one layer, which threads write concurrently, each the slots of its own tokens.
pub struct KvWriter<'a>(Format<'a>);

enum Format<'a> {
    Bf16(Disjoint<'a>, Disjoint<'a>),
    Fp8(Disjoint<'a, u8>, Disjoint<'a, u8>),
}

impl<'a> KvWriter<'a> {
    /// The cache in these two tensors.
    pub fn of((k, v): (&'a mut Tensor, &'a mut Tensor)) -> Self {
        Self(match KvDType::of(k) {
            KvDType::Bf16 => Format::Bf16(Disjoint::new(k.host_mut()), Disjoint::new(v.host_mut())),
            KvDType::Fp8 => Format::Fp8(Disjoint::new(k.host_mut()), Disjoint::new(v.host_mut())),
        })
    }

    /// Writes key and value of one token and KV head.
    ///
    /// # Safety
    /// No other thread reads or writes this slot.
    #[inline(always)]
    pub(super) unsafe fn write(&self, shape: HeadShape, slot: usize, kv_head: usize, key: &[bf16], value: &[bf16]) {
        match &self.0 {
            // The stores of K are two bytes wide, but the arithmetic of the next head hides them: a prefill of 512
            // tokens takes as long without them (measured).
            // SAFETY: guaranteed by the caller.
            Format::Bf16(k, v) => unsafe {
                k.scatter(shape.key(KvDType::Bf16, slot, kv_head), BLOCK_SIZE, key);
                v.slice(shape.value(KvDType::Bf16, slot, kv_head), value.len()).copy_from_slice(value);
            },
            Format::Fp8(k, v) => {
                let mut codes = [0; MAX_HEAD_DIM];
                let codes = &mut codes[..key.len()];
                let at = shape.scale(slot, kv_head);
                let scale = quantize(key, codes);
                // SAFETY: the caller's promise.
                unsafe {
                    k.scatter(shape.key(KvDType::Fp8, slot, kv_head), BLOCK_SIZE, codes);
                    k.slice(at, size_of::<f32>()).copy_from_slice(&scale.to_ne_bytes());
                }
                let scale = quantize(value, codes);
                // SAFETY: as above.
                unsafe {
                    v.slice(shape.value(KvDType::Fp8, slot, kv_head), codes.len()).copy_from_slice(codes);
                    v.slice(at, size_of::<f32>()).copy_from_slice(&scale.to_ne_bytes());
                }
            }
        }
    }
}

/// Rounds a row to e4m3 codes and returns its scale; see [`KvDType::Fp8`]. A NaN or an infinity in a row makes the
/// scale, and so the whole row, non-finite.
#[inline(always)]
pub fn quantize(row: &[bf16], codes: &mut [u8]) -> f32 {
    // Compared as bits, so that a NaN is the largest.
    let amax = row.iter().fold(0, |max: u16, x| max.max(x.to_bits() & 0x7fff));
    let scale = if amax == 0 { 1.0 } else { widen(bf16::from_bits(amax)) / E4M3_MAX };
    for (x, code) in row.iter().zip(codes) {
        *code = encode_e4m3(widen(*x) / scale);
    }
    scale
}

#[inline(always)]
fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// An element of the cache as attention reads it.
pub(super) trait KvElement: Element {
    /// The format with such elements.
    const FORMAT: KvDType;

    /// Sixteen elements, without their scales.
    fn widen<S: Lanes>(s: S, from: &[Self; 16]) -> S::V;

    /// Scales of a block's tokens, after `codes` rows; `None` in a format without scales.
    fn scales<S: Lanes>(s: S, slab: &[[Self; 16]], codes: usize) -> Option<S::V>;
}

impl KvElement for bf16 {
    const FORMAT: KvDType = KvDType::Bf16;

    #[inline(always)]
    fn widen<S: Lanes>(s: S, from: &[Self; 16]) -> S::V {
        s.widen(from)
    }

    #[inline(always)]
    fn scales<S: Lanes>(_: S, _: &[[Self; 16]], _: usize) -> Option<S::V> {
        None
    }
}

impl KvElement for u8 {
    const FORMAT: KvDType = KvDType::Fp8;

    #[inline(always)]
    fn widen<S: Lanes>(s: S, from: &[Self; 16]) -> S::V {
        s.widen_e4m3(from)
    }

    #[inline(always)]
    fn scales<S: Lanes>(s: S, slab: &[[Self; 16]], codes: usize) -> Option<S::V> {
        let rows: &[[u8; 16]; SCALE_ROWS] = chunk(&slab[codes..]);
        let mut scales = [0.0; 16];
        for (scale, bytes) in scales.iter_mut().zip(rows.as_flattened().as_chunks().0) {
            *scale = f32::from_ne_bytes(*bytes);
        }
        Some(s.load(&scales))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::formats::e4m3;

    #[test]
    fn codes_are_the_nearest_values_under_the_scale_of_their_row() {
        for magnitude in [1.0f32, 3e-3, 1e4, 1e-38] {
            let row: Vec<bf16> = (0..128).map(|i| bf16::from_f32((i * 37 % 101 - 50) as f32 * magnitude)).collect();
            let mut codes = vec![0x7f; 128];
            let scale = quantize(&row, &mut codes);
            let amax = row.iter().fold(0f32, |max, x| max.max(x.to_f32().abs()));
            assert_eq!(scale, amax / 448.0);
            for (x, code) in row.iter().zip(&codes) {
                let (x, back) = (x.to_f32(), e4m3(*code) * scale);
                // Half of the spacing of e4m3: a sixteenth of the value, or of subnormals 2^-10. The smallest scale is
                // itself a subnormal, and rounded.
                assert!((back - x).abs() <= (x.abs() / 16.0).max(scale / 1024.0) * 1.01, "{back} for {x}");
            }
        }
        let mut codes = [0x7f; 16];
        assert_eq!((quantize(&[bf16::ZERO; 16], &mut codes), codes), (1.0, [0; 16]));
    }

    #[test]
    fn a_row_that_is_not_finite_stays_so() {
        for bad in [bf16::NAN, -bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY] {
            let mut row = [bf16::ONE; 32];
            row[5] = bad;
            let mut codes = [0; 32];
            let scale = quantize(&row, &mut codes);
            assert!(!scale.is_finite() && !(e4m3(codes[5]) * scale).is_finite(), "{bad}");
        }
    }
}
