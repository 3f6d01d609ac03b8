//! The sampling parameters.

use super::model_state::ModelState;
use super::schema::sampling::SamplingFields;
use crate::error::ApiError;
use crate::ids;
use pegainfer_core::sampling::SamplingParams;

/// Sampling parameters of a request. Without a seed, each choice gets a random one.
#[derive(Debug, Clone)]
pub struct Sampling {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: Option<u64>,
}

impl Sampling {
    /// Parameters from the request's fields. Missing values are the checkpoint's.
    pub fn new(fields: &SamplingFields, state: &ModelState) -> Result<Self, ApiError> {
        let defaults = state.model.text.checkpoint.defaults;
        let or = |given: Option<f64>, default: f32| given.map_or(default, |n| n as f32);
        let sampling = Self {
            temperature: or(fields.temperature, defaults.temperature),
            top_p: or(fields.top_p, defaults.top_p),
            min_p: or(fields.min_p, defaults.min_p),
            // vLLM writes "all tokens" as -1, the engine as 0.
            top_k: fields.top_k.map_or(defaults.top_k, |n| n.count() as u32),
            // Any 64 bits are a valid seed, negative numbers included.
            seed: fields.seed.map(|n| n as u64),
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
