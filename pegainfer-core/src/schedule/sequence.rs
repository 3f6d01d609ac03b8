//! One request inside the scheduler.
//!
//! While a step that samples for it is in flight, a sequence has a token whose id is not known. Plans count it like any
//! other token; [`Sequence::write_inputs`] writes a placeholder that the device resolves.

use super::loading::Loading;
use super::sequence_grammar::SequenceGrammar;
use super::speculation::depth::Acceptance;
use super::speculation::{DraftSource, DraftState, Drafter, Speculation};
use super::step::PLACEHOLDER;
use crate::adapter::AdapterId;
use crate::engine::{EventBatch, FinishReason, GenerateRequest, RequestId, TokenEvent, TokenLogprobs, TokenOut, Usage};
use crate::grammar::MaskSignal;
use crate::images;
use crate::kv::{BlockPool, BlockTable};
use crate::logits_processors::{CountUpdate, CountedPenalties, LogitsProcessors, LogitsUpdate};
use std::iter::once_with;
use std::ops::Range;
use std::sync::Arc;

/// Number of generated tokens for which memory is reserved at first admission; longer outputs reserve more as they
/// grow.
const MAX_RESERVED_TOKENS: usize = 1024;

/// Source of a sequence's drafts.
#[derive(Debug)]
enum Proposals {
    /// The engine does not draft, or it forces the acceptance of drafts and the sequence has a grammar.
    None,
    /// A drafter on the host that reads the text.
    Host(Box<dyn Drafter>),
    /// Drafts that the model made in the sequence's last step.
    Model(Vec<u32>),
}

/// A request's tokens, blocks and progress; `L` is its state slot.
#[derive(Debug)]
pub(super) struct Sequence<L> {
    pub id: RequestId,
    /// Index among the running sequences, while it runs.
    pub index: usize,
    pub request: GenerateRequest,
    /// Turn among the waiting requests of its priority; see `Turns`.
    pub turn: u64,
    /// Turn within its group.
    pub round: u64,
    /// While waiting: the step in which its tenant last ran, or counts as having run.
    pub served: u64,
    /// Prompt and known generated tokens. Empty until the first admission, so that a long queue holds no copies of
    /// prompts.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// If it has images, its tokens as the prefix index compares them; see [`images::keys`]. Shorter than the tokens,
    /// and never extended, if an image has no number.
    image_keys: Vec<u32>,
    /// Number of tokens after `tokens` that steps in flight will sample.
    pub unknown: usize,
    /// Index of its first sample in the newest step that samples for it.
    pub sample: usize,
    /// Tokens whose KV is in the cache after every step in flight; later tokens are input of the next steps.
    pub planned: usize,
    pub table: BlockTable,
    pub slot: L,
    /// Slot of its adapter while it runs, if it has one.
    pub adapter_slot: Option<u32>,
    /// Step since which it waits for a slot of its adapter.
    pub no_slot_since: Option<u64>,
    /// How far it is with blocks outside the device, while it waits.
    pub loading: Loading,
    /// While it waits: blocks of its prompt that were loaded, which this keeps on the device.
    pub loaded: Option<BlockTable>,
    /// Number of its blocks that were offered to be stored outside the device.
    pub offered: usize,
    /// Logits processors of the request, if any.
    logits_processors: Option<Arc<LogitsProcessors>>,
    /// Number of tokens that the device has counted since the last admission, for penalties.
    counted: usize,
    /// Grammar state; lags one step, because masks are computed on another thread.
    pub grammar: SequenceGrammar,
    /// Source of its drafts.
    proposals: Proposals,
    /// Acceptance rate of the drafts.
    pub acceptance: Acceptance,
    /// Number of drafts in the newest step. No step follows before it is committed, because the number of accepted
    /// drafts is unknown.
    pub drafts_in_flight: usize,
    /// Number of accepted drafts of the previous step to compute again, because the model's state after them is lost.
    pub recomputed: usize,
    /// Log-probabilities of the prompt's tokens so far, until they are reported, if requested.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// True if the sequence has run before and its admission was reported.
    pub admitted: bool,
    /// True if it yielded to another tenant after its quantum and waits for its turn like requests that never ran.
    pub has_yielded: bool,
    /// Number of tokens at its last admission.
    pub resumed_at: usize,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub cached_tokens: usize,
    /// Number of planned steps with it that are not committed.
    pub in_flight: usize,
    /// Number of failed steps with it since its last token.
    pub failures: u32,
    /// True if the client is gone; the sequence is dropped once no step uses its blocks.
    pub cancelled: bool,
    /// True if its last token is out; the sequence is dropped once no step uses its blocks.
    pub finished: bool,
}

