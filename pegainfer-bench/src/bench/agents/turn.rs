//! The figures of one turn: which tokens of its prompt were computed, and which of them again.

use super::script::Agent;
use crate::bench::chat::Reply;
use crate::bench::stats::Sample;
use serde::Serialize;

/// Figures of one turn.
#[derive(Debug, Clone, Serialize)]
pub struct Turn {
    /// Number of the session.
    pub session: usize,
    /// Number of the sub-agent in the session; null for the session itself.
    pub subagent: Option<usize>,
    /// Number of the turn, from 0 on.
    pub turn: usize,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Generated tokens.
    pub output_tokens: usize,
    /// Prompt tokens that an earlier turn had, in its prompt or its answer: all but the new ones.
    pub known_tokens: usize,
    /// Prompt tokens found in the prefix cache; null if the server does not report them.
    pub cached_tokens: Option<usize>,
    /// Time to first token in milliseconds.
    pub ttft_ms: f64,
    /// Time per output token after the first in milliseconds; null for a single token.
    pub tpot_ms: Option<f64>,
}

impl Turn {
    /// Figures of the turn with this reply. Earlier turns had `known` tokens.
    pub fn new(Agent { session, subagent }: Agent, turn: usize, known: usize, reply: Reply) -> Self {
        let Reply { completion, cached, .. } = reply;
        let sample = Sample::new(&completion);
        Self {
            session,
            subagent,
            turn,
            prompt_tokens: sample.prompt,
            output_tokens: sample.tokens,
            known_tokens: known.min(sample.prompt),
            cached_tokens: cached,
            ttft_ms: sample.ttft(),
            tpot_ms: sample.tpot(),
        }
    }

    /// Tokens that the next turn begins with.
    pub fn known_after(&self) -> usize {
        self.prompt_tokens + self.output_tokens
    }

    /// Prompt tokens that were computed.
    pub fn computed(&self) -> Option<usize> {
        Some(self.prompt_tokens.saturating_sub(self.cached_tokens?))
    }

    /// Prompt tokens that were computed although an earlier turn had them.
    pub fn recomputed(&self) -> Option<usize> {
        Some(self.known_tokens.saturating_sub(self.cached_tokens?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::chat::Text;
    use crate::bench::stats::Completion;
    use std::time::{Duration, Instant};

    fn turn(known: usize, prompt: usize, cached: Option<usize>) -> Turn {
        let stamps = [20, 50].map(Duration::from_millis).into();
        let completion = Completion { start: Instant::now(), stamps, prompt, asked: 4, tokens: 4, cached: 0 };
        let agent = Agent { session: 2, subagent: None };
        Turn::new(agent, 1, known, Reply { completion, cached, text: Text::default() })
    }

    #[test]
    fn computed_tokens_are_new_or_recomputed() {
        // 120 tokens in the earlier turn, of which the cache has 112, and 30 new ones.
        let partial = turn(120, 150, Some(112));
        assert_eq!((partial.computed(), partial.recomputed(), partial.known_after()), (Some(38), Some(8), 154));
        assert_eq!((partial.ttft_ms, partial.tpot_ms), (20.0, Some(10.0)));
        // Another agent's turn had the new tokens already.
        let shared = turn(0, 150, Some(144));
        assert_eq!((shared.computed(), shared.recomputed()), (Some(6), Some(0)));
        // The template left out a part of the earlier turn.
        let shorter = turn(160, 150, Some(100));
        assert_eq!((shorter.known_tokens, shorter.recomputed()), (150, Some(50)));
        let silent = turn(120, 150, None);
        assert_eq!((silent.computed(), silent.recomputed()), (None, None));
    }
}
