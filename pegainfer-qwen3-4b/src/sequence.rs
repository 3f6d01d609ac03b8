//! One request inside the scheduler.

use pegainfer_core::engine::{FinishReason, GenerateRequest, RequestId, Usage};
use pegainfer_core::kv::{BlockPool, BlockTable};

/// A request's tokens, blocks and progress.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    pub request: GenerateRequest,
    /// Prompt, then what was generated.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens whose KV is in the cache; the rest are this sequence's input.
    pub computed: usize,
    pub table: BlockTable,
    /// It has run before, and its admission was reported.
    pub admitted: bool,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub cached_tokens: usize,
    /// Part of a step that was planned and not committed.
    pub in_flight: bool,
    /// The client is gone; dropped as soon as no step uses its blocks.
    pub cancelled: bool,
    /// Its last token is out.
    pub finished: bool,
}

impl Sequence {
    pub fn new(id: RequestId, mut request: GenerateRequest, pool: &BlockPool) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        let table = BlockTable::new(pool, request.cache_salt);
        Self {
            id,
            prompt_len: tokens.len(),
            tokens,
            request,
            computed: 0,
            table,
            admitted: false,
            cached_tokens: 0,
            in_flight: false,
            cancelled: false,
            finished: false,
        }
    }

    /// Tokens to compute before the next one can be sampled; 1 while decoding.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Gives the blocks back; everything is computed again after the next admission.
    pub fn release(&mut self) {
        assert!(!self.in_flight, "a step in flight writes to this sequence's blocks");
        self.table.clear();
        self.computed = 0;
    }

    /// Appends a sampled token; says whether it was the last one.
    pub fn push(&mut self, token: u32, eos: &[u32]) -> Option<FinishReason> {
        self.tokens.push(token);
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
