//! Scheduler plus executor as one engine.

use super::policy::BatchingDelay;
use super::recording::{EngineSetup, ScheduleRecorder, ScheduleSink};
use super::scheduler::{Scheduler, SchedulerConfig};
use super::speculation::Speculation;
use super::speculation::depth::StepCost;
use super::state::SequenceState;
use super::step::{Step, StepRow};
use super::step_executor::{STEPS_IN_FLIGHT, StepExecutor};
use super::step_timing::StepTiming;
use crate::engine::{
    Clock, EngineError, EngineLimits, EngineStats, EventBatch, GenerateRequest, RequestId, StepEngine,
};
use crate::kv::BlockPool;
use crate::kv::tiers::{Direction, Tiers, TransferId};
use crate::ledger::{EngineDetail, FinishedStep, RowDetail, StepLoad, StepLog};
use crate::tensor::OpError;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest row, in tokens, of a step whose time is used to measure the cost of a decode token.
const MAX_DECODE_TOKENS: usize = 16;

/// Longest wait for masks before new requests and cancellations are read again.
const MASK_WAIT: Duration = Duration::from_millis(1);

/// Number of waits after which a step's missing masks are late. Together they last about as long as a forward pass, so
/// they cost little.
const LATE_WAITS: usize = 4;

/// Wait of an idle device for more prompts before the queue is read again.
const ARRIVALS_WAIT: Duration = Duration::from_micros(100);

/// How long requests wait for a load before loads were measured.
const FIRST_LOAD: Duration = Duration::from_secs(1);

/// How much longer than twice its expected time a load may take before requests stop waiting for it.
const LATE: Duration = Duration::from_millis(10);

/// Token limits of a step.
#[derive(Debug, Clone, Copy)]
pub struct TokenBudget {
    /// Maximum number of tokens in any step.
    pub step: usize,
    /// Maximum number of tokens in a mixed step; see [`SchedulerConfig::max_num_mixed_tokens`].
    pub mixed: usize,
}

/// Scheduler and executor as one [`StepEngine`].
#[derive(Debug)]
pub struct EngineCore<E: StepExecutor> {
    executor: E,
    scheduler: Scheduler<E::State>,
    limits: EngineLimits,
    /// Maximum number of steps in flight.
    depth: usize,
    /// The planned step, not launched yet.
    planned: StepOf<E>,
    /// Launched and not finished, oldest first, and when each began at the earliest.
    in_flight: VecDeque<(StepOf<E>, Instant)>,
    /// True if the newest step is not sampled yet, because it needs the tokens of the previous step, or masks.
    unsampled: bool,
    /// Number of times that the newest step has waited for masks.
    mask_waits: usize,
    /// Number of masks that were ready before the last plan read them.
    seen_masks: u64,
    /// A failed step, until the engine has recovered, and the number of newer steps in flight.
    failed: Option<(StepOf<E>, usize)>,
    delay: BatchingDelay,
    /// Measured cost of decode steps; decides how many drafts are worth verifying.
    step_cost: StepCost,
    /// True if the batching delay kept the last plan from admitting requests.
    delays_admission: bool,
    step_log: Arc<StepLog>,
    timing: StepTiming,
    /// Records the schedule, if enabled.
    recorder: Option<ScheduleRecorder>,
    /// Loads of blocks that requests wait for.
    loads: Vec<AwaitedLoad>,
}

/// A load of blocks that requests wait for.
#[derive(Debug)]
struct AwaitedLoad {
    id: TransferId,
    /// Number of steps in flight that end before it begins.
    steps: usize,
    /// How long requests wait for it from then on.
    limit: Duration,
    /// Until when they do, once those steps have ended.
    until: Option<Instant>,
}

/// The steps that an executor runs.
type StepOf<E> = Step<<<E as StepExecutor>::State as SequenceState>::Row>;

