//! The contract between the server and every engine.
//!
//! [`EngineHandle::submit`] takes a [`GenerateRequest`] and gives a [`TokenStream`] or a typed refusal. Dropping the
//! stream cancels the request: its KV blocks are free after the steps in flight. The engine runs on one OS thread that
//! owns its device; see [`runtime`] for the loop.

mod clock;
mod demux;
mod engine_loop;
mod handle;
mod limits;
pub mod options;
mod shared;
pub mod simulation;
mod step_engine;
mod step_tokens;
mod stream;

pub use clock::{Clock, SimulatedClock};
pub use handle::{EngineEnd, EngineHandle};
pub use limits::{EngineLimits, MAX_LOGPROBS, SubmitError};
pub use shared::EngineConfig;
pub use step_engine::{EngineError, EventBatch, StepEngine};
pub use step_tokens::StepTokens;
pub use stream::{Backlog, TokenStream};

use crate::grammar::Grammar;
use crate::logits_processors::LogitsProcessors;
use crate::sampling::SamplingParams;
use crate::schedule::speculation::MAX_DRAFT_TOKENS;
use std::sync::Arc;

/// Names a request inside one engine. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One prompt and how to continue it. Text stays in the server: this is token ids only.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// Prompt token ids, at least one; choices of one prompt share them.
    pub prompt: Arc<[u32]>,
    /// An earlier request with the same prompt and salt: this one is admitted when that prompt is computed, and finds it in
    /// the prefix cache. Ignored once that request has ended.
    pub same_prompt_as: Option<RequestId>,
    /// Tokens to generate at most, at least one.
    pub max_tokens: usize,
    /// How each token is drawn.
    pub sampling: SamplingParams,
    /// What changes the logits before that; most requests have none.
    pub logits_processors: Option<Arc<LogitsProcessors>>,
    /// The texts that may be generated; `None` allows all. Its masks and those of `logits_processors` must leave tokens in common.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Token ids that end the request, besides the checkpoint's own end-of-text ids.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the checkpoint's end-of-text ids (not past `stop_token_ids`).
    pub ignore_eos: bool,
    /// `Some(n)`: report the log-probability of every generated token and of the `n` most likely ones, `n` from 0 to
    /// [`MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// `Some(n)`: report the same about every token of the prompt but the first. The prompt is then computed whole,
    /// without the prefix cache.
    pub prompt_logprobs: Option<usize>,
    /// Requests of lower numbers are taken from the queue first; those that run go on.
    pub priority: i32,
    /// Whose request this is. Requests of equal priority are taken from the queue in turn: one of each tenant, then the next
    /// one of each. The upper half is the tenant's group: groups take turns before the tenants of a group do.
    pub tenant: u64,
    /// Requests share cached prefixes only with requests of the same salt.
    pub cache_salt: u64,
    /// The name by which people know the request, for traces of slow steps; it decides nothing.
    pub label: Option<Arc<str>>,
}

impl GenerateRequest {
    /// A request for up to `max_tokens` tokens, each the most likely one, that asks for nothing else.
    pub fn greedy(prompt: impl Into<Arc<[u32]>>, max_tokens: usize) -> Self {
        Self {
            prompt: prompt.into(),
            same_prompt_as: None,
            max_tokens,
            sampling: SamplingParams::greedy(),
            logits_processors: None,
            grammar: None,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            tenant: 0,
            cache_salt: 0,
            label: None,
        }
    }
}

/// What a request's stream carries, in this order: `Admitted`, `Prompt` if asked for, then `Token`s, then exactly one of `Finished`,
/// `Failed`, `GrammarFailed`.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenEvent {
    /// The request left the queue; sent once, also when it is preempted and resumed later.
    Admitted {
        /// Prompt tokens whose KV was found in the prefix cache.
        cached_tokens: usize,
    },
    /// About the tokens of the prompt, from the second on.
    Prompt(Vec<TokenLogprobs>),
    /// One generated token.
    Token(TokenOut),
    /// The request is complete; nothing follows.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Token counts for billing.
        usage: Usage,
    },
    /// The engine could not go on with this request; nothing follows.
    Failed {
        /// One sentence for the client.
        error: String,
    },
    /// The request ended early because its grammar cannot be followed any further; the last event.
    GrammarFailed {
        /// One sentence for the client.
        error: String,
    },
}

impl TokenEvent {
    /// Heap bytes of the event.
    fn heap_bytes(&self) -> usize {
        let report = |logprobs: &TokenLogprobs| logprobs.top.capacity() * size_of::<(u32, f32)>();
        match self {
            Self::Admitted { .. } | Self::Finished { .. } => 0,
            Self::Prompt(reports) => {
                reports.capacity() * size_of::<TokenLogprobs>() + reports.iter().map(report).sum::<usize>()
            }
            Self::Token(token) => {
                token.logprobs.as_deref().map_or(0, |logprobs| size_of::<TokenLogprobs>() + report(logprobs))
            }
            Self::Failed { error } | Self::GrammarFailed { error } => error.capacity(),
        }
    }
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOut {
    /// Vocabulary id.
    pub id: u32,
    /// True when this token is an end-of-text or stop token: it is counted, but is not part of the text.
    pub is_stop: bool,
    /// True when it came in the same step as the token before it, thanks to an accepted draft.
    pub drafted: bool,
    /// Present when the request asked for log-probabilities. Boxed: most requests do not, and an event is to be small.
    pub logprobs: Option<Box<TokenLogprobs>>,
}

/// Log-probabilities (natural log, of the raw logits: before logits processors, temperature and truncation) at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token there.
    pub logprob: f32,
    /// Its rank, 1 = most likely.
    pub rank: u32,
    /// The most likely tokens, best first, as many as the request asked for.
    pub top: Vec<(u32, f32)>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It generated this end-of-text or stop token.
    Stop(u32),
    /// It reached `max_tokens` or the context length.
    Length,
}

/// Token counts of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the stop token included.
    pub completion_tokens: usize,
    /// Prompt tokens whose KV came from the prefix cache when the request was first admitted.
    pub cached_tokens: usize,
}

/// Gauges and counters of one engine, as of its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Requests with KV blocks.
    pub running: usize,
    /// Requests accepted and not yet running.
    pub waiting: usize,
    /// KV blocks of the pool.
    pub kv_blocks_total: usize,
    /// KV blocks that no request holds (cached prefixes included: they can be evicted at once).
    pub kv_blocks_free: usize,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Requests that lost their blocks to older ones and were queued again.
    pub preemptions: u64,
    /// Prompt tokens of the requests that were admitted.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Steps run.
    pub steps: u64,
    /// Steps that failed on a device that went on.
    pub failed_steps: u64,
    /// Of drafts.
    pub speculation: SpeculationStats,
}

/// Counters of speculative decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationStats {
    /// Rows of steps that verified drafts.
    pub drafts: u64,
    /// Draft tokens in them.
    pub draft_tokens: u64,
    /// Rows in which at least `i + 1` draft tokens were accepted.
    pub accepted: [u64; MAX_DRAFT_TOKENS],
}

impl SpeculationStats {
    /// Draft tokens that were accepted.
    pub fn accepted_tokens(&self) -> u64 {
        self.accepted.iter().sum()
    }

    /// Counts a row whose first `accepted` of `drafts` draft tokens were accepted.
    pub fn verified(&mut self, drafts: usize, accepted: usize) {
        self.drafts += 1;
        self.draft_tokens += drafts as u64;
        self.accepted.iter_mut().take(accepted).for_each(|count| *count += 1);
    }
}
