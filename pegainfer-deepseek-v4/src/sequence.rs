//! One request inside the scheduler.

use crate::plan::PAGE_TOKENS;
use pegainfer_core::engine::{FinishReason, GenerateRequest, RequestId, Usage};
use pegainfer_core::kv::BlockRef;
use pegainfer_core::rules::{Adjustment, RuleTracker};

/// A request's tokens, memory and progress.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    pub request: GenerateRequest,
    /// Prompt, then what was generated.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens that were computed; the rest are this sequence's input.
    pub computed: usize,
    /// Pages of compressed entries, in token order.
    pub pages: Vec<BlockRef>,
    /// Where its newest tokens are, while it runs.
    pub slot: Option<u32>,
    /// Usually there are no rules.
    rules: Option<RuleTracker>,
    /// It has run before, and its admission was reported.
    pub admitted: bool,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub cached_tokens: usize,
}

impl Sequence {
    pub fn new(id: RequestId, mut request: GenerateRequest) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        let rules = request.rules.take().map(|rules| RuleTracker::new(rules, &tokens));
        Self {
            id,
            prompt_len: tokens.len(),
            tokens,
            request,
            computed: 0,
            pages: Vec::new(),
            slot: None,
            rules,
            admitted: false,
            cached_tokens: 0,
        }
    }

    /// Tokens to compute before the next one can be sampled: 1 while decoding.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens of its next chunk, at most `budget`. A chunk ends at a multiple of 128 tokens rather than after it: only
    /// there the state can be kept for other requests.
    pub fn chunk(&self, budget: usize) -> usize {
        let end = self.computed + self.remaining().min(budget);
        let boundary = end / PAGE_TOKENS * PAGE_TOKENS;
        if boundary > self.computed { boundary - self.computed } else { end - self.computed }
    }

    /// Pages missing for `tokens` tokens.
    pub fn missing(&self, tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len())
    }

    /// What the rules do to the logits of the token after all so far.
    pub fn adjustment(&self) -> Option<Adjustment> {
        let generated = self.tokens.len() - self.prompt_len;
        self.rules.as_ref()?.adjustment(generated, &self.tokens[self.prompt_len..])
    }

    /// Gives its pages back; everything is computed again after the next admission. Returns its slot.
    pub fn release(&mut self) -> Option<u32> {
        self.pages.clear();
        self.computed = 0;
        self.slot.take()
    }

    /// Appends a sampled token; says whether it is the last one.
    pub fn push(&mut self, token: u32, eos: &[u32]) -> Option<FinishReason> {
        self.tokens.push(token);
        if let Some(rules) = &mut self.rules {
            rules.push(token);
        }
        let is_eos = !self.request.ignore_eos && eos.contains(&token);
        if is_eos || self.request.stop_token_ids.contains(&token) {
            Some(FinishReason::Stop(token))
        } else if self.tokens.len() - self.prompt_len == self.request.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_len,
            completion_tokens: self.tokens.len() - self.prompt_len,
            cached_tokens: self.cached_tokens,
        }
    }
}
