//! Planning of a step: its token budget, its sequences, and preemptions.

use super::adapters::take_slot;
use super::chunk::Chunk;
use super::{Scheduler, SchedulerConfig};
use crate::engine::{EventBatch, RequestId, TokenEvent};
use crate::schedule::encoding::Encoding;
use crate::schedule::loading::Loading;
use crate::schedule::policy::{MIN_DELAYED_PROMPTS, PendingWork, token_budget};
use crate::schedule::sequence::Sequence;
use crate::schedule::speculation::Speculation;
use crate::schedule::state::SequenceState;
use crate::schedule::step::Step;
use crate::schedule::step_executor::STEPS_IN_FLIGHT;

/// A step during planning: chunks of its sequences, and remaining capacity.
struct StepPlan {
    /// Remaining tokens.
    tokens: usize,
    /// Remaining sample slots, for admitted sequences and for prompt logprobs. Each running sequence already has one.
    sample_slots: usize,
    /// The chunk of each running sequence, oldest first.
    chunks: Vec<Chunk>,
}

impl StepPlan {
    /// Next chunk of `seq`, which has `remaining` tokens to compute: number of tokens, and position of its end.
    fn chunk<S: SequenceState>(
        &self,
        (state, encoding): (&S, &mut Encoding),
        (seq, remaining): (&Sequence<S::Slot>, usize),
        sample_slots: usize,
    ) -> (usize, usize) {
        let wanted = seq.planned + remaining.min(self.tokens);
        let tokens = encoding.ready(&seq.request.images, seq.planned..wanted) - seq.planned;
        let tokens = seq.chunk(tokens, sample_slots);
        let end = if tokens == 0 { seq.planned } else { state.chunk_end(seq.planned, seq.planned + tokens) };
        (end - seq.planned, end)
    }

    /// Takes `tokens` tokens of `seq` and the sample slots that they need.
    fn take<L: Default>(&mut self, seq: &Sequence<L>, tokens: usize) {
        self.tokens -= tokens;
        self.sample_slots -= seq.sample_slots(tokens);
    }

    /// Gives back what `seq`, the running sequence at `place`, had.
    fn give_back<L: Default>(&mut self, place: usize, seq: &Sequence<L>) {
        let tokens = self.chunks.remove(place).tokens;
        self.tokens += tokens;
        self.sample_slots += 1 + seq.sample_slots(tokens);
    }
}

/// Result of reserving blocks and state slots for a sequence.
enum Reservation {
    /// Blocks and slots are reserved.
    Made,
    /// Only older sequences could release enough; the sequence waits for a later step.
    Wait,
    /// Younger sequences must release theirs, but a step in flight may use them, so it must end first.
    Drain,
}

impl<S: SequenceState> Scheduler<S> {
    /// Number of tokens of the waiting requests if a batching delay could help, that is, if several wait and the next
    /// step has capacity for more.
    pub fn delayable_tokens(&self) -> Option<usize> {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = self.config;
        let waiting = self.admissible().count();
        if waiting < MIN_DELAYED_PROMPTS || self.running.len() + waiting >= max_num_seqs {
            return None;
        }
        let tokens = self.admissible().map(|(_, seq)| seq.remaining()).sum();
        (tokens < max_num_batched_tokens).then_some(tokens)
    }

    /// Chooses the next step and returns the admissions; none with `delay_admission`. The step is empty if nothing can
    /// run before the step in flight is committed. An empty step is neither run nor committed.
    pub fn plan(&mut self, delay_admission: bool) -> (Step<S::Row>, EventBatch) {
        self.update_masks();
        self.plan_with_known_masks(delay_admission)
    }

    /// Reads which masks are ready, for the next plan.
    pub(in crate::schedule) fn update_masks(&mut self) {
        if !self.grammars {
            return;
        }
        let sequences = self.running.iter_mut().chain(&mut self.waiting);
        sequences.for_each(|seq| seq.grammar.update_mask());
    }

