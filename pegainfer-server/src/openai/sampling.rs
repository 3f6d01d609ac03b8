//! How tokens are drawn.

use super::errors::ApiError;
use super::fields::Fields;
use super::state::AppState;
use crate::http::request_id;
use pegainfer_core::sampling::SamplingParams;

/// Sampling values; the seed is chosen for each prompt if the client gave none.
#[derive(Debug, Clone)]
pub struct Sampling {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: Option<u64>,
}

impl Sampling {
    /// Takes the fields out of a body; what the client left out is the checkpoint's.
    pub fn take(fields: &mut Fields, state: &AppState) -> Result<Self, ApiError> {
        let defaults = state.checkpoint.defaults;
        let sampling = Self {
            temperature: fields.number("temperature")?.map_or(defaults.temperature, |n| n as f32),
            top_p: fields.number("top_p")?.map_or(defaults.top_p, |n| n as f32),
            min_p: fields.number("min_p")?.map_or(defaults.min_p, |n| n as f32),
            // -1 is vLLM's way to say "all"; the engine's is 0.
            top_k: fields.integer("top_k", -1..=i32::MAX.into())?.map_or(defaults.top_k, |n| n.max(0) as u32),
            // Any 64 bits do; negative seeds are as good as others.
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map(|n| n as u64),
        };
        sampling.build(0)?;
        Ok(sampling)
    }

    /// Choices of one prompt have consecutive seeds.
    pub fn build(&self, choice: u64) -> Result<SamplingParams, ApiError> {
        let seed = match self.seed {
            Some(seed) => seed.wrapping_add(choice),
            None => request_id::random_u64()?,
        };
        Ok(SamplingParams::new(self.temperature, self.top_k, self.top_p, self.min_p, seed)?)
    }
}
