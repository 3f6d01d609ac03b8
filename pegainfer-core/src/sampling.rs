//! Sampling parameters: parsed once, valid by construction.

use thiserror::Error;

/// A sampling parameter is out of range. `field` is the API name of the field.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{field} must be {expected}, got {got}")]
pub struct SamplingError {
    /// API name of the field.
    pub field: &'static str,
    /// Accepted range, in words.
    pub expected: &'static str,
    /// Value that was given.
    pub got: String,
}

/// Parameters of sampling the next token from a row of logits.
///
/// The steps, in order: the request's [logits processors](crate::logits_processors), temperature, min-p, top-k, top-p,
/// then one draw. Temperature 0 is greedy and skips the rest. Values of this type are always valid: they are built with
/// [`SamplingParams::new`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: u64,
}

impl SamplingParams {
    /// Checks every value. `top_k` 0 is "no limit"; `temperature` 0 is greedy.
    ///
    /// The draw at token position `i` depends only on `seed` and `i`, so a request gives the same tokens under any load
    /// and after any number of preemptions.
    pub fn new(temperature: f32, top_k: u32, top_p: f32, min_p: f32, seed: u64) -> Result<Self, SamplingError> {
        let check = |ok: bool, field, expected, got: f32| {
            if ok { Ok(()) } else { Err(SamplingError { field, expected, got: got.to_string() }) }
        };
        check((0.0..=100.0).contains(&temperature), "temperature", "a number from 0 to 100", temperature)?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", "above 0 and at most 1", top_p)?;
        check((0.0..=1.0).contains(&min_p), "min_p", "a number from 0 to 1", min_p)?;
        Ok(Self { temperature, top_k, top_p, min_p, seed })
    }

    /// Parameters that always take the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }

    /// True if no random number is drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Divisor of the logits; 0 is greedy.
    pub fn temperature(&self) -> f32 {
        self.temperature
    }

    /// Number of most likely tokens to keep; 0 keeps all.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Nucleus sampling: the smallest set of most likely tokens whose probability reaches `top_p` is kept.
    pub fn top_p(&self) -> f32 {
        self.top_p
    }

    /// Tokens with at least `min_p` times the probability of the most likely one are kept.
    pub fn min_p(&self) -> f32 {
        self.min_p
    }

    /// Seed of the request's random numbers.
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_values_are_refused() {
        for (t, p, m, field) in [
            (-0.1, 1.0, 0.0, "temperature"),
            (f32::NAN, 1.0, 0.0, "temperature"),
            (f32::INFINITY, 1.0, 0.0, "temperature"),
            (1.0, 0.0, 0.0, "top_p"),
            (1.0, 1.1, 0.0, "top_p"),
            (1.0, f32::NAN, 0.0, "top_p"),
            (1.0, 1.0, -0.1, "min_p"),
            (1.0, 1.0, f32::NAN, "min_p"),
        ] {
            let error = SamplingParams::new(t, 0, p, m, 0).unwrap_err();
            assert_eq!(error.field, field, "{error}");
        }
        assert!(SamplingParams::new(0.0, 0, 1.0, 0.0, 7).unwrap().is_greedy());
    }
}
