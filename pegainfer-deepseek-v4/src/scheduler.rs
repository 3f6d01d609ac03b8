//! Who runs next: continuous batching with chunked prefill, mixed steps and preemption by recompute.
//!
//! A pure state machine. `plan` chooses a [`Step`], the executor runs it, `commit` takes its [`Outcome`]. No clock, no
//! I/O and no channel: a seeded test can drive it (tests/scheduler.rs). One step is planned at a time.
//!
//! Policy: sequences are served in order of arrival. Each step first gives one token to every decoding sequence, then
//! fills the token budget with prefill chunks, oldest first, then admits waiting requests. When pages run out, cached
//! prefixes go first; then the youngest running sequence gives its pages back and waits at the front of the queue. The
//! oldest sequence always progresses, so every request finishes.

use crate::plan::{Outcome, PAGE_TOKENS, SampleRow, Step};
use crate::prefix::{Match, PrefixCache};
use crate::sequence::Sequence;
use pegainfer_core::engine::{EngineStats, EventBatch, FinishReason, GenerateRequest, RequestId, TokenEvent, TokenOut};
use pegainfer_core::kv::BlockPool;
use std::collections::VecDeque;

/// Bounds of a step.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Sequences that run at once, at least 1; each has a slot, the first ones.
    pub max_num_seqs: usize,
    /// Slots behind them, for the states of cached prefixes.
    pub cached_states: usize,
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
    cache: PrefixCache,
    /// Slots of no sequence.
    free_slots: Vec<u32>,
    /// Not running, oldest first; preempted sequences are older than those that never ran.
    waiting: VecDeque<Sequence>,
    /// With a slot, oldest first.
    running: Vec<Sequence>,
    /// States that the step in flight copies: whose, and to which slot.
    copying: Vec<(RequestId, u32)>,
    stats: EngineStats,
}

impl Scheduler {
    /// A scheduler without requests over an unused pool of pages.
    pub fn new(config: SchedulerConfig, pool: BlockPool) -> Self {
        assert!(config.max_num_seqs >= 1 && config.max_num_batched_tokens >= config.max_num_seqs);
        let first = config.max_num_seqs as u32;
        Self {
            cache: PrefixCache::new(first..first + config.cached_states as u32),
            free_slots: (0..first).rev().collect(),
            config,
            pool,
            waiting: VecDeque::new(),
            running: Vec::new(),
            copying: Vec::new(),
            stats: EngineStats::default(),
        }
    }

    /// Queues a request that passed `EngineLimits::check`.
    pub fn add(&mut self, id: RequestId, request: GenerateRequest) {
        self.waiting.push_back(Sequence::new(id, request));
    }

