//! Who runs next: continuous batching with chunked prefill, mixed steps and preemption by recompute.
//!
//! A pure state machine. `plan` chooses a [`Step`], the executor runs it, `commit` takes its [`Outcome`]. No clock, no
//! I/O and no channel: a seeded test can drive it (tests/scheduler).
//!
//! One step may be planned while the one before it is in flight: planned and not committed. Its sequences go on with
//! tokens that are not known yet; one whose rules depend on them waits for the commit, and one under a grammar for its
//! next mask, too, the only thing that comes from another thread. That a request reaches its length is known in advance;
//! that it draws an end-of-text or stop token is not, and then it has one row too many in the later step, whose token is
//! dropped. Blocks stay with their sequence until no step in flight uses them.
//!
//! Policy: sequences are served in order of priority, then of arrival. Each step first gives one token to every decoding
//! sequence, then fills the token budget with prefill chunks, oldest first, then admits waiting requests. The budget is
//! small while sequences decode, so that their tokens keep coming, unless many prompts wait: then the wait is what
//! clients feel, and large steps end it soonest. A crowd of prompts that is still arriving can be held back, to be
//! computed together. When the KV pool runs out, the youngest running sequence gives its
//! blocks back and waits at the front of the queue; its tokens are recomputed later (mostly from the prefix cache). That
//! happens only when nothing is in flight. The oldest sequence always progresses, so every request finishes.

use super::memory::Memory;
use super::sequence::Sequence;
use super::step::{Outcome, SampleRow, Step, StepRow};
use crate::engine::{EngineStats, EventBatch, FinishReason, GenerateRequest, RequestId, TokenEvent, TokenOut};
use crate::grammar::GrammarTracker;
use crate::kv::BlockPool;
use std::collections::VecDeque;

/// Bounds of a step.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Sequences that hold blocks at once, at least 1.
    pub max_num_seqs: usize,
    /// Tokens of one step, at least `max_num_seqs`: every decoding sequence gets its token in every step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a step that has both decoding sequences and prompts, unless many prompts wait.
    pub max_num_mixed_tokens: usize,
    /// End-of-text ids of the checkpoint.
    pub eos_token_ids: Vec<u32>,
}

/// Queue, running set and counters.
#[derive(Debug)]
pub struct Scheduler<M: Memory = ()> {
    config: SchedulerConfig,
    pool: BlockPool,
    memory: M,
    /// Not running, in the order in which they will; preempted sequences come before those that never ran.
    waiting: VecDeque<Sequence<M::Held>>,
    /// Holding blocks, oldest first.
    running: Vec<Sequence<M::Held>>,
    /// Steps planned and not committed.
    in_flight: usize,
    /// Many prompts have been waiting, and some still are.
    crowded: bool,
    stats: EngineStats,
}

impl<M: Memory> Scheduler<M> {
    /// A scheduler without requests over an unused pool, and an unused memory where the model has one.
    pub fn new(config: SchedulerConfig, pool: BlockPool, memory: M) -> Self {
        assert!(config.max_num_seqs >= 1 && config.max_num_batched_tokens >= config.max_num_seqs);
        let (waiting, running) = (VecDeque::new(), Vec::new());
        Self { config, pool, memory, waiting, running, in_flight: 0, crowded: false, stats: EngineStats::default() }
    }

    /// Queues a request that passed `EngineLimits::check`.
    pub fn add(&mut self, id: RequestId, request: GenerateRequest) {
        // Behind what has run before: that is older, and is to end.
        let later = |seq: &Sequence<M::Held>| !seq.admitted && seq.request.priority > request.priority;
        let at = self.waiting.iter().position(later).unwrap_or(self.waiting.len());
        self.waiting.insert(at, Sequence::new(id, request, &self.pool));
    }