impl<E: StepExecutor> EngineCore<E> {
    /// An engine of a loaded executor, its `limits`, and the unused `state` of its sequences. `speculation` as in
    /// [`SchedulerConfig`].
    pub fn new(
        executor: E,
        limits: EngineLimits,
        tokens: TokenBudget,
        state: E::State,
        speculation: Option<Speculation>,
    ) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: tokens.step,
            max_num_mixed_tokens: tokens.mixed,
            eos_token_ids: limits.eos_token_ids.clone(),
            max_loras: limits.max_loras,
            speculation,
        };
        let scheduler = Scheduler::new(config, BlockPool::new(limits.kv_blocks, limits.block_size), state);
        let depth = executor.useful_depth();
        let (planned, in_flight) = (Step::default(), VecDeque::new());
        let (delay, step_cost, delays_admission) = (BatchingDelay::new(), StepCost::new(), false);
        let step_log = Arc::new(StepLog::new(executor.now()));
        Self {
            executor,
            scheduler,
            limits,
            depth,
            planned,
            in_flight,
            unsampled: false,
            mask_waits: 0,
            seen_masks: 0,
            failed: None,
            delay,
            step_cost,
            delays_admission,
            step_log,
            timing: StepTiming::from_env(),
            recorder: None,
            loads: Vec::new(),
        }
    }

    /// Keeps copies of full blocks outside the device; before the first request. The executor has the slots.
    pub fn use_tiers(&mut self, tiers: Tiers<<E::State as SequenceState>::Kept>) {
        self.scheduler.use_tiers(tiers);
    }

    /// Sets the number of steps in flight, 1 or 2. The default depends on the device; results are the same.
    pub fn set_depth(&mut self, depth: usize) {
        self.depth = depth.clamp(1, STEPS_IN_FLIGHT);
    }

    /// Stops keeping step times, for simulations.
    pub fn forget_step_times(&mut self) {
        self.timing = StepTiming::Off;
    }

    /// Starts the sampling of the newest step if everything that it needs is known.
    fn sample(&mut self) -> Result<(), EngineError> {
        let is_next = self.in_flight.len() == 1;
        let Some((step, _)) = self.in_flight.back_mut().filter(|_| self.unsampled) else { return Ok(()) };
        if is_next && step.is_deferred() {
            self.scheduler.resolve(step);
        }
        if step.is_deferred() {
            return Ok(());
        }
        self.unsampled = false;
        let Err(error) = self.executor.sample(step) else { return Ok(()) };
        let step = self.in_flight.pop_back().map(|(step, _)| step).unwrap_or_default();
        Err(self.failed(step, 0, &error))
    }

    /// Drops the steps in flight after `step` failed; `newer` steps had been launched after it. Waits for the device
    /// first, because the blocks of their requests will be used again. A device that cannot be waited for is lost.
    fn failed(&mut self, step: StepOf<E>, newer: usize, error: &OpError) -> EngineError {
        let fatal = self.executor.abandon().is_err();
        self.in_flight.clear();
        self.unsampled = false;
        self.failed = Some((step, newer));
        EngineError { message: error.to_string(), fatal }
    }

    /// Takes what transfers have ended, and stops waiting for late ones.
    fn finish_transfers(&mut self) {
        if self.scheduler.tiers().is_none() {
            return;
        }
        for done in self.executor.finished_transfers() {
            self.loads.retain(|load| load.id != done.id);
            self.scheduler.finish_transfer(done);
        }
        let now = self.executor.now();
        for load in &mut self.loads {
            // Steps that failed end nothing.
            load.steps = load.steps.min(self.in_flight.len());
            if load.steps == 0 {
                load.until.get_or_insert(now + load.limit);
            }
        }
        for load in self.loads.extract_if(.., |load| load.until.is_some_and(|until| until <= now)) {
            self.scheduler.give_up(load.id);
        }
    }

    /// Starts the transfers that the scheduler asks for.
    fn start_transfers(&mut self) {
        for transfer in self.scheduler.take_transfers() {
            if matches!(transfer.direction, Direction::Load | Direction::Read) {
                let expected = self.scheduler.tiers().and_then(|tiers| tiers.expected_time(transfer.id));
                let limit = expected.map_or(FIRST_LOAD, |time| 2 * time + LATE);
                self.loads.push(AwaitedLoad { id: transfer.id, steps: self.in_flight.len(), limit, until: None });
            }
            self.executor.start_transfer(transfer);
        }
    }

    /// Calls `tell` with the schedule recorder, if there is one.
    fn record(&mut self, tell: impl FnOnce(&mut ScheduleRecorder)) {
        if let Some(recorder) = &mut self.recorder {
            tell(recorder);
        }
    }

    /// Keeps the time of a finished step, and decides whether the ops of the next one are timed.
    fn log_step(&mut self, step: &StepOf<E>, now: Instant, took: Duration) {
        if self.timing == StepTiming::Off {
            return;
        }
        let ops = self.executor.take_op_times();
        let engine = || detail(step, &self.scheduler);
        let load = StepLoad::of(step);
        let times_ops = self.step_log.add(&FinishedStep { load, now, took, ops: &ops, engine: &engine });
        self.executor.time_ops(times_ops || self.timing == StepTiming::Ops);
    }

    /// The executor, for running single steps.
    pub fn executor(&mut self) -> &mut E {
        &mut self.executor
    }

    /// The scheduler, for reading its limits and state.
    pub fn scheduler(&self) -> &Scheduler<E::State> {
        &self.scheduler
    }
}

