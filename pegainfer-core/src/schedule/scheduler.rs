//! The scheduler: continuous batching with chunked prefill, mixed steps and preemption by recompute.
//!
//! A pure state machine. `plan` chooses a [`Step`], the executor runs it, `commit` takes its [`Outcome`]. It has no
//! clock, I/O or channel, so a seeded test can drive it (tests/engine/scheduler).
//!
//! A step may be planned while the previous one is in flight, that is, planned but not committed. The sequences of that
//! step continue with tokens that are not known yet. Logits processors and masks that depend on those tokens are filled
//! in after the commit ([`Scheduler::resolve`]), while the forward pass runs. Only masks come from another thread. The
//! scheduler knows in advance when a request reaches its maximum length, but not when it generates an end-of-text or
//! stop token. Such a request has a surplus row in the later step, whose token is dropped. Blocks stay with their
//! sequence until no step in flight uses them.
//!
//! Order: waiting requests are admitted by priority, then by turn, which is fair to the tenants (turns.rs), then by
//! arrival. When nothing more can be admitted, running sequences yield to other tenants (yielding.rs). Each step first
//! gives one token to every decoding sequence, then fills the token budget with prefill chunks, oldest first, then
//! admits waiting requests; one that has the prompt of an earlier request waits until that is computed, one whose
//! adapter has no slot waits for one (adapters.rs), and one whose prompt continues outside the device waits until that
//! is loaded (loading.rs). How large the budget is and whether admission waits for more requests is the admission
//! policy (policy.rs). When the KV pool runs out, a running sequence, the youngest of the largest group of tenants,
//! gives its blocks back and waits at the front of the queue; its tokens are recomputed later (mostly from the prefix
//! cache). That happens only when nothing is in flight. The oldest sequence always progresses, so every request
//! finishes. After a step that failed its sequences run again, and the one that fails alone ends (failing.rs).

mod adapters;
mod building;
mod chunk;
mod failing;
mod loading;
mod planning;
mod replaying;
mod running;
mod shares;
mod yielding;

use super::adapter_slots::AdapterSlots;
use super::encoding::Encoding;
use super::sequence::Sequence;
use super::speculation::Speculation;
use super::speculation::depth::StepCost;
use super::state::SequenceState;
use super::step::{Outcome, Step, StepRow};
use super::turns::{self, Turns};
use crate::engine::{EngineStats, EventBatch, GenerateRequest, RequestId, TokenEvent};
use crate::grammar::{GrammarTracker, MaskSignal};
use crate::kv::BlockPool;
use crate::kv::tiers::Tiers;
use chunk::Chunk;
use running::Running;
use shares::Yielding;
use std::collections::VecDeque;
use std::sync::Arc;

/// Limits of a step.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Maximum number of sequences that hold blocks, at least 1.
    pub max_num_seqs: usize,
    /// Tokens of one step, at least `max_num_seqs`: every decoding sequence gets its token in every step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a step in which many sequences decode and a few prompts are computed. The policy decides when a step
    /// has more.
    pub max_num_mixed_tokens: usize,
    /// End-of-text ids of the checkpoint.
    pub eos_token_ids: Vec<u32>,
    /// Maximum number of distinct adapters in a step.
    pub max_loras: usize,
    /// Speculative decoding; `None` if it is disabled or the model's state does not support it.
    pub speculation: Option<Speculation>,
}

