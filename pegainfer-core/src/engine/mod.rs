//! The contract between the server and every engine.
//!
//! [`EngineHandle::submit`] takes a [`GenerateRequest`] and returns a [`TokenStream`] or a typed refusal. Dropping the
//! stream cancels the request and frees its KV blocks after the steps in flight. The engine runs on one OS thread that
//! owns its device; see [`engine_loop`] for the loop.
//!
//! A handle may have several engines of the same model, each with its own device and KV pool. [`router`] chooses the
//! engine of a request; if an engine is lost, requests without a token go to another one ([`resubmission`]).

mod cell;
mod clock;
mod demux;
mod engine_loop;
mod events;
mod front;
mod handle;
mod limits;
pub mod options;
mod resubmission;
pub mod router;
mod shared;
pub mod simulation;
mod step_engine;
mod step_tokens;
mod stream;

pub use cell::EngineCell;
pub use clock::{Clock, SimulatedClock};
pub use events::Backlog;
pub use front::{RouteCounts, RouteReason};
pub use handle::{EngineEnd, EngineHandle};
pub use limits::{EngineLimits, MAX_LOGPROBS, SubmitError};
pub use shared::{EngineConfig, Fault, FaultKind};
pub use step_engine::{EngineError, EventBatch, StepEngine};
pub use step_tokens::StepTokens;
pub use stream::TokenStream;

use crate::adapter::Adapter;
use crate::grammar::Grammar;
use crate::images::ImageSpan;
use crate::kv::PrefixRoot;
use crate::kv::tiers::TierStats;
use crate::logits_processors::LogitsProcessors;
use crate::sampling::SamplingParams;
use crate::schedule::speculation::MAX_DRAFT_TOKENS;
use std::iter::Sum;
use std::sync::Arc;

/// Id of a request, unique among the engines of a handle; never reused. Engine `i` of `n` has the ids whose remainder
/// after division by `n` is `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One prompt and its generation options. Token ids only; text stays in the server.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// Prompt token ids, at least one; choices of one prompt share them.
    pub prompt: Arc<[u32]>,
    /// Images in the order of the prompt. Their rows replace the embeddings of their tokens, whose id is
    /// [`EngineLimits::image_token`].
    pub images: Arc<[ImageSpan]>,
    /// An earlier request with the same prompt, images, salt and adapter. This one goes to the same engine, is admitted
    /// after that prompt is computed, and finds it in the prefix cache. Ignored once that request has ended.
    pub same_prompt_as: Option<RequestId>,
    /// The engine that has to run the request; `None` lets the router choose ([`router`]).
    pub engine: Option<usize>,
    /// Maximum number of generated tokens, at least one.
    pub max_tokens: usize,
    /// Sampling parameters of every token.
    pub sampling: SamplingParams,
    /// Changes to the logits before sampling; usually none.
    pub logits_processors: Option<Arc<LogitsProcessors>>,
    /// Grammar of the generated text; `None` allows any text. Its masks and those of `logits_processors` must leave
    /// tokens in common.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Token ids that end the request, in addition to the checkpoint's end-of-text ids.
    pub stop_token_ids: Vec<u32>,
    /// Continue past the checkpoint's end-of-text ids (not past `stop_token_ids`).
    pub ignore_eos: bool,
    /// `Some(n)`: report the log-probability of every generated token and of the `n` most likely ones, `n` from 0 to
    /// [`MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// `Some(n)`: report log-probabilities of every prompt token except the first, in the same way. The prompt is then
    /// computed whole, without the prefix cache.
    pub prompt_logprobs: Option<usize>,
    /// Report the model's output for the last prompt token, a vector, before the first token.
    pub vector: bool,
    /// Requests with lower numbers are admitted first; running requests are not affected.
    pub priority: i32,
    /// Tenant of the request. Among requests of equal priority, tenants take turns. The upper half of the number is the
    /// tenant's group; groups take turns first.
    pub tenant: u64,
    /// Requests share cached prefixes only with requests of the same salt and adapter.
    pub cache_salt: u64,
    /// Refuse the request if every engine that can run it would have to compute more than the last block of the prompt.
    pub only_if_cached: bool,
    /// Adapter that changes the model's projections for this request; `None` for the model itself.
    pub adapter: Option<Arc<Adapter>>,
    /// Name of the request in traces of slow steps; does not affect the schedule.
    pub label: Option<Arc<str>>,
}

impl GenerateRequest {
    /// A greedy request for up to `max_tokens` tokens and no extras.
    pub fn greedy(prompt: impl Into<Arc<[u32]>>, max_tokens: usize) -> Self {
        Self {
            prompt: prompt.into(),
            images: Arc::default(),
            same_prompt_as: None,
            engine: None,
            max_tokens,
            sampling: SamplingParams::greedy(),
            logits_processors: None,
            grammar: None,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            vector: false,
            priority: 0,
            tenant: 0,
            cache_salt: 0,
            only_if_cached: false,
            adapter: None,
            label: None,
        }
    }
}

