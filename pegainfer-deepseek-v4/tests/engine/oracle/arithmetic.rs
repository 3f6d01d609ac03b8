//! Arithmetic of the model in f64.

use super::super::stored::{e2m1, e4m3};

/// Magnitudes of a format, ascending.
type Codes = std::sync::LazyLock<Vec<f64>>;
pub static E4M3: Codes = Codes::new(|| (0..0x7f).map(e4m3).collect());
pub static E2M1: Codes = Codes::new(|| (0..8).map(e2m1).collect());

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Shares of `exp(x)`.
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|v| (v - max).exp()).sum();
    x.iter().map(|v| (v - max).exp() / sum).collect()
}

/// `1 / sqrt(mean(x²) + 1e-6)`.
pub fn inverse_rms(x: &[f64]) -> f64 {
    (dot(x, x) / x.len() as f64 + 1e-6).sqrt().recip()
}

/// The sum of rows times weights.
pub fn weighted<R: AsRef<[f64]>>(weights: &[f64], rows: &[R]) -> Vec<f64> {
    let mut sum = vec![0.0; rows[0].as_ref().len()];
    for (weight, row) in weights.iter().zip(rows) {
        sum.iter_mut().zip(row.as_ref()).for_each(|(sum, x)| *sum += weight * x);
    }
    sum
}

/// Rounds a group to the nearest codes times `2^ceil(log2(amax / limit))`, ties to the even code.
pub fn round_group(group: &mut [f64], limit: f64, smallest: f64, codes: &[f64]) {
    let amax = group.iter().fold(smallest, |max, x| max.max(x.abs()));
    let scale = (amax / limit).log2().ceil().exp2();
    for x in group {
        let magnitude = (x.abs() / scale).min(limit);
        let above = codes.partition_point(|code| *code < magnitude).min(codes.len() - 1);
        let below = above.saturating_sub(1);
        let (up, down) = (codes[above] - magnitude, magnitude - codes[below]);
        let nearest = if up < down || (up == down && above.is_multiple_of(2)) { above } else { below };
        *x = (codes[nearest] * scale).copysign(*x);
    }
}
