//! Upper bound of a response's size, from the request.

use super::delta::{Delta, PromptInfo};
use pegainfer_core::engine::{GenerateRequest, TokenLogprobs, TokenOut};

/// Bytes per generated token: its text and id.
const TOKEN_BYTES: u64 = 16;
/// Bytes of one (token, log-probability) pair of a response.
const LOGPROB_BYTES: u64 = 64;

/// Size of one choice of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseSize {
    /// Bytes of the prompt's fields.
    prompt: u64,
    /// Bytes per generated token.
    token: u64,
}

impl ResponseSize {
    /// The size for a prompt of `prompt` tokens. `logprobs` and `prompt_logprobs` are those of [`GenerateRequest`].
    pub fn new(prompt: usize, logprobs: Option<usize>, prompt_logprobs: Option<usize>) -> Self {
        let pairs = |top: Option<usize>| top.map_or(0, |top| (top as u64 + 1) * LOGPROB_BYTES);
        let prompt = prompt_logprobs.map_or(0, |_| prompt as u64 * (TOKEN_BYTES + pairs(prompt_logprobs)));
        Self { prompt, token: TOKEN_BYTES + pairs(logprobs) }
    }

    /// Bytes of a choice of `tokens` tokens.
    pub fn bytes(self, tokens: usize) -> u64 {
        self.prompt.saturating_add((tokens as u64).saturating_mul(self.token))
    }

    /// Maximum tokens per choice so that `n` choices together take at most `limit` bytes.
    pub fn max_tokens(self, n: usize, limit: u64) -> usize {
        let tokens = (limit / n.max(1) as u64).saturating_sub(self.prompt) / self.token;
        usize::try_from(tokens).unwrap_or(usize::MAX)
    }
}

/// Bytes of the response to these requests.
pub fn bytes(requests: &[GenerateRequest]) -> u64 {
    let choice = |request: &GenerateRequest| {
        ResponseSize::new(request.prompt.len(), request.logprobs, request.prompt_logprobs).bytes(request.max_tokens)
    };
    requests.iter().map(choice).fold(0, u64::saturating_add)
}

/// Bytes of one delta in a response.
pub fn delta_bytes(delta: &Delta) -> u64 {
    let pairs = |logprobs: &TokenLogprobs| (logprobs.top.len() as u64 + 1) * LOGPROB_BYTES;
    let token = |token: &TokenOut| TOKEN_BYTES + token.logprobs.as_deref().map_or(0, pairs);
    let prompt = |prompt: &PromptInfo| {
        let logprobs = prompt.logprobs.iter().flat_map(|logprobs| logprobs.iter());
        prompt.ids.len() as u64 * TOKEN_BYTES + logprobs.map(pairs).sum::<u64>()
    };
    delta.token.as_ref().map_or(0, token) + delta.prompt.as_ref().map_or(0, prompt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_that_fit_fill_the_limit() {
        for (prompt, logprobs, prompt_logprobs, n) in
            [(9, None, None, 1), (4000, Some(20), None, 128), (4000, Some(0), Some(20), 3)]
        {
            let size = ResponseSize::new(prompt, logprobs, prompt_logprobs);
            let tokens = size.max_tokens(n, 64 << 20);
            let bytes = n as u64 * size.bytes(tokens);
            assert!(bytes <= 64 << 20 && bytes > 63 << 20, "{size:?}: {tokens} tokens, {bytes} bytes");
        }
        assert_eq!(
            ResponseSize::new(100_000, None, Some(20)).max_tokens(128, 64 << 20),
            0,
            "the prompt alone is too much"
        );
    }
}