impl<L: Default> Sequence<L> {
    pub fn new(
        id: RequestId,
        mut request: GenerateRequest,
        turn: u64,
        pool: &BlockPool,
        speculation: Option<&Speculation>,
        masks: &Arc<MaskSignal>,
    ) -> Self {
        let table = BlockTable::new(pool, request.prefix_root()).with_images(request.images.clone());
        let prompt_logprobs = request.prompt_logprobs.map(|_| Vec::new());
        let logits_processors = request.logits_processors.take();
        let grammar = SequenceGrammar::new(request.grammar.take(), masks);
        // A forced acceptance takes tokens that a grammar does not allow.
        let drafting = speculation.filter(|all| !grammar.is_some() || all.synthetic_acceptance_length.is_none());
        let proposals = match drafting.map(|speculation| &speculation.source) {
            None => Proposals::None,
            Some(DraftSource::Host(method)) => Proposals::Host(method.start()),
            Some(DraftSource::Model(_)) => Proposals::Model(Vec::new()),
        };
        Self {
            id,
            index: 0,
            turn,
            round: 0,
            served: 0,
            prompt_len: request.prompt.len(),
            tokens: Vec::new(),
            image_keys: Vec::new(),
            request,
            unknown: 0,
            sample: 0,
            planned: 0,
            table,
            slot: L::default(),
            adapter_slot: None,
            no_slot_since: None,
            loading: Loading::default(),
            loaded: None,
            offered: 0,
            logits_processors,
            counted: 0,
            grammar,
            proposals,
            acceptance: Acceptance::new(),
            drafts_in_flight: 0,
            recomputed: 0,
            prompt_logprobs,
            admitted: false,
            has_yielded: false,
            resumed_at: 0,
            cached_tokens: 0,
            in_flight: 0,
            failures: 0,
            cancelled: false,
            finished: false,
        }
    }

    /// True if no further step may be planned with it.
    #[inline]
    pub fn is_finished(&self) -> bool {
        self.cancelled || self.finished
    }

    /// Its adapter.
    pub fn adapter(&self) -> Option<AdapterId> {
        self.request.adapter.as_ref().map(|adapter| adapter.id())
    }

    /// True if it waits for its turn. Other waiting sequences were preempted for lack of memory and go first, because
    /// they are older.
    pub fn waits_for_turn(&self) -> bool {
        !self.admitted || self.has_yielded
    }

    /// Number of tokens generated since its last admission.
    pub fn run_length(&self) -> usize {
        self.tokens.len().saturating_sub(self.resumed_at)
    }

    /// Copies the prompt before the first admission.
    pub fn begin(&mut self) {
        if self.tokens.is_empty() {
            let len = self.prompt_len + self.request.max_tokens.min(MAX_RESERVED_TOKENS);
            self.tokens.reserve_exact(len);
            self.table.reserve(len);
            self.tokens.extend_from_slice(&self.request.prompt);
            let pool = self.table.pool();
            if !self.request.images.is_empty() {
                let keys = images::keys(&self.request.images, &self.request.prompt, |hash| pool.number_image(hash));
                self.image_keys = keys;
            }
        }
    }

    /// Adds the full blocks of the first `known` tokens to the prefix index.
    #[inline]
    pub fn register(&mut self, known: usize) {
        let keys = if self.request.images.is_empty() { &self.tokens } else { &self.image_keys };
        self.table.register(&keys[..known.min(keys.len())]);
    }

    /// Fills the empty table with the longest cached prefix; see [`BlockTable::match_prefix`].
    pub fn match_prefix(&mut self) -> usize {
        let keys = if self.request.images.is_empty() { &self.tokens } else { &self.image_keys };
        self.table.match_prefix(keys)
    }

    /// Number of known tokens before its first image. Blocks outside the device are found by these alone, because their
    /// tokens are compared, and numbers of images mean nothing to other processes.
    pub fn before_images(&self) -> usize {
        self.request.images.first().map_or(self.tokens.len(), |span| span.start)
    }

