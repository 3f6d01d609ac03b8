//! Sampling parameters: parsed once, valid by construction.

use thiserror::Error;

/// A sampling value that no distribution can be drawn with. `field` is the API name of the field.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{field} must be {expected}, got {got}")]
pub struct SamplingError {
    /// API name of the offending field.
    pub field: &'static str,
    /// The accepted range, in words.
    pub expected: &'static str,
    /// The value that was given.
    pub got: String,
}

/// How the next token is drawn from the logits of one row.
///
/// The steps, in order: [rules](crate::rules) of the request, temperature, min-p, top-k, top-p, then one draw. Temperature 0 is greedy and skips the rest.
/// Build with [`SamplingParams::new`]; a value of this type is always valid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: u64,
}

impl SamplingParams {
    /// Checks every value. `top_k` 0 means "no limit"; `temperature` 0 means greedy.
    ///
    /// The draw at token position `i` depends on `seed` and `i` alone, so a request gives the same tokens whatever
    /// else is running and however often it was preempted.
    pub fn new(temperature: f32, top_k: u32, top_p: f32, min_p: f32, seed: u64) -> Result<Self, SamplingError> {
        let check = |ok: bool, field, expected, got: f32| {
            if ok { Ok(()) } else { Err(SamplingError { field, expected, got: got.to_string() }) }
        };
        check((0.0..=100.0).contains(&temperature), "temperature", "a number from 0 to 100", temperature)?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", "above 0 and at most 1", top_p)?;
        check((0.0..=1.0).contains(&min_p), "min_p", "a number from 0 to 1", min_p)?;
        Ok(Self { temperature, top_k, top_p, min_p, seed })
    }

    /// The most likely token, always.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }

    /// True when no random number is drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Divisor of the logits; 0 is greedy.
    pub fn temperature(&self) -> f32 {
        self.temperature
    }

    /// Keep only the `top_k` most likely tokens; 0 keeps all.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Keep the smallest set of most likely tokens whose probability reaches `top_p`.
    pub fn top_p(&self) -> f32 {
        self.top_p
    }

    /// Keep tokens with at least `min_p` times the probability of the most likely one.
    pub fn min_p(&self) -> f32 {
        self.min_p
    }

    /// Seed of this request's random numbers.
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_values_no_distribution_can_be_drawn_with() {
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