    /// Drops a request. The step in flight, if it is in it, has been computed already; its tokens are dropped.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|seq| seq.id != id);
        self.drop_running(|seq| seq.id == id);
    }

    /// Drops everything, the step in flight included; returns the ids. What it left behind is unknown, so cached
    /// prefixes go, too.
    pub fn abort_all(&mut self) -> Vec<RequestId> {
        let ids = self.running.iter().chain(&self.waiting).map(|seq| seq.id).collect();
        self.waiting.clear();
        self.drop_running(|_| true);
        for (_, slot) in std::mem::take(&mut self.copying) {
            self.cache.return_slot(slot);
        }
        self.cache.clear();
        ids
    }

    /// Forgets every cached prefix; pages of running sequences stay with them.
    pub fn reset_prefix_cache(&mut self) {
        self.cache.clear();
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
            kv_blocks_free: self.available(),
            ..self.stats
        }
    }

    /// Pages that can be had without preemption.
    fn available(&self) -> usize {
        self.pool.available() + self.cache.idle_pages()
    }

    /// Chooses the next step and reports the requests it admits. An empty step is not run and not committed.
    pub fn plan(&mut self) -> (Step, EventBatch) {
        assert!(self.copying.is_empty(), "one step is in flight at a time");
        let mut budget = self.config.max_num_batched_tokens;
        // Tokens each running sequence computes in this step.
        let mut share = vec![0; self.running.len()];
        let preemptions = self.stats.preemptions;
        for decoding in [true, false] {
            let mut i = 0;
            while i < self.running.len() && budget > 0 {
                let seq = &self.running[i];
                let tokens = seq.chunk(budget);
                if (seq.remaining() == 1) == decoding
                    && self.make_room(i, seq.computed + tokens, &mut share, &mut budget)
                {
                    share[i] = tokens;
                    budget -= tokens;
                }
                i += 1;
            }
        }
        let (mut events, mut copies) = (EventBatch::new(), Vec::new());
        if self.stats.preemptions == preemptions {
            self.admit(&mut budget, &mut share, &mut copies, &mut events);
        }
        (self.build_step(&share, copies), events)
    }

    /// Grows running sequence `i` to `tokens` tokens, preempting younger ones if there are no pages; false if it has to
    /// wait for older ones.
    fn make_room(&mut self, i: usize, tokens: usize, share: &mut Vec<usize>, budget: &mut usize) -> bool {
        while self.running[i].missing(tokens) > 0 {
            if let Some(page) = self.cache.allocate(&self.pool) {
                self.running[i].pages.push(page);
                continue;
            }
            if self.running.len() - 1 == i {
                return false;
            }
            let Some(mut victim) = self.running.pop() else { return false };
            *budget += share.pop().unwrap_or(0);
            self.free_slots.extend(victim.release());
            self.waiting.push_front(victim);
            self.stats.preemptions += 1;
        }
        true
    }

    fn admit(
        &mut self,
        budget: &mut usize,
        share: &mut Vec<usize>,
        copies: &mut Vec<(u32, u32)>,
        events: &mut EventBatch,
    ) {
        while *budget > 0 {
            let (Some(&slot), Some(seq)) = (self.free_slots.last(), self.waiting.front_mut()) else { return };
            let found = self.cache.find(&seq.tokens, seq.request.cache_salt);
            let (pages, copy) = found.map_or((Vec::new(), None), |Match { pages, copy }| (pages, Some(copy)));
            seq.computed = pages.len() * PAGE_TOKENS;
            seq.pages = pages;
            // All of the known tokens must fit, and one page of growth for each running sequence: admitting a request
            // only to preempt it in the next step would waste its prefill.
            let needed = seq.missing(seq.tokens.len()) + self.running.len();
            if needed > self.pool.available() + self.cache.idle_pages() {
                seq.release();
                return;
            }
            let tokens = seq.chunk(*budget);
            while seq.missing(seq.computed + tokens) > 0 {
                let Some(page) = self.cache.allocate(&self.pool) else { break };
                seq.pages.push(page);
            }
            let Some(mut seq) = self.waiting.pop_front() else { return };
            self.free_slots.pop();
            seq.slot = Some(slot);
            copies.extend(copy.map(|copy| (copy, slot)));
            if !seq.admitted {
                seq.admitted = true;
                seq.cached_tokens = seq.computed;
                self.stats.prefix_queries += seq.prompt_len as u64;
                self.stats.prefix_hits += seq.computed as u64;
                self.stats.prompt_tokens += seq.prompt_len as u64;
                events.push((seq.id, TokenEvent::Admitted { cached_tokens: seq.computed }));
            }
            *budget -= tokens;
            share.push(tokens);
            self.running.push(seq);
        }
    }

    fn build_step(&mut self, share: &[usize], copies: Vec<(u32, u32)>) -> Step {
        let chosen = || share.iter().enumerate().filter(|(_, tokens)| **tokens > 0);
        let max_pages = chosen().map(|(i, _)| self.running[i].pages.len()).max().unwrap_or(0);
        let mut step = Step { qo_indptr: vec![0], max_pages, copies, ..Step::default() };
        for (i, &tokens) in chosen() {
            let seq = &self.running[i];
            let Some(slot) = seq.slot else { continue };
            let range = seq.computed..seq.computed + tokens;
            let pages: Vec<u32> = seq.pages.iter().map(|page| page.id()).collect();
            step.push(seq.id, &seq.tokens[range.clone()], range.start, slot, &pages);
            if range.end == seq.tokens.len() {
                step.samples.push(SampleRow {
                    id: seq.id,
                    token: step.tokens.len() as u32 - 1,
                    position: range.end as u64,
                    adjustment: seq.adjustment(),
                    params: seq.request.sampling,
                    logprobs: seq.request.logprobs,
                });
            }
            if range.end.is_multiple_of(PAGE_TOKENS)
                && let Some(to) = self.cache.take_slot()
            {
                step.snapshots.push((slot, to));
                self.copying.push((seq.id, to));
            }
        }
        step
    }

    /// Takes the outcome of the step in flight: new tokens, finished requests, states for the prefix cache.
    pub fn commit(&mut self, step: &Step, outcome: Outcome) -> EventBatch {
        assert_eq!(outcome.tokens.len(), step.samples.len(), "one sampled token per sample row");
        for row in &step.rows {
            if let Some(seq) = self.running.iter_mut().find(|seq| seq.id == row.id) {
                seq.computed = row.computed;
            }
        }
        for (id, slot) in std::mem::take(&mut self.copying) {
            match self.running.iter().find(|seq| seq.id == id) {
                Some(seq) => {
                    let done = &seq.tokens[..seq.computed];
                    self.cache.insert(done, &seq.pages, seq.request.cache_salt, slot);
                }
                None => self.cache.return_slot(slot),
            }
        }
        let mut events = EventBatch::new();
        let mut finished = Vec::new();
        for ((row, token), logprobs) in step.samples.iter().zip(outcome.tokens).zip(outcome.logprobs) {
            let Some(seq) = self.running.iter_mut().find(|seq| seq.id == row.id) else { continue };
            self.stats.generation_tokens += 1;
            let end = seq.push(token, &self.config.eos_token_ids);
            let is_stop = matches!(end, Some(FinishReason::Stop(_)));
            events.push((row.id, TokenEvent::Token(TokenOut { id: token, is_stop, logprobs })));
            if let Some(reason) = end {
                events.push((row.id, TokenEvent::Finished { reason, usage: seq.usage() }));
                finished.push(row.id);
            }
        }
        self.stats.steps += 1;
        self.drop_running(|seq| finished.contains(&seq.id));
        events
    }

    /// Drops running sequences; their pages and slots are free.
    fn drop_running(&mut self, over: impl Fn(&Sequence) -> bool) {
        for seq in self.running.extract_if(.., |seq| over(seq)) {
            self.free_slots.extend(seq.slot);
        }
    }
}
