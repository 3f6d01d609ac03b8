//! Records the inputs and the plans of an engine's scheduler.

use super::step_hash::step_hash;
use super::{Commit, EngineSetup, Plan, QueuedRequest, ScheduleEvent, ScheduleSink};
use crate::engine::{EngineLimits, EventBatch, GenerateRequest, RequestId, TokenEvent};
use crate::schedule::scheduler::SchedulerConfig;
use crate::schedule::state::StateConfig;
use crate::schedule::step::Step;
use std::hash::Hash;
use std::time::Duration;

/// Sends the inputs and the plans of an engine's scheduler to a sink. Consecutive plans without rows become one event,
/// because a waiting engine plans every millisecond.
#[derive(Debug)]
pub struct ScheduleRecorder {
    sink: Box<dyn ScheduleSink>,
    /// Number of planned steps, and the oldest step that is not finished.
    planned: u64,
    oldest: u64,
    /// The last plan, if it had no rows and may be repeated.
    empty: Option<Plan>,
    /// The plan in progress; left here if the scheduler panics.
    open: Option<Plan>,
}

impl ScheduleRecorder {
    /// A recorder of an engine made with `setup`.
    pub fn new(mut sink: Box<dyn ScheduleSink>, setup: EngineSetup) -> Self {
        sink.record(ScheduleEvent::Engine(setup));
        Self { sink, planned: 0, oldest: 0, empty: None, open: None }
    }

    fn record(&mut self, event: ScheduleEvent) {
        self.flush();
        self.sink.record(event);
    }

    fn flush(&mut self) {
        if let Some(plan) = self.empty.take() {
            self.sink.record(ScheduleEvent::Plan(plan));
        }
    }

    /// Records a new request.
    pub fn queued(&mut self, id: RequestId, request: &GenerateRequest) {
        self.record(ScheduleEvent::Queue(QueuedRequest::new(id.0, request)));
    }

    /// Records a cancellation.
    pub fn cancelled(&mut self, id: RequestId) {
        self.record(ScheduleEvent::Cancel(id.0));
    }

    /// Records that the scheduler starts to plan a step.
    pub fn planning(&mut self, hold: bool, waiting_for_mask: Vec<u64>) {
        self.open = Some(Plan { n: self.planned, hold, waiting_for_mask, times: 1, ..Plan::default() });
    }

    /// Records that `step` was planned and `admitted` requests.
    pub fn planned<R: Hash>(&mut self, step: &Step<R>, admitted: &EventBatch) {
        let Some(plan) = self.open.take() else { return };
        let plan = plan.with_result(step, admitted);
        if !step.rows.is_empty() {
            self.planned += 1;
        } else if let Some(empty) = self.empty.as_mut().filter(|empty| empty.is_repeated_by(&plan)) {
            empty.times += 1;
            return;
        }
        self.flush();
        match step.rows.is_empty() {
            true => self.empty = Some(plan),
            false => self.sink.record(ScheduleEvent::Plan(plan)),
        }
    }

    /// Records that the oldest step is finished and about to be committed.
    pub fn committing(&mut self, tokens: &[u32], took: Duration) {
        let (n, took) = (self.oldest, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        self.oldest += 1;
        self.record(ScheduleEvent::Commit(Commit { n, tokens: tokens.to_vec(), took }));
    }

    /// Records the events of a commit, or of failed grammars.
    pub fn failed(&mut self, events: &EventBatch) {
        let failed = events.iter().filter(|(_, event)| matches!(event, TokenEvent::GrammarFailed { .. }));
        let failed: Vec<u64> = failed.map(|(id, _)| id.0).collect();
        if !failed.is_empty() {
            self.record(ScheduleEvent::Fail(failed));
        }
    }

    /// Records that a step in flight failed after `newer` steps had been launched, and the engine continues.
    pub fn retrying(&mut self, newer: usize) {
        let n = self.planned.saturating_sub(1 + newer as u64);
        self.oldest = self.planned;
        self.record(ScheduleEvent::Retry { n });
    }

    /// Records that all requests and all steps in flight are dropped.
    pub fn aborted(&mut self) {
        self.oldest = self.planned;
        self.record(ScheduleEvent::Abort {});
    }

    /// Records that the prefix cache was cleared.
    pub fn reset(&mut self) {
        self.record(ScheduleEvent::Reset {});
    }
}

impl Drop for ScheduleRecorder {
    fn drop(&mut self) {
        let plans = [self.empty.take(), self.open.take()];
        plans.into_iter().flatten().for_each(|plan| self.sink.record(ScheduleEvent::Plan(plan)));
    }
}

impl EngineSetup {
    /// Configuration of a scheduler that has run `steps` steps, without copies of blocks.
    pub fn new(config: &SchedulerConfig, limits: &EngineLimits, state: Option<StateConfig>, steps: u64) -> Self {
        Self {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_num_mixed_tokens: config.max_num_mixed_tokens,
            eos_token_ids: config.eos_token_ids.clone(),
            kv_blocks: limits.kv_blocks,
            block_size: limits.block_size,
            state,
            speculation: config.speculation.is_some(),
            max_loras: config.max_loras,
            tiers: false,
            steps,
        }
    }
}

impl Plan {
    /// The plan with its result.
    pub(super) fn with_result<R: Hash>(self, step: &Step<R>, admitted: &EventBatch) -> Self {
        let tokens = step.qo_indptr.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        let rows = step.rows.iter().zip(tokens).map(|(row, tokens)| (row.id.0, tokens)).collect();
        let admitted = admitted.iter().filter_map(|(id, event)| match event {
            TokenEvent::Admitted { cached_tokens } => Some((id.0, *cached_tokens)),
            _ => None,
        });
        let hash = if step.rows.is_empty() { 0 } else { step_hash(step) };
        Self { rows: Some(rows), admitted: admitted.collect(), hash, ..self }
    }

    /// True if `other` is the same plan, apart from [`times`](Self::times), and changed nothing.
    fn is_repeated_by(&self, other: &Self) -> bool {
        let times = self.times;
        *self == Self { times, ..other.clone() } && self.admitted.is_empty()
    }
}