/// Engine part of the capture of a slow step.
fn detail<S: SequenceState>(step: &Step<S::Row>, scheduler: &Scheduler<S>) -> EngineDetail {
    let tokens = step.qo_indptr.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
    let row = |((row, tokens), context): ((&StepRow, usize), &u32)| {
        let (request, label) = (row.id.0, scheduler.label(row));
        RowDetail { request, label, tokens, context: *context as usize }
    };
    let rows = step.rows.iter().zip(tokens).zip(&step.kv_lens).map(row).collect();
    let stats = scheduler.stats();
    EngineDetail { rows, waiting: stats.waiting, kv_blocks_free: stats.kv_blocks_free }
}

impl<E: StepExecutor> StepEngine for EngineCore<E> {
    fn limits(&self) -> EngineLimits {
        self.limits.clone()
    }

    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        self.delay.arrived(self.executor.now());
        self.record(|recorder| recorder.queued(id, &request));
        self.scheduler.add(id, request);
    }

    fn cancel(&mut self, id: RequestId) {
        self.record(|recorder| recorder.cancelled(id));
        self.scheduler.cancel(id);
    }

    fn has_work(&self) -> bool {
        self.scheduler.has_work()
    }

    fn plan(&mut self) -> Option<EventBatch> {
        if self.in_flight.len() == self.depth || self.unsampled {
            return None;
        }
        self.finish_transfers();
        self.delays_admission = self.delay.should_wait(self.scheduler.delayable_tokens(), self.executor.now());
        self.seen_masks = self.scheduler.masks().ended();
        self.scheduler.update_masks();
        if let Some(recorder) = &mut self.recorder {
            recorder.planning(self.delays_admission, self.scheduler.waiting_for_masks());
        }
        let (step, admitted) = self.scheduler.plan_with_known_masks(self.delays_admission);
        self.record(|recorder| recorder.planned(&step, &admitted));
        self.planned = step;
        self.start_transfers();
        (!self.planned.is_empty()).then_some(admitted)
    }

    fn launch(&mut self) -> Result<(), EngineError> {
        let (step, began) = (std::mem::take(&mut self.planned), self.executor.now());
        if let Err(error) = self.executor.launch(&step) {
            return Err(self.failed(step, 0, &error));
        }
        self.in_flight.push_back((step, began));
        (self.unsampled, self.mask_waits) = (true, 0);
        self.sample()
    }

    fn clock(&self) -> Clock {
        self.executor.clock()
    }

    fn step_log(&self) -> Option<Arc<StepLog>> {
        Some(self.step_log.clone())
    }

    fn pool(&self) -> Option<BlockPool> {
        Some(self.scheduler.pool().clone())
    }

    fn record_schedule(&mut self, sink: Box<dyn ScheduleSink>) {
        let steps = self.scheduler.stats().steps;
        let setup = EngineSetup::new(self.scheduler.config(), &self.limits, self.scheduler.state().slots(), steps);
        let tiers = self.scheduler.tiers().is_some();
        self.recorder = Some(ScheduleRecorder::new(sink, EngineSetup { tiers, ..setup }));
    }

    fn wait(&mut self) {
        let newest = match &self.in_flight.make_contiguous()[..] {
            [] => None,
            [(step, _)] if self.unsampled => Some(step),
            _ => return,
        };
        if self.delays_admission && newest.is_none() {
            return self.executor.rest(ARRIVALS_WAIT);
        }
        let (end, masks) = (self.executor.now() + MASK_WAIT, self.scheduler.masks());
        if newest.is_none() {
            // Sequences with ready masks need not wait for the others.
            if self.scheduler.waiting_for_mask(None).is_some() {
                self.executor.wait_for_masks(masks, self.seen_masks, MASK_WAIT);
            } else if self.scheduler.tiers().is_some_and(Tiers::is_busy) {
                self.executor.wait_for_transfers(MASK_WAIT);
            }
            return;
        }
        loop {
            // Read before the masks, so that none becomes ready unseen.
            let seen = masks.ended();
            if self.scheduler.waiting_for_mask(newest).is_none() {
                return;
            }
            let left = end.saturating_duration_since(self.executor.now());
            if left.is_zero() {
                self.mask_waits += 1;
                return;
            }
            self.executor.wait_for_masks(masks, seen, left);
        }
    }

    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        if self.unsampled && self.in_flight.len() == 1 {
            self.sample()?;
            let is_late = self.unsampled && self.mask_waits >= LATE_WAITS;
            if let Some((step, _)) = self.in_flight.front().filter(|_| is_late) {
                self.scheduler.set_late(step);
            }
            return Ok(EventBatch::new());
        }
        let Some((step, began)) = self.in_flight.pop_front() else {
            let events = self.scheduler.fail_errored();
            self.record(|recorder| recorder.failed(&events));
            return Ok(events);
        };
        let outcome = match self.executor.finish() {
            Ok(outcome) => outcome,
            Err(error) => return Err(self.failed(step, self.in_flight.len(), &error)),
        };
        self.loads.iter_mut().for_each(|load| load.steps = load.steps.saturating_sub(1));
        let now = self.executor.now();
        let took = now - began;
        self.delay.measured(step.tokens.len(), took);
        if step.queries().1 <= MAX_DECODE_TOKENS {
            let drafting = outcome.drafting_time.as_secs_f64();
            self.step_cost.measured(step.tokens.len(), took.as_secs_f64() - drafting);
            self.step_cost.drafted(step.rows.iter().map(|row| row.model_drafts).max().unwrap_or(0), drafting);
            self.scheduler.set_costs(self.step_cost.token_cost(), self.step_cost.draft_cost());
        } else {
            self.scheduler.computed(step.tokens.len(), took);
        }
        self.log_step(&step, now, took);
        if let Some(counts) = &outcome.experts {
            self.step_log.add_experts(counts);
        }
        if let Some((_, began)) = self.in_flight.front_mut() {
            *began = now.max(*began);
        }
        self.record(|recorder| recorder.committing(&outcome.tokens, took));
        let events = self.scheduler.commit(&step, outcome);
        self.record(|recorder| recorder.failed(&events));
        self.scheduler.recycle(step);
        Ok(events)
    }

    fn recover(&mut self, error: &EngineError) -> EventBatch {
        let Some((step, newer)) = self.failed.take() else { return EventBatch::new() };
        self.record(|recorder| recorder.retrying(newer));
        self.scheduler.fail_step(&step, &error.message)
    }

    fn abort_all(&mut self) -> Vec<RequestId> {
        self.record(ScheduleRecorder::aborted);
        self.in_flight.clear();
        (self.unsampled, self.failed) = (false, None);
        self.scheduler.abort_all()
    }

    fn reset_prefix_cache(&mut self) {
        self.record(ScheduleRecorder::reset);
        self.scheduler.reset_prefix_cache();
    }

    fn stats(&self) -> EngineStats {
        self.scheduler.stats()
    }
}
