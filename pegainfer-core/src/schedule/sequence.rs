//! One request inside the scheduler.
//!
//! While a step that samples for it is in flight, a sequence has a token whose id is not known yet. It counts like any
//! other token in what is planned; [`Sequence::write_inputs`] names it by where the device will find it.

use super::sequence_grammar::SequenceGrammar;
use super::speculation::depth::Acceptance;
use super::speculation::{DraftSource, DraftState, Drafter, Speculation};
use super::step::PLACEHOLDER;
use crate::engine::{EventBatch, FinishReason, GenerateRequest, RequestId, TokenEvent, TokenLogprobs, TokenOut, Usage};
use crate::grammar::MaskSignal;
use crate::kv::{BlockPool, BlockTable};
use crate::logits_processors::{CountUpdate, CountedPenalties, LogitsProcessors, LogitsUpdate};
use std::iter::once_with;
use std::ops::Range;
use std::sync::Arc;

/// Generated tokens for which a sequence has memory at its first admission; those of longer outputs take more when they come.
const MAX_RESERVED_TOKENS: usize = 1024;

/// Where the drafts of a sequence come from.
#[derive(Debug)]
enum Proposals {
    /// The engine does not draft, or forces the acceptance of drafts and the sequence has a grammar.
    None,
    /// From its text.
    Host(Box<dyn Drafter>),
    /// From the model: those that its last step made.
    Model(Vec<u32>),
}

/// A request's tokens, blocks and progress; `L` is its state slot.
#[derive(Debug)]
pub(super) struct Sequence<L> {
    pub id: RequestId,
    /// While it runs: its index among the running sequences.
    pub index: usize,
    pub request: GenerateRequest,
    /// Its turn among the waiting requests of its priority, see `Turns`.
    pub turn: u64,
    /// Its turn within its group.
    pub round: u64,
    /// While it waits: the step in which its tenant ran last, or counts as having run.
    pub served: u64,
    /// Prompt, then what was generated, as far as it is known. Empty until the first admission: a long queue must not take
    /// memory for a copy of each prompt.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens that follow `tokens` and are drawn by steps in flight.
    pub unknown: usize,
    /// Index among the samples of the newest step that draws one of them.
    pub sample: usize,
    /// Tokens whose KV is in the cache after every step in flight; the rest are this sequence's input.
    pub planned: usize,
    pub table: BlockTable,
    pub slot: L,
    /// `None` if the request has none.
    logits_processors: Option<Arc<LogitsProcessors>>,
    /// Tokens that the device has counted since the last admission, for penalties.
    counted: usize,
    /// Follows the tokens that are known, often a moment behind; usually there is no grammar.
    pub grammar: SequenceGrammar,
    /// Proposes tokens to verify.
    proposals: Proposals,
    /// Of the drafts so far.
    pub acceptance: Acceptance,
    /// Drafts in the newest step. Nothing follows it before it is committed: how many count is not known.
    pub drafts_in_flight: usize,
    /// Accepted drafts of the step before that have to be computed again, because the model's state behind them is lost.
    pub recomputed: usize,
    /// Log-probabilities of the prompt's tokens so far, while they are wanted and were not given out.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// It has run before, and its admission was reported.
    pub admitted: bool,
    /// It yielded to another tenant after its quantum, and waits for its turn like requests that never ran.
    pub has_yielded: bool,
    /// Tokens that it had when it was admitted last.
    pub resumed_at: usize,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub cached_tokens: usize,
    /// Steps that were planned with it and not committed.
    pub in_flight: usize,
    /// Steps with it that failed since it drew its last token.
    pub failures: u32,
    /// The client is gone; dropped as soon as no step uses its blocks.
    pub cancelled: bool,
    /// Its last token is out; dropped as soon as no step uses its blocks.
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
        let table = BlockTable::new(pool, request.cache_salt);
        let prompt_logprobs = request.prompt_logprobs.map(|_| Vec::new());
        let logits_processors = request.logits_processors.take();
        let grammar = SequenceGrammar::new(request.grammar.take(), masks);
        // A forced acceptance draws tokens that a grammar does not allow.
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
            request,
            unknown: 0,
            sample: 0,
            planned: 0,
            table,
            slot: L::default(),
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

    /// True when no step may be planned with it any more.
    #[inline]
    pub fn is_finished(&self) -> bool {
        self.cancelled || self.finished
    }

    /// True if it waits for its turn. Other sequences were preempted because memory was short; they go first, because
    /// they are older.
    pub fn waits_for_turn(&self) -> bool {
        !self.admitted || self.has_yielded
    }