    /// Drops a request. One that is in a step in flight keeps its blocks until that is committed.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|seq| seq.id != id);
        if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == id) {
            seq.cancelled = true;
        }
        self.drop_ended();
    }

    /// Drops everything, the steps in flight included, which must not run any more; returns the ids.
    pub fn abort_all(&mut self) -> Vec<RequestId> {
        self.in_flight = 0;
        self.running.drain(..).chain(self.waiting.drain(..)).filter(|seq| !seq.is_over()).map(|seq| seq.id).collect()
    }

    /// Forgets every cached prefix; blocks of running sequences stay with them.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget_prefixes();
        self.memory.forget_prefixes();
    }

    /// True while any request is waiting or running.
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// Gauges and counters now.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_blocks_total: self.pool.total(),
            kv_blocks_free: self.pool.available(),
            ..self.stats
        }
    }

    /// What the model remembers beside its KV blocks; for tests of its accounting.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Ids of the distinct blocks held by running sequences, ascending; for tests of the pool's accounting.
    pub fn held_blocks(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self.running.iter().flat_map(|seq| seq.table.blocks()).map(|b| b.id()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Tokens of the requests that wait, if they are a crowd and the next step has room for more of them.
    pub fn crowd(&self) -> Option<usize> {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = self.config;
        let waiting = self.waiting.len();
        if waiting < CROWD || self.running.len() + waiting >= max_num_seqs {
            return None;
        }
        let tokens = self.waiting.iter().map(Sequence::remaining).sum();
        (tokens < max_num_batched_tokens).then_some(tokens)
    }

    /// Chooses the next step and reports the requests it admits, of which there are none if they are to be held `back`. The
    /// step is empty when there is nothing to run before the step in flight is committed; an empty step is not run and not
    /// committed.
    pub fn plan(&mut self, back: bool) -> (Step<M::Row>, EventBatch) {
        assert!(self.in_flight < 2, "an unknown token is one of the previous step");
        let mut budget = self.budget();
        // A step has room for a sample of each sequence; what is not needed for that is for reports about prompts.
        let mut spare = self.config.max_num_seqs - self.running.len();
        // Tokens each running sequence computes in this step.
        let mut share = vec![0; self.running.len()];
        let preemptions = self.stats.preemptions;
        for decoding in [true, false] {
            let mut i = 0;
            while i < self.running.len() && budget > 0 {
                let seq = &self.running[i];
                let tokens = seq.share(budget, spare);
                if tokens > 0 && (seq.remaining() == 1) == decoding && share[i] == 0 {
                    let until = seq.planned + tokens;
                    match self.make_room(i, until, &mut share, &mut budget) {
                        Room::Made => {
                            share[i] = tokens;
                            budget -= tokens;
                            spare -= self.running[i].spare(tokens);
                        }
                        Room::Wait => {}
                        Room::Preempt => return (Step::default(), EventBatch::new()),
                    }
                }
                i += 1;
            }
        }
        let mut events = EventBatch::new();
        if self.stats.preemptions == preemptions && !back {
            self.admit(&mut budget, &mut spare, &mut share, &mut events);
        }
        (self.build_step(&share), events)
    }

    /// Tokens of the next step. Its prompts hold up every sequence that decodes, so it is small if there are any; but
    /// once a quarter as many prompts wait as sequences decode, and until none does, larger steps make the sum of all
    /// waits smaller. (Simulated and measured with Qwen3-4B on an H200, docs/benchmarks.) With twice as many prompts one
    /// step for all of them holds up fewer than many steps would: in those, the first prompts wait for the last as
    /// sequences that decode.
    fn budget(&mut self) -> usize {
        let count = |matches: fn(usize) -> bool| self.running.iter().filter(|seq| matches(seq.remaining())).count();
        let (decoding, prompts) = (count(|n| n == 1), self.waiting.len() + count(|n| n > 1));
        self.crowded = prompts >= if self.crowded { 1 } else { CROWD.max(decoding / 4) };
        let most = self.config.max_num_batched_tokens;
        if 2 * decoding <= prompts {
            most
        } else if self.crowded {
            MOST_HELD_UP.max(decoding + MIN_CHUNK).min(most)
        } else {
            self.config.max_num_mixed_tokens.max(decoding + MIN_CHUNK).min(most)
        }
    }

    /// Grows the table of running sequence `i` to `tokens` tokens, preempting younger sequences if the pool is empty, and
    /// reserves what the model remembers of them.
    fn make_room(&mut self, i: usize, tokens: usize, share: &mut Vec<usize>, budget: &mut usize) -> Room {
        while self.running[i].table.grow(tokens).is_err() {
            if self.running.len() - 1 == i {
                return Room::Wait;
            }
            if self.in_flight > 0 {
                return Room::Preempt;
            }
            let Some(mut victim) = self.running.pop() else { return Room::Wait };
            *budget += share.pop().unwrap_or(0);
            victim.release();
            self.waiting.push_front(victim);
            self.stats.preemptions += 1;
        }
        let seq = &mut self.running[i];
        match self.memory.reserve(&mut seq.held, seq.prompt_len, seq.planned..tokens) {
            Ok(()) => Room::Made,
            Err(_) => Room::Wait,
        }
    }

    fn admit(&mut self, budget: &mut usize, spare: &mut usize, share: &mut Vec<usize>, events: &mut EventBatch) {
        while *budget > 0 && *spare > 0 {
            let Some(seq) = self.waiting.front_mut() else { return };
            // What is remembered gives no reports.
            let cached = if seq.reports.is_some() { 0 } else { seq.table.match_prefix(&seq.tokens) };
            let cached = self.memory.resume(&mut seq.held, &mut seq.table, cached);
            // All of the known tokens must fit, and one block of growth for each running sequence: admitting a
            // request only to preempt it in the next step would waste its prefill.
            if seq.table.missing(seq.tokens.len()) + self.running.len() > self.pool.available() {
                seq.release();
                return;
            }
            seq.planned = cached;
            let tokens = seq.share(*budget, *spare - 1);
            let reserved = self.memory.reserve(&mut seq.held, seq.prompt_len, cached..cached + tokens);
            if reserved.is_err() || seq.table.grow(cached + tokens).is_err() {
                seq.release();
                return;
            }
            let Some(mut seq) = self.waiting.pop_front() else { return };
            if !seq.admitted {
                seq.admitted = true;
                seq.cached_tokens = cached;
                self.stats.prefix_queries += seq.prompt_len as u64;
                self.stats.prefix_hits += cached as u64;
                self.stats.prompt_tokens += seq.prompt_len as u64;
                events.push((seq.id, TokenEvent::Admitted { cached_tokens: cached }));
            }
            *budget -= tokens;
            *spare -= 1 + seq.spare(tokens);
            share.push(tokens);
            self.running.push(seq);
        }
    }

    fn build_step(&mut self, share: &[usize]) -> Step<M::Row> {
        let chosen = || share.iter().enumerate().filter(|(_, tokens)| **tokens > 0);
        let max_blocks = chosen().map(|(i, _)| self.running[i].table.blocks().len()).max().unwrap_or(0);
        let mut step = Step { qo_indptr: vec![0], max_blocks, ..Step::default() };
        for (i, &tokens) in chosen() {
            let seq = &mut self.running[i];
            let range = seq.planned..seq.planned + tokens;
            if seq.reports.is_some() {
                let (first, tokens) = (step.tokens.len(), &seq.tokens[..seq.prompt_len]);
                let known =
                    range.clone().zip(first..).filter_map(|(p, t)| Some((t as u32, p + 1, *tokens.get(p + 1)?)));
                let asked = seq.request.prompt_logprobs;
                step.samples.extend(known.map(|(t, p, token)| SampleRow::report(seq.id, t, p, token, asked)));
            }
            self.memory.plan(&mut seq.held, range.clone(), step.tokens.len() as u32, &mut step.memory);
            step.tokens.extend(range.clone().map(|p| seq.input(p)));
            step.positions.extend(range.clone().map(|p| p as u32));
            step.slots.extend(range.clone().map(|p| seq.table.slot(p)));
            step.qo_indptr.push(step.tokens.len() as u32);
            step.kv_lens.push(range.end as u32);
            let blocks = seq.table.blocks();
            step.block_tables.extend(blocks.iter().map(|b| b.id()));
            step.block_tables.resize(step.kv_lens.len() * max_blocks, 0);
            step.rows.push(StepRow { id: seq.id, computed: range.end });
            seq.planned = range.end;
            seq.in_flight += 1;
            if range.end == seq.len() {
                let adjustment = seq.adjustment();
                seq.unknown += 1;
                seq.sample = step.samples.len();
                step.samples.push(SampleRow {
                    id: seq.id,
                    token: step.tokens.len() as u32 - 1,
                    position: range.end as u64,
                    adjustment,
                    params: seq.request.sampling,
                    logprobs: seq.request.logprobs,
                });
            }
        }
        self.in_flight += usize::from(!step.is_empty());
        step
    }

    /// A running sequence that waits for nothing but its mask, if there is one.
    pub fn masked_out(&self) -> Option<&GrammarTracker> {
        let grammars = self.running.iter().filter(|seq| seq.unknown == 0).filter_map(|seq| seq.grammar.as_ref());
        grammars.into_iter().find(|grammar| grammar.mask().is_none())
    }

    /// Ends the requests whose grammar failed.
    pub fn fail_broken(&mut self) -> EventBatch {
        let mut events = EventBatch::new();
        for seq in self.running.iter_mut().filter(|seq| !seq.is_over()) {
            if let Some(error) = seq.grammar.as_ref().and_then(GrammarTracker::failure) {
                events.push((seq.id, TokenEvent::Failed { error }));
                seq.finished = true;
            }
        }
        self.drop_ended();
        events
    }

    /// Takes the outcome of the oldest step in flight: new tokens, finished requests, full blocks for the prefix index.
    pub fn commit(&mut self, step: &Step<M::Row>, outcome: Outcome) -> EventBatch {
        assert_eq!(outcome.tokens.len(), step.samples.len(), "one sampled token per sample row");
        self.in_flight -= 1;
        for row in &step.rows {
            if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == row.id) {
                seq.in_flight -= 1;
                // A row too many may have computed a token that nobody knows.
                let known = row.computed.min(seq.tokens.len());
                seq.table.register(&seq.tokens[..known]);
                self.memory.commit(&mut seq.held, &seq.table, known);
            }
        }
        let mut events = EventBatch::new();
        let sampled = step.samples.iter().zip(outcome.tokens).zip(outcome.logprobs);
        for ((row, token), logprobs) in sampled {
            let Some(seq) = self.running.iter_mut().find(|seq| seq.id == row.id && !seq.is_over()) else { continue };
            if row.position < seq.prompt_len as u64 {
                seq.reports.iter_mut().for_each(|reports| reports.extend(logprobs.clone()));
                continue;
            }
            if let Some(reports) = seq.reports.take() {
                events.push((row.id, TokenEvent::Prompt(reports)));
            }
            self.stats.generation_tokens += 1;
            let finished = seq.push(token, &self.config.eos_token_ids);
            let is_stop = matches!(finished, Some(FinishReason::Stop(_)));
            events.push((row.id, TokenEvent::Token(TokenOut { id: token, is_stop, logprobs })));
            if let Some(reason) = finished {
                events.push((row.id, TokenEvent::Finished { reason, usage: seq.usage() }));
                seq.finished = true;
            }
        }
        self.stats.steps += 1;
        events.extend(self.fail_broken());
        events
    }

    /// Drops the sequences that have ended and that no step in flight uses; their blocks are free.
    fn drop_ended(&mut self) {
        self.running.retain(|seq| !seq.is_over() || seq.in_flight > 0);
    }
}

/// Prompts that wait before they count as many.
const CROWD: usize = 2;
/// Tokens of a step that holds up more than half as many sequences as it has prompts.
const MOST_HELD_UP: usize = 16_384;
/// Tokens for prompts that every step has room for.
const MIN_CHUNK: usize = 16;

/// What became of a sequence that wants blocks.
enum Room {
    /// It has them.
    Made,
    /// Only older sequences could give some: it waits for a later step.
    Wait,
    /// Younger ones have to give theirs, but a step in flight may use them.
    Preempt,
}
