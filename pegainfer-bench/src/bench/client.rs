//! Target of a benchmark: the engine of this process, or a server over HTTP.

use super::http::Api;
use super::sampling::Fields;
use super::stats::Completion;
use anyhow::{Result, bail, ensure};
use pegainfer_core::engine::{EngineHandle, GenerateRequest, TokenEvent};
use pegainfer_core::rng;
use std::time::Instant;

/// The system under test.
pub enum Target {
    /// The engine of this process, without HTTP.
    Engine(EngineHandle),
    /// A server, over HTTP.
    Http(Api),
}

/// A salt of the prefix cache that no other run has.
pub fn random_salt() -> Result<u64> {
    let salt = getrandom::u64().map_err(|e| anyhow::anyhow!("the operating system gives no random numbers: {e}"))?;
    Ok(salt.max(1))
}

/// A client of the target.
pub struct Client {
    target: Target,
    /// Salt of the prefix cache, so that prompts of earlier runs are not found.
    salt: u64,
}

impl Client {
    /// A client whose requests share prefixes only among themselves.
    pub fn new(target: Target) -> Result<Self> {
        Ok(Self { target, salt: random_salt()? })
    }

    /// Generates `output_len` tokens, greedily and ignoring EOS unless `fields` say otherwise, which are for HTTP.
    pub async fn complete(&self, prompt: &[u32], output_len: usize, fields: &Fields) -> Result<Completion> {
        match &self.target {
            Target::Engine(engine) => {
                ensure!(fields.is_empty(), "only HTTP requests have fields");
                submit(engine, prompt, output_len, self.salt).await
            }
            Target::Http(api) => api.complete(prompt, output_len, self.salt, fields).await,
        }
    }

    /// As [`complete`](Self::complete) without fields, sharing prefixes only with requests of the same `group`.
    pub async fn complete_in(&self, group: u64, prompt: &[u32], output_len: usize) -> Result<Completion> {
        let salt = if group == 0 { self.salt } else { rng::bits(self.salt, group).max(1) };
        match &self.target {
            Target::Engine(engine) => submit(engine, prompt, output_len, salt).await,
            Target::Http(api) => api.complete(prompt, output_len, salt, &Fields::new()).await,
        }
    }

    /// Number of the target's engines, each with a copy of the model, if it says.
    pub fn engines(&self) -> Option<usize> {
        match &self.target {
            Target::Engine(engine) => Some(engine.engines().len()),
            Target::Http(api) => api.engines(),
        }
    }

    /// Longest context of the target, in tokens, if it says.
    pub fn max_model_len(&self) -> Option<usize> {
        match &self.target {
            Target::Engine(engine) => Some(engine.limits().max_model_len),
            Target::Http(api) => api.max_model_len(),
        }
    }
}

async fn submit(engine: &EngineHandle, prompt: &[u32], output_len: usize, salt: u64) -> Result<Completion> {
    let request = GenerateRequest { ignore_eos: true, cache_salt: salt, ..GenerateRequest::greedy(prompt, output_len) };
    let start = Instant::now();
    let mut stream = engine.submit(request)?;
    let (mut stamps, mut end) = (Vec::with_capacity(output_len), None);
    while let Some(event) = stream.recv().await {
        match event {
            TokenEvent::Admitted { .. } | TokenEvent::Prompt(_) | TokenEvent::Vector(_) => {}
            TokenEvent::Token(_) => stamps.push(start.elapsed()),
            TokenEvent::Finished { usage, .. } => end = Some(usage),
            TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error } => bail!(error),
        }
    }
    let Some(usage) = end else { bail!("the engine stopped before the request was complete") };
    ensure!(!stamps.is_empty(), "the engine generated no token");
    let (tokens, cached) = (usage.completion_tokens, usage.cached_tokens);
    Ok(Completion { start, stamps, prompt: prompt.len(), asked: output_len, tokens, cached })
}