impl GenerateRequest {
    /// What it must have in common with other requests to share cached prefixes.
    pub fn prefix_root(&self) -> PrefixRoot {
        PrefixRoot { salt: self.cache_salt, adapter: self.adapter.as_ref().map(|adapter| adapter.id()) }
    }
}

/// Events of a stream, in this order: `Admitted`, `Prompt` and `Vector` if requested, `Token`s, then exactly one of `Finished`,
/// `Failed`, `GrammarFailed`.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenEvent {
    /// The request left the queue. Sent once, even if the request is preempted and resumed later.
    Admitted {
        /// Prompt tokens whose KV was found in the prefix cache.
        cached_tokens: usize,
    },
    /// Log-probabilities of the prompt's tokens, from the second on.
    Prompt(Vec<TokenLogprobs>),
    /// The normalised output of the last layer for the last prompt token, `[hidden_size]`.
    Vector(Box<[f32]>),
    /// One generated token.
    Token(TokenOut),
    /// The request is complete; no event follows.
    Finished {
        /// Reason of the end.
        reason: FinishReason,
        /// Token counts for billing.
        usage: Usage,
    },
    /// The engine could not continue this request; no event follows.
    Failed {
        /// Error sentence for the client.
        error: String,
    },
    /// The request ended early because its grammar failed; the last event.
    GrammarFailed {
        /// Error sentence for the client.
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
            Self::Vector(vector) => size_of_val(&**vector),
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
    /// True for an end-of-text or stop token, which is counted but is not part of the text.
    pub is_stop: bool,
    /// True if it came in the same step as the previous token, from an accepted draft.
    pub drafted: bool,
    /// Log-probabilities, if requested. Boxed, because most requests have none and events should be small.
    pub logprobs: Option<Box<TokenLogprobs>>,
}

/// Log-probabilities (natural log, of the raw logits: before logits processors, temperature and truncation) at one
/// position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the token at this position.
    pub logprob: f32,
    /// Rank of the token, 1 = most likely.
    pub rank: u32,
    /// The most likely tokens and their log-probabilities, best first; as many as requested.
    pub top: Vec<(u32, f32)>,
}

/// Reason why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-text or stop token was generated.
    Stop(u32),
    /// `max_tokens` or the context length was reached.
    Length,
}

/// Token counts of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the stop token included.
    pub completion_tokens: usize,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub cached_tokens: usize,
}

/// Gauges and counters of one engine, or the sums of several, as of their last steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Running requests, which hold KV blocks.
    pub running: usize,
    /// Accepted requests that are not running yet.
    pub waiting: usize,
    /// KV blocks of the pool.
    pub kv_blocks_total: usize,
    /// KV blocks that no request holds, cached prefixes included, which can be evicted at once.
    pub kv_blocks_free: usize,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Requests that were preempted and queued again.
    pub preemptions: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub generation_tokens: u64,
    /// Steps run.
    pub steps: u64,
    /// Failed steps that the device survived.
    pub failed_steps: u64,
    /// Speculative decoding counters.
    pub speculation: SpeculationStats,
    /// Copies of blocks outside the device.
    pub tiers: TierStats,
}

impl Sum for EngineStats {
    fn sum<I: Iterator<Item = Self>>(engines: I) -> Self {
        engines.fold(Self::default(), |sum, one| Self {
            running: sum.running + one.running,
            waiting: sum.waiting + one.waiting,
            kv_blocks_total: sum.kv_blocks_total + one.kv_blocks_total,
            kv_blocks_free: sum.kv_blocks_free + one.kv_blocks_free,
            prefix_queries: sum.prefix_queries + one.prefix_queries,
            prefix_hits: sum.prefix_hits + one.prefix_hits,
            preemptions: sum.preemptions + one.preemptions,
            prompt_tokens: sum.prompt_tokens + one.prompt_tokens,
            generation_tokens: sum.generation_tokens + one.generation_tokens,
            steps: sum.steps + one.steps,
            failed_steps: sum.failed_steps + one.failed_steps,
            speculation: sum.speculation.plus(&one.speculation),
            tiers: sum.tiers.plus(one.tiers),
        })
    }
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

    fn plus(&self, other: &Self) -> Self {
        Self {
            drafts: self.drafts + other.drafts,
            draft_tokens: self.draft_tokens + other.draft_tokens,
            accepted: std::array::from_fn(|i| self.accepted[i] + other.accepted[i]),
        }
    }

    /// Counts a row whose first `accepted` of `drafts` draft tokens were accepted.
    pub fn verified(&mut self, drafts: usize, accepted: usize) {
        self.drafts += 1;
        self.draft_tokens += drafts as u64;
        self.accepted.iter_mut().take(accepted).for_each(|count| *count += 1);
    }
}
