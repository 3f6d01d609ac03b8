//! Recorded schedules: everything that decides which steps an engine plans, and the steps that it planned.
//!
//! The scheduler is a function of what it is told, in this order: requests, cancellations, sampled tokens, failures of the device or
//! of a grammar, and for each plan whether admission is held (batching delay) and which masks are not ready. An engine that
//! records tells a [`ScheduleSink`] of each of these as a [`ScheduleEvent`]. [`replay`](replay()) tells them a scheduler
//! again, without a model or a device, and compares the steps: a failure of a served run becomes a test.
//!
//! Speculative decoding is not recorded, see [`ReplayError::Speculation`].

mod recorder;
mod replay;
mod step_hash;

pub(super) use recorder::ScheduleRecorder;
pub use replay::{ReplayError, Replayed, replay};

use super::state::StateConfig;
use crate::engine::GenerateRequest;
use crate::logits_processors::LogitsProcessors;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::Debug;
use std::sync::Arc;

/// Takes the events of an engine that records its schedule, on the engine's thread: it must never wait.
pub trait ScheduleSink: Send {
    /// Takes the next event.
    fn record(&mut self, event: ScheduleEvent);
}

impl Debug for dyn ScheduleSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ScheduleSink")
    }
}

/// One line of a recorded schedule: a JSON object with one field, the name of the event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleEvent {
    /// The recording begins.
    Engine(EngineSetup),
    /// A request came to the scheduler.
    Queue(QueuedRequest),
    /// The request with this number was cancelled.
    Cancel(u64),
    /// A step was planned, or could not be.
    Plan(Plan),
    /// The oldest step in flight was finished.
    Commit(Commit),
    /// The grammars of the requests with these numbers failed; behind a commit, before sequences were dropped.
    Fail(Vec<u64>),
    /// A step in flight failed, and the device went on: its requests ran again, but for the one that was to blame.
    Retry {
        /// Number of the step; all others in flight were dropped with it.
        n: u64,
    },
    /// The device was lost, and with it every request.
    Abort {},
    /// The prefix cache was emptied.
    Reset {},
}

/// What the scheduler of an engine was made with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineSetup {
    /// Sequences that hold blocks at once.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a mixed step.
    pub max_num_mixed_tokens: usize,
    /// End-of-text ids of the checkpoint.
    pub eos_token_ids: Vec<u32>,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// State slots of a model that has some besides its KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateConfig>,
    /// Whether the engine drafts tokens.
    pub speculation: bool,
    /// Steps before the recording began.
    pub steps: u64,
}

/// What a request decides of the schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueuedRequest {
    /// The engine's number of the request.
    pub id: u64,
    /// Prompt token ids.
    #[serde(serialize_with = "write_ids", deserialize_with = "read_ids")]
    pub prompt: Arc<[u32]>,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Number of an earlier request with the same prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_prompt_as: Option<u64>,
    /// Token ids that end it, besides those of the checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<u32>,
    /// Whether it goes on past the checkpoint's end-of-text ids.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ignore_eos: bool,
    /// Whether log-probabilities of the prompt are reported, for which it is computed whole.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prompt_logprobs: bool,
    /// Whether each token has to be known before the next one is sampled, for bad words.
    #[serde(default, skip_serializing_if = "is_default")]
    pub needs_history: bool,
    /// Whether it has a grammar.
    #[serde(default, skip_serializing_if = "is_default")]
    pub grammar: bool,
    /// Lower ones are taken from the queue first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i32,
    /// Whose request it is.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tenant: u64,
    /// Requests of one salt share cached prefixes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cache_salt: u64,
}

/// A call of the scheduler for the next step: what it depended on besides the events before it, and what it planned.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of the step, from 0 on. A plan without rows is no step; its number is that of the next one.
    pub n: u64,
    /// Nobody was admitted, because of the batching delay.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hold: bool,
    /// Requests whose mask was not ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_for_mask: Vec<u64>,
    /// For each row the number of its request and of its tokens. Without rows there was nothing to run; `None` if the
    /// scheduler did not return, because it panicked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<Vec<(u64, usize)>>,
    /// Requests that were admitted for the first time, with the tokens found in the prefix cache.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub admitted: Vec<(u64, usize)>,
    /// Hash of all of the step: tokens, positions, KV blocks, state slots, samples.
    #[serde(default, skip_serializing_if = "is_default", with = "hexadecimal")]
    pub hash: u64,
    /// How often in a row this was asked, with the same result.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u64,
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// Number of the step.
    pub n: u64,
    /// A token for each of its samples.
    pub tokens: Vec<u32>,
    /// Microseconds that it took.
    pub took: u64,
}

impl QueuedRequest {
    /// What `request` decides.
    pub(super) fn new(id: u64, request: &GenerateRequest) -> Self {
        Self {
            id,
            prompt: request.prompt.clone(),
            max_tokens: request.max_tokens,
            same_prompt_as: request.same_prompt_as.map(|id| id.0),
            stop_token_ids: request.stop_token_ids.clone(),
            ignore_eos: request.ignore_eos,
            prompt_logprobs: request.prompt_logprobs.is_some(),
            needs_history: request.logits_processors.as_deref().is_some_and(LogitsProcessors::need_history),
            grammar: request.grammar.is_some(),
            priority: request.priority,
            tenant: request.tenant,
            cache_salt: request.cache_salt,
        }
    }
}

fn once() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_once(times: &u64) -> bool {
    *times == 1
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn write_ids<S: Serializer>(ids: &Arc<[u32]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(ids.iter())
}

fn read_ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[u32]>, D::Error> {
    Vec::deserialize(deserializer).map(Into::into)
}

/// Not every reader of JSON has numbers of 64 bits.
mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    pub fn serialize<S: Serializer>(hash: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{hash:016x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(deserializer)?, 16).map_err(D::Error::custom)
    }
}