    /// Tokens that it has generated since it was admitted last.
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
        }
    }

    /// Tokens so far, the unknown ones included.
    #[inline]
    pub fn len(&self) -> usize {
        self.tokens.len().max(self.prompt_len) + self.unknown
    }

    /// Whether the KV of the whole prompt is computed and known to be.
    pub fn has_prompt(&self) -> bool {
        self.tokens.len() > self.prompt_len
    }

    /// Tokens to compute before the next one can be sampled: 1 while decoding, and accepted drafts that are computed
    /// again. 0 when there is no next one, or none yet: drafts are in flight, drafts of the next step need the newest
    /// token or its mask, or the grammar is slow.
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

    /// True if the logits update of the next sample is unknown when its step is planned, because it depends on a token
    /// that a step in flight draws or on a mask that is being computed.
    #[inline]
    pub fn defers_update(&self) -> bool {
        let history = || self.logits_processors.as_ref().is_some_and(|processors| processors.need_history());
        self.grammar.waits_for_mask() || (self.unknown > 0 && (self.grammar.is_some() || history()))
    }

    /// Whether its next chunk, of `remaining` tokens, is the newest token, but for accepted drafts that are computed again.
    #[inline]
    pub fn is_decoding(&self, remaining: usize) -> bool {
        remaining == 1 + self.recomputed
    }

    /// At most `max_drafts` tokens that may follow, for the step that computes all that is known. Under a grammar they are some that
    /// [`follow_grammar`](Self::follow_grammar) had it try.
    pub fn propose(&mut self, max_drafts: usize) -> Vec<u32> {
        if self.grammar.is_some() { self.grammar.drafts(max_drafts) } else { self.likely_tokens(max_drafts) }
    }

    /// Gives the grammar the tokens of the last step, which are known now, and lets it try drafts for the next one: as many as would be
    /// worth it in a step like the last one, of so many tokens and rows.
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

    /// At most `max_drafts` tokens that its proposals say may follow, no more than the request can have before its last one.
    fn likely_tokens(&mut self, max_drafts: usize) -> Vec<u32> {
        let left = self.prompt_len + self.request.max_tokens - self.len();
        let (max_drafts, unknown) = (max_drafts.min(left.saturating_sub(1)), self.unknown);
        if max_drafts == 0 || self.prompt_logprobs.is_some() {
            return Vec::new();
        }
        match &mut self.proposals {
            Proposals::None => Vec::new(),
            // What steps in flight draw comes first.
            Proposals::Host(drafter) => {
                drafter.propose(&self.tokens, unknown + max_drafts).into_iter().skip(unknown).collect()
            }
            Proposals::Model(drafts) => {
                drafts.truncate(max_drafts);
                std::mem::take(drafts)
            }
        }
    }

    /// Of `max_drafts` drafts, how many the model can make for the step after the next one, which samples and verifies `drafts`
    /// drafts: their positions are those of tokens that the request can have.
    pub fn drafts_of_model(&self, max_drafts: usize, drafts: usize) -> usize {
        let left = self.prompt_len + self.request.max_tokens - self.len();
        let by_model = matches!(self.proposals, Proposals::Model(_));
        if by_model { max_drafts.min(left.saturating_sub(drafts + 2)) } else { 0 }
    }

    /// Takes what the model drafts behind the tokens that are known now.
    pub fn set_drafts_of_model(&mut self, tokens: Vec<u32>) {
        if let Proposals::Model(drafts) = &mut self.proposals {
            *drafts = tokens;
        }
    }

    /// How many of `tokens` tokens its next chunk may have: with prompt logprobs at most what `sample_slots` allow besides the
    /// sample slot that every running sequence has.
    #[inline]
    pub fn chunk(&self, tokens: usize, sample_slots: usize) -> usize {
        if self.prompt_logprobs.is_some() { tokens.min(1 + sample_slots) } else { tokens }
    }

    /// Sample slots that a chunk of `tokens` tokens takes besides the sequence's own: those of its prompt logprobs.
    #[inline]
    pub fn sample_slots(&self, tokens: usize) -> usize {
        if self.prompt_logprobs.is_some() { tokens.saturating_sub(1) } else { 0 }
    }

    /// Adds the ids of the tokens at `positions`, or where the next step's device finds them.
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

    /// The tokens that the device has to count before the next sample, which follows all tokens so far.
    pub fn count_update(&mut self) -> Option<CountUpdate> {
        let penalties = self.logits_processors.as_ref()?.penalties()?;
        let (slot, starts) = (self.index as u32, self.counted == 0);
        let prompt = if starts && penalties.repetition != 1.0 { self.request.prompt.clone() } else { Arc::default() };
        let mut generated = Vec::new();
        self.write_inputs(self.counted.max(self.prompt_len)..self.len(), &mut generated);
        self.counted = self.len();
        (starts || !generated.is_empty()).then_some(CountUpdate { slot, starts, prompt, generated })
    }

    /// The updates of the logits behind each of `drafts`, if they are accepted.
    pub fn draft_updates(&self, drafts: &[u32]) -> Vec<Option<LogitsUpdate>> {
        if !self.changes_logits() {
            return vec![None; drafts.len()];
        }
        let mut generated = self.tokens[self.prompt_len..].to_vec();
        let len = self.len() - self.prompt_len;
        let update = |(draft, behind): (&u32, usize)| {
            generated.push(*draft);
            let processed = self.processed(len + behind, &generated, &drafts[..behind]);
            self.with_mask_after(behind, processed)
        };
        drafts.iter().zip(1..).map(update).collect()
    }

    /// Whether logits processors or a grammar may change logits.
    #[inline]
    pub fn changes_logits(&self) -> bool {
        self.logits_processors.is_some() || self.grammar.is_some()
    }

    /// Logits update (logits processors and grammar) of the token at `position`, which is the first unknown one.
    pub fn logits_update(&self, position: usize) -> Option<LogitsUpdate> {
        let processed = self.processed(position - self.prompt_len, &self.tokens[self.prompt_len..], &[]);
        self.with_mask_after(0, processed)
    }

    /// The update by the logits processors of the token after `generated` ones, the last of which are `drafts`;
    /// `tokens`: those that are known.
    fn processed(&self, generated: usize, tokens: &[u32], drafts: &[u32]) -> Option<LogitsUpdate> {
        let processors = self.logits_processors.as_ref()?;
        let counted = |penalties| CountedPenalties { penalties, slot: self.index as u32, drafts: drafts.to_vec() };
        let (edits, allowed) = (processors.edits(generated, tokens), processors.allowed());
        let update = LogitsUpdate { penalties: processors.penalties().map(counted), edits, allowed };
        (update != LogitsUpdate::default()).then_some(update)
    }

    /// The update with the grammar's mask of the token behind this many drafts.
    fn with_mask_after(&self, drafts: usize, update: Option<LogitsUpdate>) -> Option<LogitsUpdate> {
        let Some(allowed) = self.grammar.mask_after(drafts) else { return update };
        Some(LogitsUpdate { allowed: Some(allowed), ..update.unwrap_or_default() })
    }

    /// Forgets the steps in flight, which will not be committed: what they draw stays unknown.
    pub fn forget_steps(&mut self) {
        (self.in_flight, self.unknown, self.drafts_in_flight) = (0, 0, 0);
    }

    /// Gives the blocks back; everything is computed again after the next admission.
    pub fn release(&mut self) {
        assert!(self.in_flight == 0, "a step in flight writes to this sequence's blocks");
        self.table.clear();
        self.slot = L::default();
        self.planned = 0;
        self.counted = 0;
        self.recomputed = 0;
        self.prompt_logprobs.iter_mut().for_each(Vec::clear);
    }

    /// Takes what became of the `drafts` of the newest step: `accepted` of them are part of the text.
    pub fn verified(&mut self, drafts: usize, accepted: usize, state: DraftState) {
        self.drafts_in_flight = 0;
        self.acceptance.verified(drafts, accepted);
        match state {
            DraftState::Kept => self.planned += accepted,
            DraftState::Recomputed => self.recomputed = accepted,
        }
    }

    /// Whether a sample for `position` counts that was drawn behind token `input`. It does not behind a refused draft.
    pub fn extends_text(&self, position: u64, input: u32) -> bool {
        let known = |position: usize| input & PLACEHOLDER != 0 || self.tokens.get(position) == Some(&input);
        position == self.tokens.len() as u64 && position.checked_sub(1).is_some_and(|last| known(last as usize))
    }

    /// Takes the token that a sample drew, and whether it is not the first one of its step, and reports it, the prompt's
    /// log-probabilities before the first one, and the end of the request.
    #[inline]
    pub fn accept(
        &mut self,
        (token, drafted): (u32, bool),
        logprobs: Option<Box<TokenLogprobs>>,
        eos: &[u32],
        events: &mut EventBatch,
    ) {
        if self.prompt_logprobs.is_some()
            && let Some(prompt) = self.prompt_logprobs.take()
        {
            events.push((self.id, TokenEvent::Prompt(prompt)));
        }
        let end = self.push(token, eos);
        let is_stop = matches!(end, Some(FinishReason::Stop(_)));
        let event = || (self.id, TokenEvent::Token(TokenOut { id: token, is_stop, drafted, logprobs }));
        // Made in place; `push` would make it on the stack and copy it.
        events.extend(once_with(event));
        if let Some(reason) = end {
            events.push((self.id, TokenEvent::Finished { reason, usage: self.usage() }));
            self.finished = true;
        }
    }

    /// Appends the oldest unknown token, now that it is known, or what is known thanks to an accepted draft; says whether it
    /// is the last one.
    #[inline]
    fn push(&mut self, token: u32, eos: &[u32]) -> Option<FinishReason> {
        self.unknown = self.unknown.saturating_sub(1);
        self.tokens.push(token);
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

    /// Appends a token that was drawn without a mask, because the grammar failed. The request is about to end, and
    /// nobody sees the token.
    pub fn push_unseen(&mut self, token: u32) {
        self.unknown = self.unknown.saturating_sub(1);
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