/// Queue, running set and counters.
#[derive(Debug)]
pub struct Scheduler<S: SequenceState = ()> {
    config: SchedulerConfig,
    pool: BlockPool,
    state: S,
    /// Waiting sequences in order of admission; preempted ones come first.
    waiting: VecDeque<Box<Sequence<S::Slot>>>,
    turns: Turns,
    yielding: Yielding,
    /// Slots of the device for adapters.
    adapters: AdapterSlots,
    /// Images that are encoded ahead of their tokens.
    encoding: Encoding,
    /// Copies of blocks outside the device, if there are any.
    tiers: Option<Tiers<S::Kept>>,
    /// True if a request has had a grammar since the scheduler was last empty. Otherwise no step checks masks.
    grammars: bool,
    /// Signals that a mask of one of these grammars is ready.
    masks: Arc<MaskSignal>,
    /// Sequences that hold blocks, oldest first.
    running: Running<S::Slot>,
    /// True if a running sequence has ended and is not dropped yet.
    ended: bool,
    /// True if a sequence may have been in a failed step since its last token. Otherwise no plan looks for suspects.
    has_failures: bool,
    /// Planned steps that are not committed.
    in_flight: usize,
    /// Cost of a token of a decode step, relative to the step's fixed cost; decides how many drafts are worth
    /// verifying.
    token_cost: f64,
    /// Cost of a draft pass of the model, relative to the step's fixed cost.
    draft_cost: f64,
    stats: EngineStats,
    /// Buffers of a plan, for reuse.
    chunks: Vec<Chunk>,
    /// Committed steps, kept to reuse their buffers.
    spare_steps: Vec<Step<S::Row>>,
}

impl<S: SequenceState> Scheduler<S> {
    /// A scheduler without requests over an unused pool, and an unused `state`.
    pub fn new(config: SchedulerConfig, pool: BlockPool, state: S) -> Self {
        assert!(config.max_num_seqs >= 1 && config.max_num_batched_tokens >= config.max_num_seqs);
        let (waiting, turns, running) = (VecDeque::new(), Turns::default(), Running::new());
        let (cost, stats) = (StepCost::new(), EngineStats::default());
        let (token_cost, draft_cost) = (cost.token_cost(), cost.draft_cost());
        let (chunks, spare_steps) = (Vec::new(), Vec::new());
        let adapters = AdapterSlots::new(config.max_loras);
        Self {
            config,
            pool,
            state,
            waiting,
            turns,
            yielding: Yielding::default(),
            adapters,
            encoding: Encoding::default(),
            tiers: None,
            grammars: false,
            masks: Arc::default(),
            running,
            ended: false,
            has_failures: false,
            in_flight: 0,
            token_cost,
            draft_cost,
            stats,
            chunks,
            spare_steps,
        }
    }

    /// Sets the costs of a decode token and of a draft pass of the model, relative to the step's fixed cost.
    pub(super) fn set_costs(&mut self, token_cost: f64, draft_cost: f64) {
        (self.token_cost, self.draft_cost) = (token_cost, draft_cost);
    }

    /// Queues a request that passed `EngineLimits::check`.
    pub fn add(&mut self, id: RequestId, request: GenerateRequest) {
        if self.waiting.is_empty() {
            self.turns.clear();
        }
        self.grammars = request.grammar.is_some() || (self.grammars && self.has_work());
        let turn = self.turns.arrive(request.priority, turns::group(request.tenant));
        let speculation = self.config.speculation.as_ref();
        let mut sequence = Sequence::new(id, request, turn, &self.pool, speculation, &self.masks);
        sequence.served = self.stats.steps;
        turns::enter(&mut self.waiting, Box::new(sequence));
    }

