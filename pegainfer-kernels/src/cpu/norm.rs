//! CPU twin of `ops::rms_norm` and `ops::add_rms_norm`.

use half::bf16;
use pegainfer_core::isa::Isa;
use rayon::prelude::*;

/// Partial sums of squares: a fixed number, so that the order of summation is fixed too.
const LANES: usize = 16;

/// See `ops::rms_norm`.
pub fn rms_norm(_isa: Isa, x: &[bf16], weight: &[bf16], eps: f32, out: &mut [bf16]) {
    let hidden = weight.len();
    out.par_chunks_mut(hidden).zip(x.par_chunks(hidden)).for_each(|(out, x)| norm_row(x, weight, eps, out));
}

/// See `ops::add_rms_norm`.
pub fn add_rms_norm(_isa: Isa, x: &[bf16], residual: &mut [bf16], weight: &[bf16], eps: f32, out: &mut [bf16]) {
    let hidden = weight.len();
    let rows = out.par_chunks_mut(hidden).zip(residual.par_chunks_mut(hidden)).zip(x.par_chunks(hidden));
    rows.for_each(|((out, residual), x)| {
        for (r, x) in residual.iter_mut().zip(x) {
            *r = bf16::from_f32(r.to_f32() + x.to_f32());
        }
        norm_row(residual, weight, eps, out);
    });
}

/// One row or one head: `out = bf16(x * rsqrt(mean(x²) + eps)) * weight`.
pub fn norm_row(x: &[bf16], weight: &[bf16], eps: f32, out: &mut [bf16]) {
    let scale = rms_scale(x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        let normalised = bf16::from_f32(x.to_f32() * scale);
        *out = bf16::from_f32(normalised.to_f32() * w.to_f32());
    }
}

/// `rsqrt(mean(x²) + eps)` in f32.
pub fn rms_scale(x: &[bf16], eps: f32) -> f32 {
    let mut sums = [0f32; LANES];
    for chunk in x.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x.to_f32() * x.to_f32();
        }
    }
    let mean = sums.iter().sum::<f32>() / x.len() as f32;
    (mean + eps).sqrt().recip()
}