    /// Variant of [`plan`](Self::plan) that uses the mask states last read.
    pub(in crate::schedule) fn plan_with_known_masks(&mut self, delay_admission: bool) -> (Step<S::Row>, EventBatch) {
        assert!(self.in_flight < STEPS_IN_FLIGHT, "a placeholder stands for a token of the step before");
        if self.in_flight > 0 && Speculation::by_model(self.config.speculation.as_ref()) {
            return (Step::default(), EventBatch::new());
        }
        let suspect = self.next_suspect();
        if suspect.is_some() && self.in_flight > 0 {
            return (Step::default(), EventBatch::new());
        }
        if let Some(due) = self.due_yield().filter(|_| !delay_admission && suspect.is_none()) {
            if self.in_flight > 0 {
                return (Step::default(), EventBatch::new());
            }
            self.give_way(due);
        }
        self.yielding.blocked = false;
        self.note_missing_slots();
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.clear();
        chunks.extend(self.running.iter().map(Chunk::of));
        let tokens = token_budget(&self.config, self.pending_work(&chunks));
        let mut plan = StepPlan { tokens, sample_slots: self.config.max_num_seqs - self.running.len(), chunks };
        let preemptions = self.stats.preemptions;
        self.encoding.begin(false);
        for decoding in [true, false] {
            if !decoding {
                self.encoding.begin(plan.chunks.iter().any(|chunk| chunk.tokens > 0));
            }
            let mut i = 0;
            while i < self.running.len() && plan.tokens > 0 {
                let Chunk { remaining, decoding: decodes, tokens, .. } = plan.chunks[i];
                if remaining > 0 && decodes == decoding && tokens == 0 {
                    let (tokens, end) = {
                        let (seq, work) = (&self.running[i], (&self.state, &mut self.encoding));
                        plan.chunk(work, (seq, remaining), plan.sample_slots)
                    };
                    match self.reserve(i, end, &mut plan) {
                        Reservation::Made => {
                            plan.chunks[i].tokens = tokens;
                            plan.take(&self.running[i], tokens);
                        }
                        Reservation::Wait => {}
                        Reservation::Drain => return (Step::default(), EventBatch::new()),
                    }
                }
                i += 1;
            }
            if decoding {
                self.draft(&mut plan);
            }
        }
        let mut events = EventBatch::new();
        if self.stats.preemptions == preemptions && !delay_admission {
            self.admit(suspect, &mut plan, &mut events);
        }
        self.ask_for_drafts(&mut plan);
        let step = self.build_step(&plan.chunks);
        self.chunks = plan.chunks;
        (step, events)
    }

    /// Work for the next step: running sequences, whose `chunks` are given, and waiting requests for which a slot is
    /// free.
    fn pending_work(&self, chunks: &[Chunk]) -> PendingWork {
        let admissible = self.config.max_num_seqs.saturating_sub(self.running.len());
        let mut work = PendingWork { decoding: 0, prompts: 0, backlog: 0, shared: false };
        let mut first = None;
        let mut add = |tenant: u64, remaining: usize, decoding: bool| {
            if remaining == 0 {
                return;
            }
            work.shared |= *first.get_or_insert(tenant) != tenant;
            if decoding {
                work.decoding += 1;
            } else {
                work.prompts += 1;
                work.backlog += remaining;
            }
        };
        let running = self.running.iter().zip(chunks);
        running.for_each(|(seq, chunk)| add(seq.request.tenant, chunk.remaining, chunk.decoding));
        for (_, seq) in self.admissible().take(admissible) {
            let remaining = seq.remaining();
            add(seq.request.tenant, remaining, seq.is_decoding(remaining));
        }
        work
    }

