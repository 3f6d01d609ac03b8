//! Figures of the answers for `/stats`.

use serde::Deserialize;
use std::time::Duration;

/// Tokens of a request, from the API.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Usage {
    /// Tokens of the prompt.
    pub(super) prompt_tokens: usize,
    /// Generated tokens, reasoning included.
    pub(super) completion_tokens: usize,
}

/// Tokens and times of one answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct AnswerStats {
    pub(super) usage: Usage,
    /// Time from the request to the first text.
    pub(super) first: Duration,
    /// Time from the request to the end.
    pub(super) total: Duration,
}

impl AnswerStats {
    /// Generated tokens per second after the first text; `None` for a single token.
    fn rate(&self) -> Option<f64> {
        let seconds = self.total.saturating_sub(self.first).as_secs_f64();
        let tokens = self.usage.completion_tokens.checked_sub(1)?;
        (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
    }
}

/// Sums over all answers, and the last one. Stopped answers are not counted, because their tokens are not known.
#[derive(Debug, Default)]
pub(super) struct Stats {
    answers: usize,
    tokens: usize,
    last: Option<AnswerStats>,
}

impl Stats {
    pub(super) fn add(&mut self, answer: AnswerStats) {
        self.answers += 1;
        self.tokens += answer.usage.completion_tokens;
        self.last = Some(answer);
    }

    /// The lines of `/stats`; `used` tokens of a context of `context` are the conversation's.
    pub(super) fn text(&self, used: usize, context: usize) -> String {
        let mut lines = Vec::new();
        if let Some(last) = &self.last {
            let Usage { prompt_tokens, completion_tokens } = last.usage;
            let rate = last.rate().map_or_else(String::new, |rate| format!(", {rate:.1} tokens a second"));
            let first = last.first.as_secs_f64();
            lines.push(format!(
                "last answer: {completion_tokens} tokens{rate}; prompt of {prompt_tokens} tokens, first token after {first:.2} s"
            ));
        }
        let percent = 100.0 * used as f64 / context.max(1) as f64;
        lines.push(format!("all answers: {}, with {} tokens", self.answers, self.tokens));
        lines.push(format!("context: {used} of {context} tokens used ({percent:.0} %)"));
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(completion_tokens: usize, first: u64, total: u64) -> AnswerStats {
        let usage = Usage { prompt_tokens: 30, completion_tokens };
        AnswerStats { usage, first: Duration::from_millis(first), total: Duration::from_millis(total) }
    }

    #[test]
    fn rates_are_those_after_the_first_token() {
        let mut stats = Stats::default();
        assert_eq!(stats.text(0, 100), "all answers: 0, with 0 tokens\ncontext: 0 of 100 tokens used (0 %)");
        stats.add(answer(1, 10, 10));
        assert!(stats.text(0, 100).starts_with("last answer: 1 tokens; prompt of 30 tokens"));
        stats.add(answer(41, 500, 2500));
        let text = stats.text(50, 200);
        let last = "last answer: 41 tokens, 20.0 tokens a second; prompt of 30 tokens, first token after 0.50 s\n";
        assert_eq!(text, format!("{last}all answers: 2, with 42 tokens\ncontext: 50 of 200 tokens used (25 %)"));
    }
}