    /// Number of tokens so far, including unknown ones.
    #[inline]
    pub fn len(&self) -> usize {
        self.tokens.len().max(self.prompt_len) + self.unknown
    }

    /// True if the KV of the whole prompt is computed and committed.
    pub fn has_prompt(&self) -> bool {
        self.tokens.len() > self.prompt_len
    }

    /// Number of tokens to compute before the next one can be sampled: 1 while decoding, plus accepted drafts that are
    /// computed again. 0 if there is no next token, or not yet: drafts are in flight, drafts of the next step need the
    /// newest token or its mask, or the grammar is slow.
    #[inline]
    pub fn remaining(&self) -> usize {
        let all_drawn = self.len() - self.prompt_len == self.request.max_tokens;
        let waits = || match self.proposals {
            Proposals::None => self.grammar.is_waited_for(self.unknown > 0),
            Proposals::Host(_) | Proposals::Model(_) => self.defers_update(),
        };
        if all_drawn || self.drafts_in_flight > 0 || self.is_finished() || waits() {
            0
        } else {
            self.len() - self.planned
        }
    }

    /// True if the logits update of the next sample is unknown at planning time, because it depends on a token of a
    /// step in flight or on a mask that is being computed.
    #[inline]
    pub fn defers_update(&self) -> bool {
        let history = || self.logits_processors.as_ref().is_some_and(|processors| processors.need_history());
        self.grammar.waits_for_mask() || (self.unknown > 0 && (self.grammar.is_some() || history()))
    }

    /// True if the next chunk, of `remaining` tokens, is the newest token and accepted drafts that are computed again.
    #[inline]
    pub fn is_decoding(&self, remaining: usize) -> bool {
        remaining == 1 + self.recomputed
    }

    /// Up to `max_drafts` draft tokens for a step that computes all known tokens. Under a grammar, only drafts that
    /// [`follow_grammar`](Self::follow_grammar) tried.
    pub fn propose(&mut self, max_drafts: usize) -> Vec<u32> {
        if self.grammar.is_some() { self.grammar.drafts(max_drafts) } else { self.likely_tokens(max_drafts) }
    }

    /// Passes the tokens of the last step to the grammar, which also tries drafts for the next step: as many as would
    /// be worth their cost in a step of `tokens` tokens and `rows` rows, like the last one.
    pub fn follow_grammar(
        &mut self,
        speculation: Option<&Speculation>,
        (tokens, rows): (usize, usize),
        token_cost: f64,
    ) {
        let max_drafts = speculation.map_or(0, |all| all.num_tokens);
        let depth = match speculation.is_some_and(|all| all.adaptive) {
            true => self.acceptance.depth(max_drafts, tokens, rows, token_cost),
            false => max_drafts,
        };
        if depth < max_drafts.min(1) {
            self.acceptance.skipped();
        }
        let drafts = self.likely_tokens(depth);
        self.grammar.advance(drafts);
    }

    /// Up to `max_drafts` drafts from its proposals, and no more than the request can generate before its last token.
    fn likely_tokens(&mut self, max_drafts: usize) -> Vec<u32> {
        let left = self.prompt_len + self.request.max_tokens - self.len();
        let (max_drafts, unknown) = (max_drafts.min(left.saturating_sub(1)), self.unknown);
        if max_drafts == 0 || self.prompt_logprobs.is_some() {
            return Vec::new();
        }
        match &mut self.proposals {
            Proposals::None => Vec::new(),
            // Skips the tokens that steps in flight will generate.
            Proposals::Host(drafter) => {
                drafter.propose(&self.tokens, unknown + max_drafts).into_iter().skip(unknown).collect()
            }
            Proposals::Model(drafts) => {
                drafts.truncate(max_drafts);
                std::mem::take(drafts)
            }
        }
    }

    /// Number of drafts, up to `max_drafts`, that the model can make for the step after the next one, which samples and
    /// verifies `drafts` drafts. Their positions must be within the request's length.
    pub fn drafts_of_model(&self, max_drafts: usize, drafts: usize) -> usize {
        let left = self.prompt_len + self.request.max_tokens - self.len();
        let by_model = matches!(self.proposals, Proposals::Model(_));
        if by_model { max_drafts.min(left.saturating_sub(drafts + 2)) } else { 0 }
    }

