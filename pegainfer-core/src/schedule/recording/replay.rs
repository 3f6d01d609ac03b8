//! Replays a recorded schedule.

use super::{Commit, EngineSetup, Plan, QueuedImage, QueuedRequest, ScheduleEvent};
use crate::adapter::{Adapter, AdapterId};
use crate::engine::{GenerateRequest, RequestId};
use crate::kv::BlockPool;
use crate::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use crate::schedule::scheduler::{Scheduler, SchedulerConfig};
use crate::schedule::state::SequenceState;
use crate::schedule::state_slots::StateSlots;
use crate::schedule::step::{Outcome, Step};
use crate::schedule::step_executor::STEPS_IN_FLIGHT;
use std::collections::VecDeque;
use std::iter::Peekable;
use std::sync::Arc;
use thiserror::Error;

/// Reason why a recorded schedule cannot be replayed, or how the replay differs from it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReplayError {
    /// The recording does not start with the engine's configuration.
    #[error("the recording has no schedule: record with --record-steps")]
    NoSchedule,
    /// The engine drafted tokens.
    #[error("the engine drafted tokens (--speculative-config), which are not in a recorded schedule")]
    Speculation,
    /// Blocks had copies outside the device.
    #[error("the engine kept copies of KV blocks (--kv-offloading-size), which are not in a recorded schedule")]
    Tiers,
    /// The engine had run steps before.
    #[error(
        "the recording began after {steps} steps of the engine, and what they left in its prefix cache is not known"
    )]
    NotFromTheStart {
        /// Number of steps.
        steps: u64,
    },
    /// The scheduler planned a different step.
    #[error("step {n} differs: {difference}")]
    Differs {
        /// Number of the step.
        n: u64,
        /// The first difference, as a sentence.
        difference: String,
    },
    /// The events are inconsistent: lines are missing or were changed.
    #[error("step {n} of the recording cannot be: {reason}")]
    Impossible {
        /// Number of the step.
        n: u64,
        /// Cause of the failure, as a sentence.
        reason: String,
    },
}

/// Counts of what a successful replay compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Requests.
    pub requests: u64,
    /// Steps.
    pub steps: u64,
    /// Rows of these steps.
    pub rows: u64,
    /// Tokens of these steps.
    pub tokens: u64,
    /// Requests that lost their blocks and were queued again.
    pub preemptions: u64,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: u64,
}

/// Feeds the events of a recording to a scheduler and compares each planned step with the recorded one, including KV
/// blocks and state slots.
///
/// # Errors
/// The first step that differs, or the reason why the recording cannot be replayed.
pub fn replay(events: impl IntoIterator<Item = ScheduleEvent>) -> Result<Replayed, ReplayError> {
    let mut events = events.into_iter();
    let Some(ScheduleEvent::Engine(setup)) = events.next() else { return Err(ReplayError::NoSchedule) };
    match setup {
        EngineSetup { speculation: true, .. } => Err(ReplayError::Speculation),
        EngineSetup { tiers: true, .. } => Err(ReplayError::Tiers),
        EngineSetup { steps: 1.., .. } => Err(ReplayError::NotFromTheStart { steps: setup.steps }),
        EngineSetup { state: Some(state), .. } => Replay::new(&setup, StateSlots::new(state)).run(events.peekable()),
        EngineSetup { state: None, .. } => Replay::new(&setup, ()).run(events.peekable()),
    }
}

struct Replay<S: SequenceState> {
    scheduler: Scheduler<S>,
    /// Planned steps that are not committed, oldest first.
    in_flight: VecDeque<Step<S::Row>>,
    /// Number of the next step to plan.
    next: u64,
    done: Replayed,
}

