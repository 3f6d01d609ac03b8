//! Timings of one request: vLLM's names and three additional ones.

use crate::trace::Stages;
use schemars::JsonSchema;
use serde::Serialize;
use std::time::{Duration, Instant};

/// `metrics` of a response, in milliseconds, as the engine measured them. Stages that were not reached are null.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub struct Timings {
    /// From the arrival of the body to the queue: template, tokenization, grammar.
    tokenize_time_ms: Option<f64>,
    /// From the queue to the first step.
    queue_time_ms: Option<f64>,
    /// Prefill: from the first step to the first token.
    time_to_first_token_ms: Option<f64>,
    /// Decode: from the first to the last token.
    generation_time_ms: Option<f64>,
    /// Mean inter-token latency (ITL): `generation_time_ms` over one token less than generated.
    mean_itl_ms: Option<f64>,
    /// Generated tokens over the time of prefill and decode.
    tokens_per_second: Option<f64>,
    /// Detokenization of all tokens, most of which overlaps with the engine's decoding.
    detokenize_time_ms: Option<f64>,
    /// Tokens that came thanks to an accepted draft.
    accepted_draft_tokens: usize,
}

impl Timings {
    /// `received` is when the whole body had arrived; `tokens` is the number of generated tokens so far.
    pub fn new(stages: Stages, received: Instant, tokens: usize) -> Self {
        let until_last = |from: Option<Instant>| Some(stages.last_token - from?);
        let decode = until_last(stages.first_token);
        let steps = tokens.checked_sub(1).filter(|&n| n > 0);
        let inference = until_last(stages.first_token.and(stages.admitted)).filter(|time| !time.is_zero());
        Self {
            tokenize_time_ms: milliseconds(stages.submitted.checked_duration_since(received)),
            queue_time_ms: milliseconds(stages.admitted.map(|at| at - stages.submitted)),
            time_to_first_token_ms: milliseconds(stages.first_token.zip(stages.admitted).map(|(token, at)| token - at)),
            generation_time_ms: milliseconds(decode),
            mean_itl_ms: milliseconds(decode.zip(steps).map(|(time, n)| time.div_f64(n as f64))),
            tokens_per_second: inference.map(|time| rounded(tokens as f64 / time.as_secs_f64())),
            detokenize_time_ms: milliseconds(Some(stages.detokenizing)),
            accepted_draft_tokens: stages.accepted_draft_tokens,
        }
    }
}

fn milliseconds(time: Option<Duration>) -> Option<f64> {
    time.map(|time| rounded(time.as_secs_f64() * 1e3))
}

/// Rounded to a thousandth, because clocks are not more precise.
fn rounded(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stages_follow_each_other() {
        let received = Instant::now();
        let at = |ms: u64| received + Duration::from_millis(ms);
        let stages = Stages {
            submitted: at(2),
            admitted: Some(at(5)),
            first_token: Some(at(15)),
            last_token: at(35),
            engine: 0,
            cached_tokens: 0,
            accepted_draft_tokens: 3,
            detokenizing: Duration::from_micros(1500),
        };
        let json = |stages, tokens| serde_json::to_value(Timings::new(stages, received, tokens)).unwrap();
        assert_eq!(
            json(stages, 5),
            json!({"tokenize_time_ms": 2.0, "queue_time_ms": 3.0, "time_to_first_token_ms": 10.0,
                "generation_time_ms": 20.0, "mean_itl_ms": 5.0, "tokens_per_second": 166.667, "detokenize_time_ms": 1.5,
                "accepted_draft_tokens": 3})
        );
        let one = json(Stages { last_token: at(15), ..stages }, 1);
        assert_eq!((&one["generation_time_ms"], &one["mean_itl_ms"]), (&json!(0.0), &json!(null)));
        assert_eq!(one["tokens_per_second"], 100.0);
        let queued = json(Stages { admitted: None, first_token: None, last_token: at(2), ..stages }, 0);
        assert_eq!((&queued["queue_time_ms"], &queued["tokens_per_second"]), (&json!(null), &json!(null)));
    }
}