    /// Stores the model's drafts after the tokens known now.
    pub fn set_drafts_of_model(&mut self, tokens: Vec<u32>) {
        if let Proposals::Model(drafts) = &mut self.proposals {
            *drafts = tokens;
        }
    }

    /// Number of tokens, up to `tokens`, in its next chunk. With prompt logprobs, limited by `sample_slots`, which
    /// excludes the slot of every running sequence.
    #[inline]
    pub fn chunk(&self, tokens: usize, sample_slots: usize) -> usize {
        if self.prompt_logprobs.is_some() { tokens.min(1 + sample_slots) } else { tokens }
    }

    /// Number of sample slots that the prompt logprobs of a chunk of `tokens` tokens take, in addition to the
    /// sequence's own.
    #[inline]
    pub fn sample_slots(&self, tokens: usize) -> usize {
        if self.prompt_logprobs.is_some() { tokens.saturating_sub(1) } else { 0 }
    }

    /// Appends the ids of the tokens at `positions`, or placeholders for unknown ones.
    #[inline]
    pub fn write_inputs(&self, positions: Range<usize>, inputs: &mut Vec<u32>) {
        if positions.len() == 1 {
            return inputs
                .push(self.tokens.get(positions.start).map_or(PLACEHOLDER | self.sample as u32, |token| *token));
        }
        let known = positions.end.min(self.tokens.len());
        if positions.start < known {
            inputs.extend_from_slice(&self.tokens[positions.start..known]);
        }
        for _ in known.max(positions.start)..positions.end {
            inputs.push(PLACEHOLDER | self.sample as u32);
        }
    }

    /// Tokens to add to the device's token counts before the next sample.
    pub fn count_update(&mut self) -> Option<CountUpdate> {
        let penalties = self.logits_processors.as_ref()?.penalties()?;
        let (slot, starts) = (self.index as u32, self.counted == 0);
        let prompt = if starts && penalties.repetition != 1.0 { self.request.prompt.clone() } else { Arc::default() };
        let mut generated = Vec::new();
        self.write_inputs(self.counted.max(self.prompt_len)..self.len(), &mut generated);
        self.counted = self.len();
        (starts || !generated.is_empty()).then_some(CountUpdate { slot, starts, prompt, generated })
    }

    /// Logits updates after each of `drafts`, for the case that it is accepted.
    pub fn draft_updates(&self, drafts: &[u32]) -> Vec<Option<LogitsUpdate>> {
        if !self.changes_logits() {
            return vec![None; drafts.len()];
        }
        let mut generated = self.tokens[self.prompt_len..].to_vec();
        let len = self.len() - self.prompt_len;
        let update = |(draft, accepted): (&u32, usize)| {
            generated.push(*draft);
            let processed = self.processed(len + accepted, &generated, &drafts[..accepted]);
            self.with_mask_after(accepted, processed)
        };
        drafts.iter().zip(1..).map(update).collect()
    }

    /// True if logits processors or a grammar may change logits.
    #[inline]
    pub fn changes_logits(&self) -> bool {
        self.logits_processors.is_some() || self.grammar.is_some()
    }

    /// Logits update (processors and grammar) of the token at `position`, the first unknown one.
    pub fn logits_update(&self, position: usize) -> Option<LogitsUpdate> {
        let processed = self.processed(position - self.prompt_len, &self.tokens[self.prompt_len..], &[]);
        self.with_mask_after(0, processed)
    }

    /// Update by the logits processors for the token after `generated` tokens, the last of which are `drafts`.
    /// `tokens`: the known tokens.
    fn processed(&self, generated: usize, tokens: &[u32], drafts: &[u32]) -> Option<LogitsUpdate> {
        let processors = self.logits_processors.as_ref()?;
        let counted = |penalties| CountedPenalties { penalties, slot: self.index as u32, drafts: drafts.to_vec() };
        let (edits, allowed) = (processors.edits(generated, tokens), processors.allowed());
        let update = LogitsUpdate { penalties: processors.penalties().map(counted), edits, allowed };
        (update != LogitsUpdate::default()).then_some(update)
    }

