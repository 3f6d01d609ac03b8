//! Reference kernel of `ops::deepseek_v4::route`.

/// `sqrt(softplus(x))`, in f64 and rounded once, so that the choice of experts does not depend on a device's functions.
/// Above 20, softplus is `x` in f32.
pub fn gate(x: f32) -> f32 {
    let x = f64::from(x);
    let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
    softplus.sqrt() as f32
}

/// Divides `weights` by their sum and multiplies by `scale`. A sum of 0 gives 0, not NaN.
pub fn normalize(weights: &mut [f32], scale: f32) {
    let sum = weights.iter().sum::<f32>() + 1e-20;
    weights.iter_mut().for_each(|w| *w = *w / sum * scale);
}
