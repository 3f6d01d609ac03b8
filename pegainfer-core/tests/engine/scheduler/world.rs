//! One random world: a scheduler, its open requests, and a device with steps in flight.

use super::copies::{follow, tiers};
use super::media::{DeviceKv, Found, Media, MediaSlots};
use crate::device::{Device, blocks_of, kv_value};
use crate::drafts::Oracle;
use crate::kinds::{Kind, StepOf};
use crate::requests::{EOS, Rng, VOCAB, Waltz, continuation, random_params, random_request};
use pegainfer_core::adapter::{Adapter, AdapterId};
use pegainfer_core::engine::{
    EngineLimits, EngineStats, EventBatch, FinishReason, RequestId, SubmitError, TokenEvent, TokenOut,
};
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_core::kv::{BlockPool, ContentName, Medium};
use pegainfer_core::logits_processors::LogitsProcessors;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_core::schedule::{NO_ADAPTER, Scheduler, SchedulerConfig, StepAdapters};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// Adapters that requests name, for at most a fifth as many slots.
const ADAPTERS: u32 = 20;

/// The adapter that is loaded as number `i`, from 1 on.
fn adapter(i: u32) -> Arc<Adapter> {
    Arc::new(Adapter::new(AdapterId(NonZeroU32::new(i).unwrap()), ()))
}

/// A request that has not ended.
struct Open {
    expected: Vec<u32>,
    got: Vec<u32>,
    /// Number of planned sample rows, without those after drafts.
    drawn: usize,
    admitted: bool,
    prompt: Arc<[u32]>,
    cache_salt: u64,
    adapter: Option<Arc<Adapter>>,
    prompt_len: usize,
    /// Prompt tokens whose log-probabilities are still expected.
    prompt_logprobs: Option<Vec<u32>>,
    /// A vector is still expected.
    vector: bool,
    has_grammar: bool,
    arrived: usize,
}

/// Pool size, step bounds and load are drawn from the seed.
pub struct World<K: Kind> {
    rng: Rng,
    limits: EngineLimits,
    speculation: Option<Speculation>,
    pool: BlockPool,
    config: SchedulerConfig,
    scheduler: Scheduler<K::State>,
    device: Device<K>,
    /// Memory of the host, if blocks have copies there.
    media: Option<Media>,
    /// Texts of requests that have ended, and their salts, if blocks have copies: some of them come again.
    past: Vec<(Vec<u32>, u64)>,
    /// What the log of changes says is where, if blocks have copies.
    told: BTreeSet<(Medium, ContentName)>,
    /// What the tiers did before each restart.
    before: Vec<TierStats>,
    /// Planned and not committed.
    in_flight: VecDeque<StepOf<K>>,
    open: HashMap<RequestId, Open>,
    /// Adapters that requests name; none if the engine has no slots.
    adapters: Vec<Arc<Adapter>>,
    /// Number of adapters loaded so far.
    loaded: u32,
    submitted: u64,
    finished: u64,
    cancelled: u64,
    /// Accepted drafts of requests with a grammar.
    accepted_by_grammars: u64,
    /// Percent: how often the host plans ahead instead of waiting for the step in flight.
    eager: usize,
    /// Percent: how often a request comes.
    arrivals: usize,
    /// Percent: how often requests are held back.
    holds: usize,
    steps: usize,
    /// Number of consecutive plans that found nothing to run with nothing in flight.
    idle: usize,
}