    /// Adds the grammar's mask of the token after `drafts` drafts to `update`.
    fn with_mask_after(&self, drafts: usize, update: Option<LogitsUpdate>) -> Option<LogitsUpdate> {
        let Some(allowed) = self.grammar.mask_after(drafts) else { return update };
        Some(LogitsUpdate { allowed: Some(allowed), ..update.unwrap_or_default() })
    }

    /// Drops the steps in flight, which will not be committed; their tokens stay unknown.
    pub fn forget_steps(&mut self) {
        (self.in_flight, self.unknown, self.drafts_in_flight) = (0, 0, 0);
    }

    /// Gives the blocks back; everything is computed again after the next admission.
    pub fn release(&mut self) {
        assert!(self.in_flight == 0, "a step in flight writes to this sequence's blocks");
        self.table.clear();
        self.offered = 0;
        self.slot = L::default();
        self.planned = 0;
        self.counted = 0;
        self.recomputed = 0;
        self.prompt_logprobs.iter_mut().for_each(Vec::clear);
    }

    /// Commits the `drafts` of the newest step: the first `accepted` are part of the text.
    pub fn verified(&mut self, drafts: usize, accepted: usize, state: DraftState) {
        self.drafts_in_flight = 0;
        self.acceptance.verified(drafts, accepted);
        match state {
            DraftState::Kept => self.planned += accepted,
            DraftState::Recomputed => self.recomputed = accepted,
        }
    }

    /// True if the sample for `position` extends the accepted text, that is, if `input` is the text's last token or a
    /// placeholder. False after a refused draft.
    pub fn extends_text(&self, position: u64, input: u32) -> bool {
        let known = |position: usize| input & PLACEHOLDER != 0 || self.tokens.get(position) == Some(&input);
        position == self.tokens.len() as u64 && position.checked_sub(1).is_some_and(|last| known(last as usize))
    }

    /// Accepts a sampled token and reports it, with the prompt's log-probabilities and vector before the first token and
    /// the end of the request after the last. `drafted`: not the first token of its step.
    #[inline]
    pub fn accept(
        &mut self,
        (token, drafted): (u32, bool),
        (logprobs, vector): (Option<Box<TokenLogprobs>>, Option<Box<[f32]>>),
        eos: &[u32],
        events: &mut EventBatch,
    ) {
        if self.prompt_logprobs.is_some()
            && let Some(prompt) = self.prompt_logprobs.take()
        {
            events.push((self.id, TokenEvent::Prompt(prompt)));
        }
        if let Some(vector) = vector {
            events.push((self.id, TokenEvent::Vector(vector)));
        }
        let end = self.push(token, eos);
        let is_stop = matches!(end, Some(FinishReason::Stop(_)));
        let event = || (self.id, TokenEvent::Token(TokenOut { id: token, is_stop, drafted, logprobs }));
        // Built in place; `push` would build it on the stack and copy it.
        events.extend(once_with(event));
        if let Some(reason) = end {
            events.push((self.id, TokenEvent::Finished { reason, usage: self.usage() }));
            self.finished = true;
        }
    }

    /// Appends the oldest unknown token, or a token after an accepted draft; returns the finish reason if it is the
    /// last.
    #[inline]
    fn push(&mut self, token: u32, eos: &[u32]) -> Option<FinishReason> {
        self.unknown = self.unknown.saturating_sub(1);
        self.push_known(token);
        let is_eos = !self.request.ignore_eos && eos.contains(&token);
        if is_eos || self.request.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop(token));
        }
        if self.tokens.len() - self.prompt_len == self.request.max_tokens {
            return Some(FinishReason::Length);
        }
        self.grammar.push(token);
        None
    }

    /// Appends a token that was sampled without a mask because the grammar failed. The request is about to end, and no
    /// client sees the token.
    pub fn push_unseen(&mut self, token: u32) {
        self.unknown = self.unknown.saturating_sub(1);
        self.push_known(token);
    }

    fn push_known(&mut self, token: u32) {
        if !self.request.images.is_empty() && self.image_keys.len() == self.tokens.len() {
            self.image_keys.push(token);
        }
        self.tokens.push(token);
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_len,
            completion_tokens: self.tokens.len() - self.prompt_len,
            cached_tokens: self.cached_tokens,
        }
    }
}
