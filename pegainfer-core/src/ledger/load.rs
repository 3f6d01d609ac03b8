//! The work of a step, and its measured time.

use crate::schedule::Step;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The numbers that determine the time of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct StepLoad {
    /// Sequences that add one token.
    #[serde(default)]
    pub decode_rows: usize,
    /// Total KV tokens that they attend to.
    #[serde(default)]
    pub decode_kv: usize,
    /// Sequences that add more than one token: chunks of prompts.
    #[serde(default)]
    pub prefill_rows: usize,
    /// Tokens of these chunks.
    #[serde(default)]
    pub prefill_tokens: usize,
    /// Pairs of query and key of causal attention in these chunks.
    #[serde(default)]
    pub pairs: u64,
}

/// Kinds of steps, each with its own law.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// Each sequence adds one token.
    Decode,
    /// Each sequence adds more.
    Prefill,
    /// Both.
    Mixed,
}

impl StepKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Decode, Self::Prefill, Self::Mixed];

    /// Name in files and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
        }
    }
}

impl StepLoad {
    /// The load of a step.
    pub fn of<R>(step: &Step<R>) -> Self {
        let lengths = step.qo_indptr.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        Self::of_rows(lengths.zip(step.kv_lens.iter().map(|len| *len as usize)))
    }

    /// The load of rows, each with the tokens that it adds and its context, these included.
    pub fn of_rows(rows: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut load = Self::default();
        for (tokens, context) in rows {
            if tokens == 1 {
                load.decode_rows += 1;
                load.decode_kv += context;
            } else {
                load.prefill_rows += 1;
                load.prefill_tokens += tokens;
                // The last token attends to the whole context, the one before to one token less.
                load.pairs += (tokens * context - tokens * (tokens - 1) / 2) as u64;
            }
        }
        load
    }

    /// Tokens of the step.
    pub fn tokens(&self) -> usize {
        self.decode_rows + self.prefill_tokens
    }

    /// Kind of the step.
    pub fn kind(&self) -> StepKind {
        match (self.decode_rows, self.prefill_rows) {
            (_, 0) => StepKind::Decode,
            (0, _) => StepKind::Prefill,
            _ => StepKind::Mixed,
        }
    }
}

/// Short name of the step, such as `decode: 8 x 1023 tokens of context` with the mean context.
impl fmt::Display for StepLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { decode_rows, decode_kv, prefill_tokens, .. } = *self;
        let name = match (decode_rows, prefill_tokens) {
            (rows, 0) => format!("decode: {rows} x {} tokens of context", decode_kv / rows.max(1)),
            (0, tokens) => format!("prefill: {tokens} tokens"),
            (rows, tokens) => format!("mixed: {rows} decode, {tokens} tokens of a prompt"),
        };
        f.pad(&name)
    }
}

/// A measured step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    /// Load of the step.
    #[serde(flatten)]
    pub load: StepLoad,
    /// Median time in microseconds.
    pub us: f64,
    /// Interquartile range relative to the median.
    pub spread: f64,
    /// Number of runs.
    pub runs: usize,
}

/// A step that has run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// Number of the step, from 0.
    pub number: u64,
    /// Time of its end, relative to the start of the engine.
    pub end: Duration,
    /// Load of the step.
    pub load: StepLoad,
    /// Measured time.
    pub took: Duration,
    /// Predicted microseconds; `None` without a ledger or outside its range.
    pub predicted_us: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_those_of_the_steps() {
        let decode = StepLoad::of(&Step::<()>::uniform(16, 3, 1, 100));
        assert_eq!(decode, StepLoad { decode_rows: 3, decode_kv: 300, ..StepLoad::default() });
        assert_eq!((decode.kind(), decode.tokens()), (StepKind::Decode, 3));
        // The queries of a prompt of 4 tokens attend to 1, 2, 3 and 4 keys.
        let prefill = StepLoad::of(&Step::<()>::uniform(16, 1, 4, 4));
        assert_eq!((prefill.pairs, prefill.kind()), (10, StepKind::Prefill));
        // The last two of 10 tokens attend to 9 and 10.
        let mixed = StepLoad::of(&Step::<()>::ragged(16, &[(1, 7), (2, 10)]));
        assert_eq!((mixed.pairs, mixed.decode_kv, mixed.tokens()), (19, 7, 3));
        assert_eq!(mixed.kind(), StepKind::Mixed);
    }
}