    /// Drops a request. A request in a step in flight keeps its blocks until that step is committed.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|seq| seq.id != id);
        if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == id) {
            seq.cancelled = true;
            self.ended = true;
        }
        self.drop_ended();
    }

    /// Drops all requests and returns their ids. Steps in flight must not run any more.
    pub fn abort_all(&mut self) -> Vec<RequestId> {
        self.in_flight = 0;
        let dropped = self.running.take().into_iter().chain(self.waiting.drain(..));
        dropped.filter(|seq| !seq.is_finished()).map(|seq| seq.id).collect()
    }

    /// Clears the prefix cache; blocks of running sequences stay.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget_prefixes();
        self.state.forget_prefixes();
        self.tiers.iter_mut().for_each(Tiers::clear);
        self.waiting.iter_mut().for_each(|seq| seq.loaded = None);
    }

    /// True while any request is waiting or running, or a transfer is not done.
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty() || self.tiers.as_ref().is_some_and(Tiers::is_busy)
    }

    /// Gauges and counters now.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_blocks_total: self.pool.total(),
            kv_blocks_free: self.pool.available(),
            tiers: self.tiers.as_ref().map(Tiers::stats).unwrap_or_default(),
            ..self.stats
        }
    }

    /// The label of the request of a row of a step in flight.
    pub(super) fn label(&self, row: &StepRow) -> Option<Arc<str>> {
        self.running.iter().find(|seq| seq.id == row.id).and_then(|seq| seq.request.label.clone())
    }

    /// Limits of a step.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The KV pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// State of the model other than KV blocks.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// Ids of the distinct blocks held by running sequences, transfers, and waiting requests for which they were loaded,
    /// ascending; for tests of the pool's accounting.
    pub fn held_blocks(&self) -> Vec<u32> {
        let loaded = self.waiting.iter().filter_map(|seq| seq.loaded.as_ref());
        let tables = self.running.iter().map(|seq| &seq.table).chain(loaded);
        let mut ids: Vec<u32> = tables.flat_map(|table| table.blocks().iter()).collect();
        ids.extend(self.tiers.iter().flat_map(Tiers::held_blocks));
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Checks that each block of the pool is free, cached or held by a running sequence; for tests.
    pub fn check_blocks(&self) -> Result<(), String> {
        self.pool.check(self.held_blocks().len())
    }

    /// Signals that a mask that a request waits for is ready.
    pub fn masks(&self) -> &Arc<MaskSignal> {
        &self.masks
    }

    /// A grammar whose mask is still being computed, if any. All steps but `newest` must be committed. `newest` is a
    /// planned step that is not sampled; if given, only grammars that its samples need count.
    pub fn waiting_for_mask(&self, newest: Option<&Step<S::Row>>) -> Option<&GrammarTracker> {
        let awaited = |seq: &Sequence<S::Slot>| match newest {
            Some(step) => step.samples.iter().any(|sample| sample.deferred && sample.id == seq.id),
            None => seq.unknown == 0,
        };
        let mut running = self.running.iter().filter(|seq| !seq.is_finished());
        running.find_map(|seq| seq.grammar.tracker().filter(|grammar| grammar.is_computing() && awaited(seq)))
    }

    /// Fills in the updates of deferred samples that are known now. `step` is the only planned step that is not
    /// committed. Requests that have ended or failed with their grammar get no update: their draws are dropped.
    pub fn resolve(&mut self, step: &mut Step<S::Row>) {
        assert!(self.in_flight == 1, "updates follow from the tokens of all steps before");
        let mut sampled = step.samples.iter_mut().peekable();
        for (row, &end) in step.rows.iter().zip(step.qo_indptr.iter().skip(1)) {
            while let Some(sample) = sampled.next_if(|sample| sample.token < end) {
                if !sample.deferred {
                    continue;
                }
                let seq = self.running.at_index(row.sequence).filter(|seq| seq.id == row.id && !seq.is_finished());
                let Some(seq) = seq else {
                    sample.deferred = false;
                    continue;
                };
                seq.grammar.update_mask();
                sample.deferred = seq.grammar.waits_for_mask() && !seq.grammar.is_dead();
                if !sample.deferred && !seq.grammar.is_dead() {
                    sample.logits_update = seq.logits_update(sample.position as usize);
                }
            }
        }
    }

    /// Marks the masks that `step` waits for as late: for the next tokens of their requests, plans wait for masks
    /// instead of steps.
    pub fn set_late(&mut self, step: &Step<S::Row>) {
        let late = step.samples.iter().filter(|sample| sample.deferred).map(|sample| sample.id);
        for id in late {
            if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == id) {
                seq.grammar.set_late();
            }
        }
    }

    /// Ends the requests whose grammars failed.
    pub fn fail_errored(&mut self) -> EventBatch {
        if !self.grammars {
            self.drop_ended();
            return EventBatch::new();
        }
        self.fail(|seq| seq.grammar.tracker().and_then(GrammarTracker::failure))
    }

    /// Ends the requests that have an `error`.
    fn fail(&mut self, error: impl Fn(&Sequence<S::Slot>) -> Option<String>) -> EventBatch {
        let mut events = EventBatch::new();
        for seq in self.running.iter_mut().filter(|seq| !seq.is_finished()) {
            if let Some(error) = error(seq) {
                events.push((seq.id, TokenEvent::GrammarFailed { error }));
                seq.finished = true;
                self.ended = true;
            }
        }
        self.drop_ended();
        events
    }

    /// Takes the outcome of the oldest step in flight: new tokens, finished requests, full blocks for the prefix index.
    pub fn commit(&mut self, step: &Step<S::Row>, outcome: Outcome) -> EventBatch {
        let mut events = self.take_outcome(step, outcome);
        events.extend(self.fail_errored());
        events
    }

    /// New tokens and finished requests of the oldest step in flight; the finished ones are not dropped yet.
    fn take_outcome(&mut self, step: &Step<S::Row>, outcome: Outcome) -> EventBatch {
        assert_eq!(outcome.tokens.len(), step.samples.len(), "one sampled token per sample row");
        self.in_flight -= 1;
        let mut events = EventBatch::with_capacity(step.samples.len());
        let mut sampled = 0;
        let (mut logprobs, mut model_drafts) = (outcome.logprobs.into_iter(), outcome.drafts.into_iter());
        let mut vectors = outcome.vectors.into_iter();
        for (row, &end) in step.rows.iter().zip(step.qo_indptr.iter().skip(1)) {
            let mut seq = self.running.at_index(row.sequence).filter(|seq| seq.id == row.id);
            if let Some(seq) = &mut seq {
                seq.in_flight -= 1;
                // A surplus row may have computed a token that is not known.
                let known = row.computed.min(seq.tokens.len());
                seq.register(known);
                self.state.commit(&mut seq.slot, &seq.table, known);
                if let Some(tiers) = &mut self.tiers {
                    let tokens = &seq.tokens[..seq.before_images()];
                    tiers.offer(&seq.table, tokens, &mut seq.offered);
                    tiers.offer_states(&seq.table, tokens, seq.prompt_len, self.state.take_new());
                }
            }
            let mut drawn = 0;
            while let Some(sample) = step.samples.get(sampled).filter(|sample| sample.token < end) {
                let token = outcome.tokens[sampled];
                sampled += 1;
                let logprobs = logprobs.next().flatten().map(Box::new);
                let vector = vectors.next().flatten();
                let Some(seq) = seq.as_mut().filter(|seq| !seq.is_finished()) else { continue };
                if sample.position < seq.prompt_len as u64 {
                    if let Some(prompt) = &mut seq.prompt_logprobs {
                        prompt.extend(logprobs.map(|report| *report));
                    }
                } else if !seq.extends_text(sample.position, step.tokens[sample.token as usize]) {
                    continue;
                } else if seq.grammar.is_dead() {
                    seq.push_unseen(token);
                } else {
                    seq.accept((token, drawn > 0), (logprobs, vector), &self.config.eos_token_ids, &mut events);
                    self.ended |= seq.finished;
                    drawn += 1;
                }
            }
            self.stats.generation_tokens += drawn as u64;
            if let (Some(seq), Some(drafts)) = (&mut seq, model_drafts.next()) {
                seq.set_drafts_of_model(drafts);
            }
            let Some(seq) = seq.filter(|_| drawn > 0) else { continue };
            seq.failures = 0;
            if row.drafts > 0 {
                self.stats.speculation.verified(row.drafts, drawn - 1);
                seq.verified(row.drafts, drawn - 1, self.state.drafts());
            }
            if seq.grammar.lags() && !seq.is_finished() {
                let load = (step.tokens.len(), step.rows.len());
                seq.follow_grammar(self.config.speculation.as_ref(), load, self.token_cost);
            }
        }
        self.stats.steps += 1;
        events
    }

    /// Drops the sequences that have ended and that no step in flight uses; their blocks are free.
    fn drop_ended(&mut self) {
        if self.ended {
            self.running.retain(|seq| !seq.is_finished() || seq.in_flight > 0);
            self.ended = self.running.iter().any(Sequence::is_finished);
        }
    }
}