    /// Adds drafts to the sequences of `plan`, all of which decode. Limits: drafts must be worth their cost, and the
    /// step must have capacity for their tokens and samples, the pool for their KV without the blocks that other
    /// sequences will grow into.
    fn draft(&mut self, plan: &mut StepPlan) {
        let Some(speculation) = &self.config.speculation else { return };
        let max_samples =
            Speculation::samples(Some(speculation), self.config.max_num_seqs, self.config.max_num_batched_tokens);
        let mut samples = max_samples - self.config.max_num_seqs;
        let mut tokens: usize = plan.chunks.iter().map(|chunk| chunk.tokens).sum();
        let decoding = plan.chunks.iter().filter(|chunk| chunk.tokens > 0).count();
        let sequences = self.running.len();
        for (seq, chunk) in self.running.iter_mut().zip(&mut plan.chunks) {
            if chunk.tokens == 0 || chunk.tokens < chunk.remaining {
                continue;
            }
            let most = speculation.num_tokens.min(self.state.max_drafts(seq.len()));
            let mut drafts = seq.propose(most.min(plan.tokens).min(samples));
            if drafts.is_empty() {
                continue;
            }
            if speculation.adaptive {
                drafts.truncate(seq.acceptance.depth(drafts.len(), tokens, decoding, self.token_cost));
            }
            let end = seq.len() + drafts.len();
            if drafts.is_empty() {
                seq.acceptance.skipped();
            } else if seq.table.missing(end) + sequences <= self.pool.available() && seq.table.grow(end).is_ok() {
                plan.tokens -= drafts.len();
                samples -= drafts.len();
                tokens += drafts.len();
                chunk.drafts = drafts;
            }
        }
    }

    /// Sets the number of drafts that the model makes after each sampled chunk of `plan`, if they are worth their cost
    /// and the pool has capacity for their KV. A draft costs its part of the draft pass and a token in the next step.
    fn ask_for_drafts(&mut self, plan: &mut StepPlan) {
        let Some(speculation) = self.config.speculation.as_ref().filter(|all| Speculation::by_model(Some(all))) else {
            return;
        };
        let samples =
            |seq: &Sequence<S::Slot>, chunk: &Chunk| chunk.tokens > 0 && seq.planned + chunk.tokens == seq.len();
        let sampling = self.running.iter().zip(&plan.chunks).filter(|(seq, chunk)| samples(seq, chunk)).count();
        let (sequences, mut tokens) = (self.running.len(), sampling);
        let cost = self.token_cost + self.draft_cost / sampling.max(1) as f64;
        for (seq, chunk) in self.running.iter_mut().zip(&mut plan.chunks) {
            if !samples(seq, chunk) {
                continue;
            }
            let most = seq.drafts_of_model(speculation.num_tokens, chunk.drafts.len());
            let drafts = match speculation.adaptive {
                true => seq.acceptance.depth(most, tokens, sampling, cost),
                false => most,
            };
            let end = seq.len() + chunk.drafts.len() + drafts;
            if drafts == 0 && most > 0 {
                seq.acceptance.skipped();
            } else if seq.table.missing(end) + sequences <= self.pool.available() && seq.table.grow(end).is_ok() {
                tokens += drafts;
                chunk.model_drafts = drafts;
            }
        }
    }

    /// Grows the table of running sequence `i` to `tokens` tokens, preempting younger ones if the pool is empty, and
    /// reserves the state slots of the new ones.
    fn reserve(&mut self, i: usize, tokens: usize, plan: &mut StepPlan) -> Reservation {
        while self.running[i].table.grow(tokens).is_err() {
            if self.release_loaded(None) {
                continue;
            }
            if self.running.len() - 1 == i {
                return Reservation::Wait;
            }
            if self.in_flight > 0 {
                return Reservation::Drain;
            }
            let place = self.growth_victim(i);
            let victim = self.preempt(place);
            plan.give_back(place, &victim);
            self.waiting.push_front(victim);
        }
        let seq = &mut self.running[i];
        match self.state.reserve(&mut seq.slot, seq.prompt_len, seq.planned..tokens) {
            Ok(()) => Reservation::Made,
            Err(_) => Reservation::Wait,
        }
    }