impl<K: Kind> World<K> {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let blocks = 2 + rng.below(K::BLOCKS - 2);
        let limits = EngineLimits {
            max_model_len: 16 + rng.below(200 * K::SCALE),
            vocab_size: VOCAB as usize,
            block_size: K::BLOCK_TOKENS,
            kv_blocks: blocks,
            kv_cache_dtype: "bf16",
            max_num_seqs: 1 + rng.below(12),
            eos_token_ids: vec![EOS],
            num_speculative_tokens: None,
            image_token: None,
            unsupported: &[],
            // Half of the engines have no adapters.
            max_loras: if rng.chance(50) { 0 } else { 1 + rng.below(4) },
            hidden_size: 4,
        };
        let pool = BlockPool::new(blocks, K::BLOCK_TOKENS);
        let oracle = Oracle::new(&mut rng);
        let speculation = (K::DRAFTS && rng.chance(40)).then(|| oracle.speculation(&mut rng));
        let config = SchedulerConfig {
            speculation: speculation.clone(),
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_seqs + rng.below(64 * K::SCALE),
            max_num_mixed_tokens: rng.below(64 * K::SCALE),
            eos_token_ids: limits.eos_token_ids.clone(),
            max_loras: limits.max_loras,
        };
        let (state, states) = K::new(&mut rng, limits.max_num_seqs);
        let mut device = Device {
            kv: vec![0; blocks * K::BLOCK_TOKENS],
            kv_adapters: vec![None; blocks * K::BLOCK_TOKENS],
            states,
            sampled: vec![],
            counts: HashMap::new(),
            oracle,
        };
        let mut scheduler = Scheduler::new(config.clone(), pool.clone(), state);
        let media = (K::HAS_TIERS && rng.chance(50)).then(|| {
            let has_states = !device.states.state_slots().is_empty();
            let (host, disk) = (1 + rng.below(60), [0, 1 + rng.below(60)][rng.below(2)]);
            let host_states = if has_states { 1 + rng.below(40) } else { 0 };
            let disk_states = if has_states && disk > 0 { 1 + rng.below(40) } else { 0 };
            let slots = MediaSlots { host, disk, host_states, disk_states };
            scheduler.use_tiers(tiers(&pool, slots, Found::default()));
            Media::new(&mut rng, slots)
        });
        let loaded = if config.max_loras > 0 { ADAPTERS } else { 0 };
        let adapters = (1..=loaded).map(adapter).collect();
        Self {
            adapters,
            loaded,
            speculation,
            config,
            scheduler,
            media,
            past: Vec::new(),
            told: BTreeSet::new(),
            before: Vec::new(),
            device,
            in_flight: VecDeque::new(),
            open: HashMap::new(),
            submitted: 0,
            finished: 0,
            cancelled: 0,
            accepted_by_grammars: 0,
            eager: [0, 50, 100][rng.below(3)],
            arrivals: 5 + rng.below(60),
            holds: [0, 20, 80][rng.below(3)],
            steps: 0,
            idle: 0,
            rng,
            limits,
            pool,
        }
    }

    /// Requests come for `max_steps` turns, and then all that came end. Returns the scheduler's counters, and how
    /// many drafts of requests with a grammar were accepted.
    pub fn run(mut self, max_steps: usize) -> (EngineStats, u64) {
        while self.steps < max_steps || self.scheduler.has_work() {
            if self.steps < max_steps && self.open.len() < 40 && self.rng.chance(self.arrivals) {
                self.arrive();
            }
            self.cancel();
            let planned = self.plan();
            // Cancels also come while the device runs.
            self.cancel();
            if self.rng.chance(1) && (self.media.is_none() || self.rng.chance(10)) {
                self.scheduler.reset_prefix_cache();
            }
            self.copy();
            self.check_blocks();
            if self.in_flight.len() == 2 || !planned || !self.rng.chance(self.eager) {
                self.finish();
            }
            self.pool.check(self.scheduler.held_blocks().len()).unwrap();
            K::check(self.scheduler.state());
            if let Some((id, _)) = self.open.iter().find(|(_, o)| self.steps - o.arrived > 40 * 400) {
                panic!("{id:?} starves");
            }
            self.steps += 1;
        }
        assert!(self.open.is_empty() && self.in_flight.is_empty() && self.submitted == self.finished + self.cancelled);
        assert_eq!(self.pool.available(), self.limits.kv_blocks, "blocks leaked");
        K::check_idle(self.scheduler.state());
        if let Some(media) = &self.media {
            let TierStats { disk_used, state_disk_used, .. } = self.scheduler.stats().tiers;
            let is_known = |found| found == [disk_used, state_disk_used];
            assert!(media.on_disk().is_none_or(is_known), "the disk keeps what was forgotten");
            follow(&mut self.told, &self.pool);
            let on_host = self.told.iter().filter(|(medium, _)| *medium == Medium::Host).count();
            assert_eq!(on_host, self.scheduler.stats().tiers.host_used, "the log tells another story");
        }
        let mut stats = self.scheduler.stats();
        stats.tiers = self.before.into_iter().fold(stats.tiers, TierStats::plus);
        (stats, self.accepted_by_grammars)
    }

    /// Adds a request; an impossible one is refused.
    fn arrive(&mut self) {
        let mut request = random_request(&mut self.rng, &self.limits, K::SCALE);
        // Another choice of a prompt that is open.
        if let Some(first) = self.random_open().filter(|_| self.rng.chance(20)) {
            let first_open = &self.open[&first];
            (request.prompt, request.cache_salt) = (first_open.prompt.clone(), first_open.cache_salt);
            request.adapter = first_open.adapter.clone();
            request.same_prompt_as = Some(first);
        } else if !self.past.is_empty() && self.rng.chance(50) {
            let (text, salt) = &self.past[self.rng.below(self.past.len())];
            (request.prompt, request.cache_salt) = (text.as_slice().into(), *salt);
        } else if !self.adapters.is_empty() && self.rng.chance(70) {
            request.adapter = Some(self.random_adapter());
        }
        let params = random_params(&mut self.rng, &request);
        request.logits_processors = LogitsProcessors::new(params.clone(), self.limits.vocab_size).unwrap();
        if params.allowed_token_ids.is_none() && self.rng.chance(15) {
            request.grammar = Some(Arc::new(Waltz));
        }
        match self.limits.check(&request) {
            Ok(()) => {}
            Err(SubmitError::QueueFull { .. } | SubmitError::EngineStopped) => unreachable!("check is pure"),
            Err(_) => return,
        }
        let id = RequestId(self.submitted);
        self.submitted += 1;
        let (expected, prompt_len) = (continuation(&request, &params), request.prompt.len());
        let prompt_logprobs = request.prompt_logprobs.map(|_| request.prompt[1..].to_vec());
        let (prompt, cache_salt, has_grammar) = (request.prompt.clone(), request.cache_salt, request.grammar.is_some());
        let (adapter, vector) = (request.adapter.clone(), request.vector);
        self.scheduler.add(id, request);
        let (got, arrived) = (vec![], self.steps);
        let (drawn, admitted) = (0, false);
        let open = Open {
            expected,
            got,
            drawn,
            admitted,
            prompt,
            cache_salt,
            adapter,
            prompt_len,
            prompt_logprobs,
            vector,
            has_grammar,
            arrived,
        };
        self.open.insert(id, open);
    }

    /// A random adapter, which now and then was loaded again.
    fn random_adapter(&mut self) -> Arc<Adapter> {
        let i = self.rng.below(self.adapters.len());
        if self.rng.chance(5) {
            self.loaded += 1;
            self.adapters[i] = adapter(self.loaded);
        }
        self.adapters[i].clone()
    }

    /// A random open request, if any.
    fn random_open(&mut self) -> Option<RequestId> {
        let mut ids: Vec<RequestId> = self.open.keys().copied().collect();
        ids.sort_unstable();
        (!ids.is_empty()).then(|| ids[self.rng.below(ids.len())])
    }

    /// Drops some open request, now and then; a second time changes nothing.
    fn cancel(&mut self) {
        if let Some(id) = self.random_open().filter(|_| self.rng.chance(4)) {
            self.scheduler.cancel(id);
            self.scheduler.cancel(id);
            self.open.remove(&id);
            self.cancelled += 1;
        }
    }

    /// Starts transfers, and now and then ends one, or gives up waiting for it.
    fn copy(&mut self) {
        let Some(media) = &mut self.media else { return };
        let Device { kv, kv_adapters, states, .. } = &mut self.device;
        let (block_tokens, states) = (K::BLOCK_TOKENS, states.state_slots());
        let mut kv = DeviceKv { values: kv, adapters: kv_adapters, block_tokens, states };
        let done = self.scheduler.stats().steps;
        media.start(self.scheduler.take_transfers(), &mut kv, done + self.in_flight.len() as u64);
        if let Some(transfer) = media.in_flight.first().filter(|_| self.rng.chance(2)) {
            self.scheduler.give_up(transfer.id);
        }
        if let Some(done) = media.turn(&mut self.rng, &mut kv, done) {
            self.scheduler.finish_transfer(done);
            self.idle = 0;
        }
        if self.steps.is_multiple_of(16) {
            self.scheduler.tiers().unwrap().check().unwrap();
            follow(&mut self.told, &self.pool);
        }
        if media.has_disk() && self.rng.chance(1) && self.rng.chance(20) {
            self.restart();
        }
    }

    /// Kills the engine and starts another one, which has only what is on the disk.
    fn restart(&mut self) {
        let Some(media) = &mut self.media else { return };
        self.cancelled += self.open.len() as u64;
        self.open.clear();
        self.in_flight.clear();
        self.before.push(self.scheduler.stats().tiers);
        let TierStats { host_slots, disk_slots, state_slots, state_disk_slots, .. } = self.scheduler.stats().tiers;
        let (host, disk) = (host_slots, disk_slots);
        let slots = MediaSlots { host, disk, host_states: state_slots, disk_states: state_disk_slots };
        self.pool = BlockPool::new(self.limits.kv_blocks, K::BLOCK_TOKENS);
        self.told.clear();
        let (state, states) = K::new(&mut self.rng, self.limits.max_num_seqs);
        self.scheduler = Scheduler::new(self.config.clone(), self.pool.clone(), state);
        self.scheduler.use_tiers(tiers(&self.pool, slots, media.restart()));
        self.device.kv.fill(0xdead);
        (self.device.states, self.device.counts) = (states, HashMap::new());
    }

    /// Checks the KV of everything before the tokens of a step, which may have come from outside the device.
    fn check_context(&self, step: &StepOf<K>) {
        for (b, row) in step.rows.iter().enumerate() {
            let Some(open) = self.open.get(&row.id) else { continue };
            let before = step.kv_lens[b] as usize - (step.qo_indptr[b + 1] - step.qo_indptr[b]) as usize;
            let mut hash = 0;
            for (position, token) in open.prompt.iter().chain(&open.got).take(before).enumerate() {
                hash = kv_value(hash, *token);
                let block = step.block_tables[b].at(position / K::BLOCK_TOKENS) as usize;
                let kv = self.device.kv[block * K::BLOCK_TOKENS + position % K::BLOCK_TOKENS];
                assert_eq!(kv, hash, "{:?} has the KV of another text at position {position}", row.id);
            }
        }
    }

    /// Plans a step; false if there is nothing to run.
    fn plan(&mut self) -> bool {
        if self.in_flight.len() == 2 || (self.in_flight.len() == 1 && !self.rng.chance(self.eager)) {
            return false;
        }
        // The next step takes the tokens of the newest one as input, so that one must be sampled first.
        if let Some(mut newest) = self.in_flight.pop_back_if(|step| step.is_deferred()) {
            let is_next = self.in_flight.is_empty();
            if is_next {
                self.resolve(&mut newest);
            }
            self.in_flight.push_back(newest);
            if !is_next {
                return false;
            }
        }
        let back = self.rng.chance(self.holds);
        let (step, admissions) = self.scheduler.plan(back);
        assert!(!back || admissions.is_empty(), "admitted although held back");
        self.take(admissions, false);
        self.check_step(&step);
        if step.is_empty() {
            return false;
        }
        self.in_flight.push_back(step);
        self.idle = 0;
        true
    }

    /// Waits for the masks that the samples of `step` need.
    fn resolve(&mut self, step: &mut StepOf<K>) {
        self.scheduler.resolve(step);
        while step.is_deferred() {
            if self.rng.chance(30) {
                self.scheduler.set_late(step);
            }
            // A mask may become ready before it is read.
            if let Some(grammar) = self.scheduler.waiting_for_mask(Some(step)) {
                grammar.wait(Duration::from_secs(10));
            }
            self.scheduler.resolve(step);
        }
    }

    /// Finishes the oldest step of the device; without one, waits for a mask.
    fn finish(&mut self) {
        if let Some(mut step) = self.in_flight.pop_front() {
            if step.is_deferred() {
                self.resolve(&mut step);
            }
            if self.media.is_some() {
                self.check_context(&step);
            }
            let events = self.scheduler.commit(&step, self.device.run(&step));
            return self.take(events, !self.in_flight.is_empty());
        }
        if let Some(grammar) = self.scheduler.waiting_for_mask(None) {
            grammar.wait(Duration::from_secs(10));
        }
        // A mask may come between the plan and the look at it, and requests may be held back, but not every time.
        let waits = self.media.as_ref().is_some_and(|media| !media.in_flight.is_empty());
        self.idle = if self.scheduler.has_work() && !waits { self.idle + 1 } else { 0 };
        assert!(self.idle < 200, "work without a step: the scheduler hangs");
    }

    /// A planned step fits the executor and is for open requests only; its sample rows are counted.
    fn check_step(&mut self, step: &StepOf<K>) {
        let (seqs, tokens) = (self.limits.max_num_seqs, self.limits.max_num_seqs + 64 * K::SCALE);
        let max_samples = Speculation::samples(self.speculation.as_ref(), seqs, tokens);
        assert!(step.samples.len() <= max_samples, "more samples than the executor can hold");
        assert!(step.tokens.len() <= tokens);
        self.check_adapters(step);
        for row in &step.rows {
            assert!(self.open.contains_key(&row.id), "{:?} is planned after its end", row.id);
        }
        let drafted = |token| {
            let row = step.qo_indptr.partition_point(|first| *first <= token) - 1;
            token as usize >= step.qo_indptr[row + 1] as usize - step.rows[row].drafts
        };
        for sample in &step.samples {
            let entry = self.open.get_mut(&sample.id).unwrap();
            entry.drawn += usize::from(sample.position >= entry.prompt_len as u64 && !drafted(sample.token));
        }
    }

    /// Each row has the slot of its own adapter, and a step no more adapters than there are slots.
    fn check_adapters(&self, step: &StepOf<K>) {
        let StepAdapters { rows, held } = &step.adapters;
        let mut slots: Vec<u32> = held.iter().map(|(slot, _)| *slot).collect();
        slots.sort_unstable();
        slots.dedup();
        assert!(slots.len() == held.len() && slots.iter().all(|slot| (*slot as usize) < self.limits.max_loras));
        assert!(rows.is_empty() || (rows.len() == step.rows.len() && !held.is_empty()));
        for (b, row) in step.rows.iter().enumerate() {
            let slot = rows.get(b).filter(|slot| **slot != NO_ADAPTER);
            let adapter = slot.and_then(|slot| held.iter().find(|(held, _)| held == slot)).map(|(_, adapter)| adapter);
            assert_eq!(adapter, self.open[&row.id].adapter.as_ref(), "{:?} has another adapter", row.id);
        }
    }

    /// Checks that every block is free or held, and that blocks of steps in flight are held.
    fn check_blocks(&self) {
        let held = self.scheduler.held_blocks();
        self.pool.check(held.len()).unwrap();
        let free = |block: &u32| held.binary_search(block).is_err();
        assert!(
            !self.in_flight.iter().flat_map(|step| blocks_of(step, K::BLOCK_TOKENS)).any(|b| free(&b)),
            "a step in flight uses a free block"
        );
    }

    /// `ahead`: a step is in flight that was planned before these events were known.
    fn take(&mut self, events: EventBatch, ahead: bool) {
        for (id, event) in events {
            let entry = self.open.get_mut(&id).unwrap_or_else(|| panic!("{id:?} got {event:?} after its end"));
            let ended = matches!(event, TokenEvent::Finished { .. });
            let drafted = matches!(event, TokenEvent::Token(TokenOut { drafted: true, .. }));
            self.accepted_by_grammars += u64::from(drafted && entry.has_grammar);
            entry.take(id, event, ahead);
            if ended {
                let Open { prompt, got, cache_salt, .. } = self.open.remove(&id).unwrap();
                if self.media.is_some() && got.len() + prompt.len() < self.limits.max_model_len {
                    self.past.push(([&prompt[..], &got].concat(), cache_salt));
                    self.past.drain(..self.past.len().saturating_sub(6));
                }
                self.finished += 1;
            }
        }
    }
}

