//! Recorded schedules: everything that decides which steps an engine plans, and the planned steps.
//!
//! The scheduler is a function of its inputs, in order: requests, cancellations, sampled tokens, failures of the device
//! or of a grammar, and for each plan whether admission is delayed and which masks are not ready. A recording engine
//! sends each of these to a [`ScheduleSink`] as a [`ScheduleEvent`]. [`replay`](replay()) feeds them to a scheduler
//! again, without a model or a device, and compares the steps. A failure in production thereby becomes a test.
//!
//! Speculative decoding and copies of blocks outside the device are not recorded; see [`ReplayError`].

mod recorder;
mod replay;
mod step_hash;

pub(super) use recorder::ScheduleRecorder;
pub use replay::{ReplayError, Replayed, replay};

use super::state::StateConfig;
use crate::engine::GenerateRequest;
use crate::images::{Image, ImageSpan, check_places};
use crate::logits_processors::LogitsProcessors;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::Arc;

/// Receives the events of a recording engine, on the engine's thread; must never wait.
pub trait ScheduleSink: Send {
    /// Receives the next event.
    fn record(&mut self, event: ScheduleEvent);
}

impl Debug for dyn ScheduleSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ScheduleSink")
    }
}

/// One line of a recorded schedule: a JSON object with one field, named like the event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleEvent {
    /// Start of the recording.
    Engine(EngineSetup),
    /// A request was added to the scheduler.
    Queue(QueuedRequest),
    /// The request with this number was cancelled.
    Cancel(u64),
    /// A step was planned, or could not be.
    Plan(Plan),
    /// The oldest step in flight was finished.
    Commit(Commit),
    /// The grammars of these requests failed; recorded after a commit, before sequences are dropped.
    Fail(Vec<u64>),
    /// A step in flight failed and the device continued. Its requests run again, except the one that caused the
    /// failure.
    Retry {
        /// Number of the step; all others in flight were dropped with it.
        n: u64,
    },
    /// The device was lost, and with it every request.
    Abort {},
    /// The prefix cache was cleared.
    Reset {},
}

/// Configuration of the engine's scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineSetup {
    /// Maximum number of sequences that hold blocks.
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
    /// State slots of a model with state other than KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateConfig>,
    /// True if the engine drafts tokens.
    pub speculation: bool,
    /// Maximum number of distinct adapters in a step.
    #[serde(default, skip_serializing_if = "is_default")]
    pub max_loras: usize,
    /// True if blocks have copies outside the device.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tiers: bool,
    /// Number of steps before the recording started.
    pub steps: u64,
}

/// The fields of a request that affect the schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueuedRequest {
    /// Number of the request in the engine.
    pub id: u64,
    /// Prompt token ids.
    #[serde(serialize_with = "write_ids", deserialize_with = "read_ids")]
    pub prompt: Arc<[u32]>,
    /// Images of the prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<QueuedImage>,
    /// Maximum number of generated tokens.
    pub max_tokens: usize,
    /// Number of an earlier request with the same prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_prompt_as: Option<u64>,
    /// Token ids that end the request, in addition to the checkpoint's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<u32>,
    /// True if generation continues past the checkpoint's end-of-text ids.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ignore_eos: bool,
    /// True if log-probabilities of the prompt are reported, which requires computing all of it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prompt_logprobs: bool,
    /// True if each token must be known before the next is sampled, as for bad words.
    #[serde(default, skip_serializing_if = "is_default")]
    pub needs_history: bool,
    /// True if the request has a grammar.
    #[serde(default, skip_serializing_if = "is_default")]
    pub grammar: bool,
    /// Requests with lower numbers are admitted first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i32,
    /// Tenant of the request.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tenant: u64,
    /// Requests of one salt share cached prefixes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cache_salt: u64,
    /// Number of its adapter, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<NonZeroU32>,
}

/// An image of a prompt, without its pixels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedImage {
    /// Index of its first token.
    pub start: usize,
    /// Rows and columns of patches.
    pub grid: (usize, usize),
    /// Hash of the image.
    pub hash: [u8; 32],
}

impl QueuedImage {
    /// The image of a request.
    pub fn new(ImageSpan { start, image }: &ImageSpan) -> Self {
        Self { start: *start, grid: image.grid(), hash: *image.hash() }
    }

    /// Images without their pixels, at their places in a prompt of `len` tokens.
    ///
    /// # Errors
    /// Why they cannot be there: this program did not write them.
    pub fn spans(images: &[Self], len: usize) -> Result<Arc<[ImageSpan]>, &'static str> {
        let span = |Self { start, grid, hash }: &Self| {
            Some(ImageSpan { start: *start, image: Arc::new(Image::without_pixels(*grid, *hash)?) })
        };
        let spans: Option<Arc<[ImageSpan]>> = images.iter().map(span).collect();
        let spans = spans.ok_or("one has an impossible shape")?;
        check_places(&spans, len).map(|()| spans)
    }
}

/// One planned step, with the inputs of the plan that are not events of their own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of the step, from 0. A plan without rows is no step and has the number of the next one.
    pub n: u64,
    /// True if the batching delay kept requests from being admitted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hold: bool,
    /// Requests whose masks were not ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_for_mask: Vec<u64>,
    /// Request id and token count of each row. Empty if there was nothing to run; `None` if the scheduler panicked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<Vec<(u64, usize)>>,
    /// Newly admitted requests, with the number of tokens found in the prefix cache.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub admitted: Vec<(u64, usize)>,
    /// Hash of the whole step: tokens, positions, KV blocks, state slots, samples.
    #[serde(default, skip_serializing_if = "is_default", with = "hexadecimal")]
    pub hash: u64,
    /// Number of consecutive identical plans.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u64,
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// Number of the step.
    pub n: u64,
    /// One token per sample.
    pub tokens: Vec<u32>,
    /// Microseconds that it took.
    pub took: u64,
}

impl QueuedRequest {
    /// The fields of `request` that affect the schedule.
    pub(super) fn new(id: u64, request: &GenerateRequest) -> Self {
        Self {
            id,
            prompt: request.prompt.clone(),
            images: request.images.iter().map(QueuedImage::new).collect(),
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
            adapter: request.adapter.as_ref().map(|adapter| adapter.id().0),
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

/// Numbers as hexadecimal strings, because not every JSON reader supports 64-bit integers.
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