impl<S: SequenceState> Replay<S> {
    fn new(setup: &EngineSetup, state: S) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: setup.max_num_seqs,
            max_num_batched_tokens: setup.max_num_batched_tokens,
            max_num_mixed_tokens: setup.max_num_mixed_tokens,
            eos_token_ids: setup.eos_token_ids.clone(),
            max_loras: setup.max_loras,
            speculation: None,
        };
        let scheduler = Scheduler::new(config, BlockPool::new(setup.kv_blocks, setup.block_size), state);
        Self { scheduler, in_flight: VecDeque::new(), next: 0, done: Replayed::default() }
    }

    fn run(mut self, mut events: Peekable<impl Iterator<Item = ScheduleEvent>>) -> Result<Replayed, ReplayError> {
        while let Some(event) = events.next() {
            match event {
                ScheduleEvent::Engine(_) => return Err(self.impossible("another engine starts")),
                ScheduleEvent::Queue(request) => self.queue(&request)?,
                ScheduleEvent::Cancel(id) => self.scheduler.cancel(RequestId(id)),
                ScheduleEvent::Plan(plan) => self.plan(&plan)?,
                ScheduleEvent::Commit(commit) => {
                    let failed = match events.next_if(|next| matches!(next, ScheduleEvent::Fail(_))) {
                        Some(ScheduleEvent::Fail(failed)) => failed,
                        _ => Vec::new(),
                    };
                    self.commit(commit, &failed)?;
                }
                ScheduleEvent::Fail(failed) => self.scheduler.replay_fail(&failed),
                ScheduleEvent::Retry { n } => self.retry(n)?,
                ScheduleEvent::Abort {} => {
                    self.in_flight.clear();
                    self.scheduler.abort_all();
                }
                ScheduleEvent::Reset {} => self.scheduler.reset_prefix_cache(),
            }
        }
        let stats = self.scheduler.stats();
        Ok(Replayed { preemptions: stats.preemptions, prefix_hits: stats.prefix_hits, ..self.done })
    }

    fn queue(&mut self, queued: &QueuedRequest) -> Result<(), ReplayError> {
        let id = RequestId(queued.id);
        // Any bad word of two tokens will do: nothing is sampled here.
        let words = LogitsProcessorParams { bad_words: vec![vec![0, 0]], ..LogitsProcessorParams::default() };
        let processors = || LogitsProcessors::new(words, usize::MAX).ok().flatten();
        let images = QueuedImage::spans(&queued.images, queued.prompt.len());
        let images = images.map_err(|_| self.impossible("its images do not fit its prompt"))?;
        let request = GenerateRequest {
            same_prompt_as: queued.same_prompt_as.map(RequestId),
            engine: None,
            images,
            logits_processors: queued.needs_history.then(processors).flatten(),
            stop_token_ids: queued.stop_token_ids.clone(),
            ignore_eos: queued.ignore_eos,
            prompt_logprobs: queued.prompt_logprobs.then_some(0),
            priority: queued.priority,
            tenant: queued.tenant,
            cache_salt: queued.cache_salt,
            adapter: queued.adapter.map(|id| Arc::new(Adapter::new(AdapterId(id), ()))),
            ..GenerateRequest::greedy(queued.prompt.clone(), queued.max_tokens)
        };
        self.scheduler.add(id, request);
        if queued.grammar {
            self.scheduler.replay_grammar(id);
        }
        self.done.requests += 1;
        Ok(())
    }

    fn plan(&mut self, recorded: &Plan) -> Result<(), ReplayError> {
        for _ in 0..recorded.times {
            if self.in_flight.len() == STEPS_IN_FLIGHT {
                return Err(self.impossible("it was planned while two steps were in flight"));
            }
            let (step, admitted) = self.scheduler.replay_plan(recorded.hold, &recorded.waiting_for_mask);
            let Plan { hold, ref waiting_for_mask, times, .. } = *recorded;
            let planned =
                Plan { n: self.next, hold, waiting_for_mask: waiting_for_mask.clone(), times, ..Plan::default() };
            let planned = planned.with_result(&step, &admitted);
            if let Some(difference) = difference(recorded, &planned) {
                return Err(ReplayError::Differs { n: recorded.n, difference });
            }
            if !step.rows.is_empty() {
                self.next += 1;
                self.done.steps += 1;
                self.done.rows += step.rows.len() as u64;
                self.done.tokens += step.tokens.len() as u64;
                self.in_flight.push_back(step);
            }
        }
        Ok(())
    }

    fn commit(&mut self, recorded: Commit, failed: &[u64]) -> Result<(), ReplayError> {
        let Some(step) = self.in_flight.pop_front() else {
            return Err(self.impossible("a step was finished that was not planned"));
        };
        let (samples, tokens) = (step.samples.len(), recorded.tokens.len());
        if samples != tokens {
            let reason = format!("it sampled {samples} tokens, and {tokens} came back");
            return Err(ReplayError::Impossible { n: recorded.n, reason });
        }
        let outcome = Outcome { tokens: recorded.tokens, ..Outcome::default() };
        self.scheduler.replay_commit(&step, outcome, failed);
        self.scheduler.recycle(step);
        Ok(())
    }

    fn retry(&mut self, n: u64) -> Result<(), ReplayError> {
        let oldest = self.next - self.in_flight.len() as u64;
        let steps = std::mem::take(&mut self.in_flight);
        let Some((_, step)) = (oldest..).zip(steps).find(|(number, _)| *number == n) else {
            return Err(self.impossible("a step failed that was not in flight"));
        };
        self.scheduler.fail_step(&step, "");
        Ok(())
    }

    fn impossible(&self, reason: &str) -> ReplayError {
        ReplayError::Impossible { n: self.next, reason: reason.to_owned() }
    }
}

/// The first difference of two plans made from the same state.
fn difference(recorded: &Plan, planned: &Plan) -> Option<String> {
    let Some(rows) = &recorded.rows else {
        return Some("the scheduler panicked when it was recorded, and planned a step now".to_owned());
    };
    let all = planned.rows.as_deref().unwrap_or_default();
    list_difference("row", "tokens", rows, all)
        .or_else(|| list_difference("admission", "cached tokens", &recorded.admitted, &planned.admitted))
        .or_else(|| (recorded.n != planned.n).then(|| format!("the recording skips from step {} to it", planned.n)))
        .or_else(|| {
            let same = recorded.hash == planned.hash;
            (!same).then(|| "the rows are the same, but not their tokens, KV blocks, state slots or samples".to_owned())
        })
}

/// The first entry in which two lists differ; each entry is a request and a number of `unit`.
fn list_difference(what: &str, unit: &str, recorded: &[(u64, usize)], planned: &[(u64, usize)]) -> Option<String> {
    let at = (0..recorded.len().max(planned.len())).find(|i| recorded.get(*i) != planned.get(*i))?;
    let name = |entry: Option<&(u64, usize)>| match entry {
        Some((id, count)) => format!("request {id} with {count} {unit}"),
        None => "nothing".to_owned(),
    };
    let counts = format!("{} recorded, {} planned", recorded.len(), planned.len());
    Some(format!("{what} {at} was {} and is {} now ({counts})", name(recorded.get(at)), name(planned.get(at))))
}
