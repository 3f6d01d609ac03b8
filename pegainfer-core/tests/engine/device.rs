//! The simulated device.

use crate::drafts::Oracle;
use crate::kinds::{Kind, StepOf};
use crate::requests::{VOCAB, mix};
use pegainfer_core::adapter::AdapterId;
use pegainfer_core::engine::TokenLogprobs;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::logits_processors::{CountUpdate, CountedPenalties, LogitsUpdate, TokenCount, TokenMask};
use pegainfer_core::schedule::{NO_ADAPTER, Outcome, PLACEHOLDER, SampleRow, Step};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The hash that token `token` leaves in the KV cache after the prefix `before`.
pub fn kv_value(before: u64, token: u32) -> u64 {
    mix(before ^ (u64::from(token) + 1))
}

pub fn logit(prefix: u64, token: u32) -> f32 {
    (mix(prefix ^ u64::from(token)) >> 40) as f32 / (1 << 22) as f32 - 2.0
}

/// The token of the largest logit after `adjust`. About one token in 50 is end-of-text.
pub fn next_token(prefix: u64, adjust: impl Fn(u32, f32) -> f32) -> u32 {
    let logits = (0..VOCAB).map(|token| (adjust(token, logit(prefix, token)), token));
    logits.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
}

/// What an adapter changes in the hash that a token is drawn from.
pub fn adapted(prefix: u64, adapter: Option<AdapterId>) -> u64 {
    adapter.map_or(prefix, |id| prefix ^ mix(u64::from(id.0.get())))
}

/// The simulated device: contents of KV slots, other model state, and the tokens of the last step.
pub struct Device<K> {
    pub kv: Vec<u64>,
    /// The adapter that wrote each KV slot.
    pub kv_adapters: Vec<Option<AdapterId>>,
    pub states: K,
    pub sampled: Vec<u32>,
    /// The counts of tokens in each slot.
    pub counts: HashMap<u32, HashMap<u32, TokenCount>>,
    /// Source of drafts made by the model.
    pub oracle: Oracle,
}

impl<K: Kind> Device<K> {
    pub fn run(&mut self, step: &StepOf<K>) -> Outcome {
        let mut written = HashSet::new();
        let tokens: Vec<u32> = step.tokens.iter().map(|token| self.input(*token)).collect();
        // The hash of the prefix that ends with each token of the step.
        let mut prefixes = Vec::with_capacity(tokens.len());
        for (b, row) in step.rows.iter().enumerate() {
            let (from, to) = (step.qo_indptr[b] as usize, step.qo_indptr[b + 1] as usize);
            assert!(to > from, "an empty row");
            assert_eq!(row.computed + row.drafts, step.kv_lens[b] as usize);
            let (table, adapter) = (&step.block_tables[b], adapter_of(step, b));
            let slot = |p: usize| table.at(p / K::BLOCK_TOKENS) as usize * K::BLOCK_TOKENS + p % K::BLOCK_TOKENS;
            let before = row.computed + row.drafts - (to - from);
            let mut hash = if before == 0 { 0 } else { self.kv[slot(before - 1)] };
            if before > 0 {
                assert_eq!(self.kv_adapters[slot(before - 1)], adapter, "KV of another adapter, or of another load");
            }
            for (t, position) in (from..to).zip(before..) {
                assert_eq!(step.positions[t] as usize, position);
                hash = kv_value(hash, tokens[t]);
                prefixes.push(hash);
                if step.slots[t] == NO_SLOT {
                    assert_eq!(self.kv[slot(position)], hash, "a token that is not written has to be there");
                    assert_eq!(
                        self.kv_adapters[slot(position)],
                        adapter,
                        "a token that is not written has to be there"
                    );
                    continue;
                }
                assert_eq!(step.slots[t] as usize, slot(position));
                assert!(written.insert(step.slots[t]), "two tokens of a step share a slot");
                (self.kv[slot(position)], self.kv_adapters[slot(position)]) = (hash, adapter);
            }
        }
        self.states.run(step, &tokens, &prefixes);
        step.counts.iter().for_each(|update| self.count(update));
        let draw = |sample: &SampleRow| {
            let row = step.qo_indptr.partition_point(|first| *first <= sample.token) - 1;
            let prefix = adapted(prefixes[sample.token as usize], adapter_of(step, row));
            next_token(prefix, |token, logit| self.adjusted(sample.logits_update.as_ref(), token, logit))
        };
        self.sampled = step.samples.iter().map(draw).collect();
        // A report names its token.
        let report = |token: u32| TokenLogprobs { logprob: token as f32, rank: 1, top: vec![] };
        let rows = step.samples.iter().zip(&self.sampled);
        let logprobs = rows.map(|(sample, token)| sample.logprobs.map(|_| report(*token))).collect();
        // A vector holds the position after its prompt.
        let vector = |sample: &SampleRow| sample.vector.then(|| Box::from([sample.position as f32]));
        let vectors = step.samples.iter().map(vector).collect();
        let drafts = (0..step.rows.len()).map(|b| self.drafts(step, b, &tokens, &prefixes, &mut written)).collect();
        Outcome { tokens: self.sampled.clone(), logprobs, vectors, drafts, ..Outcome::default() }
    }

