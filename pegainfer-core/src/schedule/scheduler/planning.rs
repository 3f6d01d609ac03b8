//! What a step has: how many tokens, of whom, and who has to make room.

use super::{Scheduler, SchedulerConfig};
use crate::engine::{EventBatch, TokenEvent};
use crate::schedule::policy::{Load, MIN_DELAYED_PROMPTS, token_budget};
use crate::schedule::sequence::Sequence;
use crate::schedule::state::SequenceState;
use crate::schedule::step::{SampleRow, Step, StepRow};

impl<S: SequenceState> Scheduler<S> {
    /// Tokens of the waiting requests, if a batching delay could gain something: several wait, and the next step has
    /// capacity for more of them.
    pub fn delayable_tokens(&self) -> Option<usize> {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = self.config;
        let waiting = self.waiting.len();
        if waiting < MIN_DELAYED_PROMPTS || self.running.len() + waiting >= max_num_seqs {
            return None;
        }
        let tokens = self.waiting.iter().map(Sequence::remaining).sum();
        (tokens < max_num_batched_tokens).then_some(tokens)
    }

    /// Chooses the next step and reports the requests it admits, of which there are none with `hold`. The
    /// step is empty when there is nothing to run before the step in flight is committed; an empty step is not run and not
    /// committed.
    pub fn plan(&mut self, hold: bool) -> (Step<S::Row>, EventBatch) {
        assert!(self.in_flight < 2, "an unknown token is one of the previous step");
        let mut budget = token_budget(&self.config, self.load());
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
        if self.stats.preemptions == preemptions && !hold {
            self.admit(&mut budget, &mut spare, &mut share, &mut events);
        }
        (self.build_step(&share), events)
    }

    /// What the next step can choose from. Requests for which there is no slot do not count: they cannot run yet.
    fn load(&self) -> Load {
        let admissible = self.config.max_num_seqs.saturating_sub(self.running.len());
        let mut load = Load { decoding: 0, prompts: 0, backlog: 0 };
        for tokens in self.running.iter().chain(self.waiting.iter().take(admissible)).map(Sequence::remaining) {
            match tokens {
                0 => {}
                1 => load.decoding += 1,
                _ => {
                    load.prompts += 1;
                    load.backlog += tokens;
                }
            }
        }
        load
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
        match self.state.reserve(&mut seq.slot, seq.prompt_len, seq.planned..tokens) {
            Ok(()) => Room::Made,
            Err(_) => Room::Wait,
        }
    }

    fn admit(&mut self, budget: &mut usize, spare: &mut usize, share: &mut Vec<usize>, events: &mut EventBatch) {
        while *budget > 0 && *spare > 0 {
            let Some(seq) = self.waiting.front_mut() else { return };
            // What is remembered gives no reports.
            let cached = if seq.reports.is_some() { 0 } else { seq.table.match_prefix(&seq.tokens) };
            let cached = self.state.resume(&mut seq.slot, &mut seq.table, cached);
            // All of the known tokens must fit, and one block of growth for each running sequence: admitting a
            // request only to preempt it in the next step would waste its prefill.
            if seq.table.missing(seq.tokens.len()) + self.running.len() > self.pool.available() {
                seq.release();
                return;
            }
            seq.planned = cached;
            let tokens = seq.share(*budget, *spare - 1);
            let reserved = self.state.reserve(&mut seq.slot, seq.prompt_len, cached..cached + tokens);
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

    fn build_step(&mut self, share: &[usize]) -> Step<S::Row> {
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
            self.state.plan(&mut seq.slot, range.clone(), step.tokens.len() as u32, &mut step.state);
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
}

/// What became of a sequence that wants blocks.
enum Room {
    /// It has them.
    Made,
    /// Only older sequences could give some: it waits for a later step.
    Wait,
    /// Younger ones have to give theirs, but a step in flight may use them.
    Preempt,
}