    /// Waiting requests that can be admitted, in order, with their queue positions: all except those whose prompt
    /// another request is about to compute, whose adapter has no slot, or whose blocks are being loaded.
    pub(super) fn admissible(&self) -> impl Iterator<Item = (usize, &Sequence<S::Slot>)> {
        // Choices of one prompt are neighbours, so caching the newest answer is enough.
        let mut newest: Option<(RequestId, bool)> = None;
        let mut slots = self.slot_queue();
        self.waiting.iter().map(Box::as_ref).enumerate().filter(move |(_, seq)| {
            if !slots.admits(seq) || seq.loading.transfer().is_some() {
                return false;
            }
            let shared = seq.prompt_len > self.pool.block_tokens() && !seq.admitted;
            let Some(first) = seq.request.same_prompt_as.filter(|_| shared) else { return true };
            if newest.is_none_or(|(id, _)| id != first) {
                newest = Some((first, self.is_computing_prompt(first)));
            }
            newest.is_some_and(|(_, computing)| !computing)
        })
    }

    /// True if this request will compute its prompt or a step in flight does.
    fn is_computing_prompt(&self, id: RequestId) -> bool {
        let found = self.running.iter().chain(self.waiting.iter().map(Box::as_ref)).find(|seq| seq.id == id);
        found.is_some_and(|seq| !seq.has_prompt() && !seq.is_finished())
    }

    /// Admits waiting requests in order until one does not fit; only the `suspect` if there is one.
    fn admit(&mut self, suspect: Option<RequestId>, plan: &mut StepPlan, events: &mut EventBatch) {
        while plan.tokens > 0 && plan.sample_slots > 0 {
            let Some(at) = self.next_admission(suspect) else { return };
            let Some(seq) = self.waiting.get_mut(at) else { return };
            seq.begin();
            // Cached tokens have no prompt logprobs.
            let cached = if seq.prompt_logprobs.is_some() { 0 } else { seq.match_prefix() };
            let cached = self.state.resume(&mut seq.slot, &mut seq.table, cached);
            // The state behind them may have left the device again.
            if seq.loaded.as_ref().is_some_and(|loaded| cached + 1 < loaded.blocks().len() * loaded.block_tokens()) {
                seq.loaded = None;
            }
            let fits = self.waiting.get(at).is_some_and(|seq| self.fits(seq));
            // What does not fit yet is not loaded yet: blocks for which there is no place would be computed.
            let waits = fits && suspect.is_none() && self.waits_for_load(at);
            let Some(seq) = self.waiting.get_mut(at) else { return };
            if waits {
                seq.release();
                continue;
            }
            if !fits {
                seq.release();
                if self.release_loaded(Some(at)) {
                    continue;
                }
                self.yielding.blocked = true;
                return;
            }
            seq.planned = cached;
            let (tokens, end) =
                plan.chunk((&self.state, &mut self.encoding), (seq, seq.remaining()), plan.sample_slots - 1);
            let reserved = self.state.reserve(&mut seq.slot, seq.prompt_len, cached..end);
            if reserved.is_err() || seq.table.grow(end).is_err() {
                seq.release();
                return;
            }
            let Some(slot) = take_slot(&mut self.adapters, &self.running, seq) else {
                seq.release();
                return;
            };
            let Some(mut seq) = self.waiting.remove(at) else { return };
            if let Some(tiers) = self.tiers.as_mut().filter(|_| cached > 0) {
                tiers.resumed(&seq.table, &seq.tokens[..seq.before_images()], cached);
            }
            (seq.adapter_slot, seq.no_slot_since, seq.loading) = (slot, None, Loading::Unknown);
            seq.loaded = None;
            self.turns.admitted(seq.request.priority, seq.turn);
            (seq.has_yielded, seq.resumed_at) = (false, seq.tokens.len());
            if !seq.admitted {
                seq.admitted = true;
                seq.cached_tokens = cached;
                self.stats.prefix_queries += seq.prompt_len as u64;
                self.stats.prefix_hits += cached as u64;
                self.stats.prompt_tokens += seq.prompt_len as u64;
                events.push((seq.id, TokenEvent::Admitted { cached_tokens: cached }));
            }
            plan.sample_slots -= 1;
            plan.take(&seq, tokens);
            plan.chunks.push(Chunk { tokens, ..Chunk::default() });
            self.running.push(seq);
        }
    }
}
