//! Reference kernel of `ops::deepseek_v4::{round_activation, attention_latents, attention_queries}`: rounding to FP8
//! and FP4.

use crate::cpu::formats::{E2M1_MAX, E4M3_MAX, quantize, round_e2m1, round_e4m3};

/// Values of a key that share an FP8 scale.
pub const KEY_GROUP: usize = 64;
/// Values of an indexer entry that share an FP4 scale.
const FP4_GROUP: usize = 32;

/// Rounds groups of `group` values to e4m3 times a power of two.
pub fn fp8(x: &mut [f32], group: usize) {
    x.chunks_mut(group).for_each(|group| {
        let scale = quantize(group, E4M3_MAX, 1e-4, round_e4m3);
        group.iter_mut().for_each(|v| *v *= scale);
    });
}

/// Rounds groups of 32 values to E2M1 times a power of two.
pub fn fp4(x: &mut [f32]) {
    x.chunks_mut(FP4_GROUP).for_each(|group| {
        let scale = quantize(group, E2M1_MAX, E2M1_MAX * f32::MIN_POSITIVE, round_e2m1);
        group.iter_mut().for_each(|v| *v *= scale);
    });
}

/// `x · H / sqrt(n)` with the Hadamard matrix in Sylvester's order; `x.len()` is a power of two.
pub fn hadamard(x: &mut [f32]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (a, b) = pair.split_at_mut(half);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        half *= 2;
    }
    let scale = (x.len() as f32).sqrt().recip();
    x.iter_mut().for_each(|v| *v *= scale);
}
