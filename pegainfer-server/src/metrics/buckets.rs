//! Bucket boundaries of the histograms: vLLM's, and finer ones below 10 ms, the range of decode steps.

/// Boundaries of TTFT, in seconds.
pub const TTFT: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// Boundaries of the time per token, in seconds.
pub const TOKEN_TIME: &[f64] = &[
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Boundaries of the time per request, in seconds.
pub const LATENCY: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

/// Bucket boundaries of `n`, equal to vLLM's.
pub const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// Bucket boundaries of token counts: 1, 2, 5, 10, … up to the context length.
pub fn token_buckets(max_model_len: usize) -> Vec<f64> {
    let steps = (0..).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
    steps.take_while(|&bound| bound <= max_model_len as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_sorted() {
        for buckets in [TTFT, TOKEN_TIME, LATENCY] {
            assert!(buckets.is_sorted_by(|a, b| a < b));
        }
        assert_eq!(token_buckets(40), [1.0, 2.0, 5.0, 10.0, 20.0]);
    }
}
