//! Who runs next: continuous batching with chunked prefill, mixed steps and preemption by recompute.
//!
//! A pure state machine. `plan` chooses a [`Step`], the executor runs it, `commit` takes its [`Outcome`]. No clock, no
//! I/O and no channel: a seeded test can drive it (tests/scheduler.rs).
//!
//! Policy: sequences are served in order of arrival. Each step first gives one token to every decoding sequence, then
//! fills the token budget with prefill chunks, oldest first, then admits waiting requests. When the KV pool runs out,
//! the youngest running sequence gives its blocks back and waits at the front of the queue; its tokens are recomputed
//! later (mostly from the prefix cache). The oldest sequence always progresses, so every request finishes.

use crate::plan::{Outcome, SampleRow, Step, StepRow};
use crate::sequence::Sequence;
use pegainfer_core::engine::{EngineStats, EventBatch, FinishReason, GenerateRequest, RequestId, TokenEvent, TokenOut};
use pegainfer_core::kv::BlockPool;
use std::collections::VecDeque;

/// Bounds of a step.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Sequences that hold blocks at once, at least 1.
    pub max_num_seqs: usize,
    /// Tokens of one step, at least `max_num_seqs`: every decoding sequence gets its token in every step.
    pub max_num_batched_tokens: usize,
    /// End-of-text ids of the checkpoint.
    pub eos_token_ids: Vec<u32>,
}

/// Queue, running set and counters.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    /// Not running, oldest first; preempted sequences are older than those that never ran.
    waiting: VecDeque<Sequence>,
    /// Holding blocks, oldest first.
    running: Vec<Sequence>,
    stats: EngineStats,
}

impl Scheduler {
    /// A scheduler without requests over an unused pool.
    pub fn new(config: SchedulerConfig, pool: BlockPool) -> Self {
        assert!(config.max_num_seqs >= 1 && config.max_num_batched_tokens >= config.max_num_seqs);
        Self { config, pool, waiting: VecDeque::new(), running: Vec::new(), stats: EngineStats::default() }
    }

    /// Queues a request that passed `EngineLimits::check`.
    pub fn add(&mut self, id: RequestId, request: GenerateRequest) {
        self.waiting.push_back(Sequence::new(id, request, &self.pool));
    }

    /// Drops a request. One that is in the step in flight keeps its blocks until `commit`.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|seq| seq.id != id);
        if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == id) {
            seq.cancelled = true;
        }
        self.running.retain(|seq| !seq.cancelled || seq.in_flight);
    }

    /// Drops everything, the step in flight included; returns the ids.
    pub fn abort_all(&mut self) -> Vec<RequestId> {
        self.running.drain(..).chain(self.waiting.drain(..)).filter(|seq| !seq.cancelled).map(|seq| seq.id).collect()
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

    /// Distinct blocks held by running sequences; for tests of the pool's accounting.
    pub fn held_blocks(&self) -> usize {
        let mut ids: Vec<u32> = self.running.iter().flat_map(|seq| seq.table.blocks()).map(|b| b.id()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids.len()
    }

    /// Chooses the next step and reports the requests it admits.
    pub fn plan(&mut self) -> (Step, EventBatch) {
        let mut budget = self.config.max_num_batched_tokens;
        // Tokens each running sequence computes in this step.
        let mut share = vec![0; self.running.len()];
        let preemptions = self.stats.preemptions;
        for decoding in [true, false] {
            let mut i = 0;
            while i < self.running.len() && budget > 0 {
                let seq = &self.running[i];
                if (seq.remaining() == 1) == decoding && share[i] == 0 {
                    let tokens = seq.remaining().min(budget);
                    let until = seq.computed + tokens;
                    if self.make_room(i, until, &mut share, &mut budget) {
                        share[i] = tokens;
                        budget -= tokens;
                    }
                }
                i += 1;
            }
        }
        let mut events = EventBatch::new();
        if self.stats.preemptions == preemptions {
            self.admit(&mut budget, &mut share, &mut events);
        }
        (self.build_step(&share), events)
    }

    /// Grows the table of running sequence `i` to `tokens` tokens, preempting younger sequences if the pool is empty.
    /// False when only older sequences hold blocks: this one has to wait for a step.
    fn make_room(&mut self, i: usize, tokens: usize, share: &mut Vec<usize>, budget: &mut usize) -> bool {
        while self.running[i].table.grow(tokens).is_err() {
            if self.running.len() - 1 == i {
                return false;
            }
            let Some(mut victim) = self.running.pop() else { return false };
            *budget += share.pop().unwrap_or(0);
            victim.release();
            self.waiting.push_front(victim);
            self.stats.preemptions += 1;
        }
        true
    }

    fn admit(&mut self, budget: &mut usize, share: &mut Vec<usize>, events: &mut EventBatch) {
        while *budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(seq) = self.waiting.front_mut() else { return };
            let cached = seq.table.match_prefix(&seq.tokens);
            // All of the known tokens must fit, and one block of growth for each running sequence: admitting a
            // request only to preempt it in the next step would waste its prefill.
            if seq.table.missing(seq.tokens.len()) + self.running.len() > self.pool.available() {
                seq.release();
                return;
            }
            seq.computed = cached;
            let tokens = seq.remaining().min(*budget);
            if seq.table.grow(cached + tokens).is_err() {
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
            share.push(tokens);
            self.running.push(seq);
        }
    }

    fn build_step(&mut self, share: &[usize]) -> Step {
        let chosen = || share.iter().enumerate().filter(|(_, tokens)| **tokens > 0);
        let max_blocks = chosen().map(|(i, _)| self.running[i].table.blocks().len()).max().unwrap_or(0);
        let mut step = Step { qo_indptr: vec![0], max_blocks, ..Step::default() };
        for (i, &tokens) in chosen() {
            let seq = &mut self.running[i];
            seq.in_flight = true;
            let range = seq.computed..seq.computed + tokens;
            step.tokens.extend_from_slice(&seq.tokens[range.clone()]);
            step.positions.extend(range.clone().map(|p| p as u32));
            step.slots.extend(range.clone().map(|p| seq.table.slot(p)));
            step.qo_indptr.push(step.tokens.len() as u32);
            step.kv_lens.push(range.end as u32);
            let blocks = seq.table.blocks();
            step.block_tables.extend(blocks.iter().map(|b| b.id()));
            step.block_tables.resize(step.kv_lens.len() * max_blocks, 0);
            step.rows.push(StepRow { id: seq.id, computed: range.end });
            if range.end == seq.tokens.len() {
                step.samples.push(SampleRow {
                    id: seq.id,
                    token: step.tokens.len() as u32 - 1,
                    position: range.end as u64,
                    params: seq.request.sampling,
                    logprobs: seq.request.logprobs,
                });
            }
        }
        step
    }

    /// Takes the outcome of a planned step: new tokens, finished requests, full blocks for the prefix index.
    pub fn commit(&mut self, step: &Step, outcome: Outcome) -> EventBatch {
        assert_eq!(outcome.tokens.len(), step.samples.len(), "one sampled token per sample row");
        for row in &step.rows {
            if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == row.id) {
                seq.in_flight = false;
                seq.computed = row.computed;
                seq.table.register(&seq.tokens[..row.computed]);
            }
        }
        let mut events = EventBatch::new();
        let sampled = step.samples.iter().zip(outcome.tokens).zip(outcome.logprobs);
        for ((row, token), logprobs) in sampled {
            let Some(seq) = self.running.iter_mut().find(|seq| seq.id == row.id && !seq.cancelled) else { continue };
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
        self.running.retain(|seq| !seq.finished && !seq.cancelled);
        events
    }
}