impl Open {
    fn take(&mut self, id: RequestId, event: TokenEvent, ahead: bool) {
        match event {
            TokenEvent::Admitted { cached_tokens } => {
                assert!(!std::mem::replace(&mut self.admitted, true), "admitted twice");
                assert!(cached_tokens < self.prompt_len);
            }
            TokenEvent::Prompt(logprobs) => {
                assert!(self.got.is_empty());
                let reported: Vec<u32> = logprobs.iter().map(|logprobs| logprobs.logprob as u32).collect();
                assert_eq!(Some(reported), self.prompt_logprobs.take(), "{id:?} has those of another prompt");
            }
            TokenEvent::Vector(vector) => {
                assert!(std::mem::take(&mut self.vector) && self.got.is_empty() && self.prompt_logprobs.is_none());
                assert_eq!(*vector, [self.prompt_len as f32], "{id:?} has that of another token");
            }
            TokenEvent::Token(TokenOut { id: token, .. }) => {
                assert!(self.admitted && self.prompt_logprobs.is_none() && !self.vector);
                self.got.push(token);
                assert_eq!(self.got, self.expected[..self.got.len()], "{id:?} got a wrong token");
            }
            TokenEvent::Finished { reason, usage } => {
                assert_eq!(self.got, self.expected, "{id:?} ended early");
                assert_eq!(usage.completion_tokens, self.got.len());
                assert_eq!(usage.prompt_tokens, self.prompt_len);
                let mut overshoot = 0;
                if let FinishReason::Stop(token) = reason {
                    assert_eq!(self.got.last(), Some(&token));
                    overshoot = usize::from(ahead);
                }
                assert!(self.drawn <= self.got.len() + overshoot, "{id:?} ran on after its end");
            }
            TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error } => panic!("{id:?} failed: {error}"),
        }
    }
}
