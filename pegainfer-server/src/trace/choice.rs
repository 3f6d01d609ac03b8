//! The stages of one choice, with the engine's own timestamps.

use super::Trace;
use fastrace::collector::EventRecord;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum number of tokens of one choice with recorded times.
const MAX_TOKENS: usize = 4096;

/// Records one choice of a traced request.
#[derive(Debug)]
pub struct ChoiceTrace {
    trace: Arc<Trace>,
    choice: usize,
    tokens: Vec<Instant>,
}

/// Times at which a choice reached each stage.
#[derive(Debug, Clone, Copy)]
pub struct Stages {
    /// Submitted to the engine.
    pub submitted: Instant,
    /// Admitted: left the queue.
    pub admitted: Option<Instant>,
    /// The engine emitted the first token.
    pub first_token: Option<Instant>,
    /// The engine emitted the last token so far.
    pub last_token: Instant,
    /// Number of the engine that has the choice.
    pub engine: usize,
    /// Number of prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Number of tokens from accepted drafts.
    pub accepted_draft_tokens: usize,
    /// Time spent on detokenization.
    pub detokenizing: Duration,
}

impl ChoiceTrace {
    /// Starts with the submit, which ends the previous stage.
    pub fn new(trace: Arc<Trace>, choice: usize) -> Self {
        Self { trace, choice, tokens: Vec::new() }
    }

    /// The engine emitted a token at this time.
    pub fn token(&mut self, at: Instant) {
        if self.tokens.len() < MAX_TOKENS {
            self.tokens.push(at);
        }
    }

    /// Adds the spans of the choice. An incomplete stage lasts until now.
    pub fn end(self, stages: Stages, outcome: &'static str) {
        let now = Instant::now();
        if outcome == "error" {
            self.trace.failed.store(true, Ordering::Relaxed);
        }
        let choice = || ("choice".into(), self.choice.to_string().into());
        let event = |name: &'static str, at: Instant, properties| EventRecord {
            name: name.into(),
            timestamp_unix_ns: self.trace.tracer.unix_ns(at),
            properties,
        };
        self.trace.add("queue", stages.submitted, stages.admitted.unwrap_or(now), vec![choice()], vec![]);
        let Some(admitted) = stages.admitted else { return };
        let cached = ("cached_tokens".into(), stages.cached_tokens.to_string().into());
        let hit = (stages.cached_tokens > 0).then(|| event("prefix hit", admitted, vec![cached.clone()]));
        let engine = ("engine".into(), stages.engine.to_string().into());
        let prefilled = stages.first_token.unwrap_or(now);
        self.trace.add("prefill", admitted, prefilled, vec![choice(), engine, cached], hit.into_iter().collect());
        let Some(first) = stages.first_token else { return };
        let tokens = self.tokens.iter().map(|&at| event("token", at, vec![])).collect();
        let drafts = ("accepted_draft_tokens".into(), stages.accepted_draft_tokens.to_string().into());
        let ended = vec![choice(), ("finish_reason".into(), outcome.into()), drafts];
        self.trace.add("decode", first, stages.last_token, ended, tokens);
        let total = ("total_us".into(), stages.detokenizing.as_micros().to_string().into());
        self.trace.add("detokenize", stages.last_token, now, vec![choice(), total], vec![]);
    }
}
