//! Frequencies of rotary position embeddings.

use std::f64::consts::PI;

/// Rotary frequencies of a model, and their scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Extension of the context.
    pub yarn: Option<Yarn>,
    /// Factor of all cosines and sines, which scales queries and keys; 1 without YaRN.
    pub attention_factor: f64,
}

impl From<f64> for RopeSpec {
    /// Plain RoPE with this base.
    fn from(theta: f64) -> Self {
        Self { theta, yarn: None, attention_factor: 1.0 }
    }
}

/// YaRN's numbers (Peng et al. 2023), see `rope_scaling` of config.json.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Low frequencies are divided by this.
    pub factor: f64,
    /// Rotations within the original context above which a frequency stays unchanged.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided.
    pub beta_slow: f64,
    /// Context length before the extension.
    pub original_context: f64,
    /// The ramp between the two begins and ends at whole pairs.
    pub truncate: bool,
}

impl RopeSpec {
    /// `theta^(-2i / dim)` for `i < dim / 2`. With YaRN, frequencies of few rotations are divided by its factor, over a
    /// linear ramp, as in transformers' `_compute_yarn_parameters`.
    pub fn frequencies(&self, dim: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / dim as f64);
        let Some(yarn) = self.yarn else { return (0..dim / 2).map(plain).collect() };
        // The pair that rotates this often within the original context.
        let pair = |rotations: f64| {
            dim as f64 * (yarn.original_context / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
        };
        let (low, high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
        let (low, high) = if yarn.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        let ramp = |i: usize| ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        (0..dim / 2).map(|i| plain(i) / yarn.factor * ramp(i) + plain(i) * (1.0 - ramp(i))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yarn_ramps_from_pair_15_to_pair_25() {
        let yarn = Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_context: 65_536.0, truncate: true };
        let plain = RopeSpec::from(160_000.0);
        let scaled = RopeSpec { yarn: Some(yarn), ..plain }.frequencies(64);
        for (i, (plain, scaled)) in plain.frequencies(64).into_iter().zip(scaled).enumerate() {
            let expected = match i {
                0..=15 => plain,
                25.. => plain / 16.0,
                _ => plain * (1.0 - (i as f64 - 15.0) / 10.0 * (15.0 / 16.0)),
            };
            assert!((scaled / expected - 1.0).abs() < 1e-12, "pair {i}");
        }
    }
}