    /// Drafts that the model makes after row `b`. Writes KV after each draft but the last, in blocks that no other row
    /// writes.
    fn drafts(
        &self,
        step: &StepOf<K>,
        b: usize,
        tokens: &[u32],
        prefixes: &[u64],
        written: &mut HashSet<u32>,
    ) -> Vec<u32> {
        let (row, end) = (step.rows[b], step.qo_indptr[b + 1]);
        let newest = end - 1 - row.drafts as u32;
        let mut drawn = step.samples.iter().zip(&self.sampled).filter(|(s, _)| (newest..end).contains(&s.token));
        if let Some(next) = row.next {
            assert!(row.drafts == 0 && row.model_drafts == 0);
            assert!(drawn.all(|(_, token)| *token == next), "a sample within a prompt is forced");
            return Vec::new();
        }
        let (mut hash, mut place) = (0, newest as usize);
        for (sample, token) in drawn {
            hash = kv_value(prefixes[sample.token as usize], *token);
            place = sample.token as usize;
            if tokens.get(place + 1) != Some(token) || place + 1 >= end as usize {
                break;
            }
        }
        let table = &step.block_tables[b];
        let first = (row.computed + row.drafts).max(step.positions[place] as usize + 1);
        for position in first..(step.positions[place] as usize + row.model_drafts).max(first) {
            let block = table.at(position / K::BLOCK_TOKENS) as usize;
            let slot = block * K::BLOCK_TOKENS + position % K::BLOCK_TOKENS;
            assert!(written.insert(slot as u32), "the KV of drafts shares a slot");
        }
        self.oracle.tokens(hash, row.model_drafts)
    }

    fn input(&self, token: u32) -> u32 {
        if token & PLACEHOLDER == 0 { token } else { self.sampled[(token ^ PLACEHOLDER) as usize] }
    }

    fn count(&mut self, update: &CountUpdate) {
        let mut counts = self.counts.remove(&update.slot).unwrap_or_default();
        if update.starts {
            counts.clear();
        }
        for token in update.prompt.iter() {
            let count = counts.entry(*token).or_default();
            *count = count.with_prompt();
        }
        for token in &update.generated {
            let count = counts.entry(self.input(*token)).or_default();
            *count = count.plus(1);
        }
        self.counts.insert(update.slot, counts);
    }

    fn adjusted(&self, logits_update: Option<&LogitsUpdate>, token: u32, logit: f32) -> f32 {
        let Some(LogitsUpdate { penalties, edits, allowed }) = logits_update else { return logit };
        let penalized = penalties.as_ref().map(|CountedPenalties { penalties, slot, drafts }| {
            let count = self.counts[slot].get(&token).copied().unwrap_or_default();
            penalties.apply(count.plus(drafts.iter().filter(|draft| **draft == token).count()), logit)
        });
        let logit = penalized.unwrap_or(logit);
        let edit = edits.iter().find(|edit| edit.token == token);
        let logit = edit.map_or(logit, |edit| edit.apply(logit));
        let bit = |mask: &Arc<TokenMask>| mask.words()[token as usize / 32] >> (token % 32) & 1 == 1;
        if allowed.as_ref().is_none_or(bit) { logit } else { f32::NEG_INFINITY }
    }
}

/// The adapter that the step's slots hold for row `b`.
fn adapter_of<R>(step: &Step<R>, b: usize) -> Option<AdapterId> {
    let slot = step.adapters.rows.get(b).filter(|slot| **slot != NO_ADAPTER)?;
    let held = step.adapters.held.iter().find(|(held, _)| held == slot).expect("the slot of a row is held");
    Some(held.1.id())
}

/// The blocks that a step reads or writes.
pub fn blocks_of<R>(step: &Step<R>, block_tokens: usize) -> impl Iterator<Item = u32> {
    let tables = step.block_tables.iter().zip(&step.kv_lens);
    tables.flat_map(move |(table, tokens)| table.iter().take((*tokens as usize).div_ceil(block_tokens)))
}
