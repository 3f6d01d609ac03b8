//! Reference kernel of `ops::deepseek_v4::{norm, attention_latents, attention_queries}`.

/// `rsqrt(mean(x²) + eps)` in f32.
pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    // Summed in f64: the order of an f32 sum would be the largest error of the op.
    let sum: f64 = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    ((sum / x.len() as f64) as f32 + eps).sqrt().recip()
}

/// Each row of `weight.len()` values: `x * rsqrt(mean(x²) + eps) * weight`.
pub fn norm(x: &mut [f32], weight: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(weight.len()) {
        let scale = inverse_rms(row, eps);
        row.iter_mut().zip(weight).for_each(|(v, w)| *v = *v * scale * w);
    }
}

/// Variant of [`norm`] without weight, for rows of `width` values.
pub fn unweighted(x: &mut [f32], width: usize, eps: f32) {
    for row in x.chunks_exact_mut(width) {
        let scale = inverse_rms(row, eps);
        row.iter_mut().for_each(|v| *v *= scale);
    }
}
