//! The sampling parameters.

use super::fields::Fields;
use super::state::AppState;
use crate::error::ApiError;
use crate::ids;
use pegainfer_core::sampling::SamplingParams;

/// Sampling parameters of a request; if the client gave no seed, each choice gets a random one.
#[derive(Debug, Clone)]
pub struct Sampling {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: Option<u64>,
}

impl Sampling {
    /// Parses the fields; values that the client left out are the checkpoint's.
    pub fn parse(fields: &mut Fields, state: &AppState) -> Result<Self, ApiError> {
        let defaults = state.checkpoint.defaults;
        let sampling = Self {
            temperature: fields.number("temperature")?.map_or(defaults.temperature, |n| n as f32),
            top_p: fields.number("top_p")?.map_or(defaults.top_p, |n| n as f32),
            min_p: fields.number("min_p")?.map_or(defaults.min_p, |n| n as f32),
            // vLLM writes "all tokens" as -1, the engine as 0.
            top_k: fields.integer("top_k", -1..=i32::MAX.into())?.map_or(defaults.top_k, |n| n.max(0) as u32),
            // Any 64 bits are a valid seed, negative numbers included.
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map(|n| n as u64),
        };
        sampling.build(0)?;
        Ok(sampling)
    }

    /// Sampling parameters of one choice. The choices of a prompt have consecutive seeds.
    pub fn build(&self, choice: u64) -> Result<SamplingParams, ApiError> {
        let seed = match self.seed {
            Some(seed) => seed.wrapping_add(choice),
            None => ids::random_u64()?,
        };
        Ok(SamplingParams::new(self.temperature, self.top_k, self.top_p, self.min_p, seed)?)
    }
}
