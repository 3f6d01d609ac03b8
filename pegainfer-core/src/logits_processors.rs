//! Logits processors: penalties, biases, banned and allowed tokens, applied before sampling.
//!
//! [`LogitsProcessors`] are the checked parameters of a request; a [`LogitsUpdate`] is their effect on the logits of
//! one sample.

mod counts;
mod update;

pub use counts::{CountUpdate, CountedPenalties, Penalties, TokenCount};
pub use update::{LogitEdit, LogitsUpdate, TokenMask};

use crate::sampling::SamplingError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Unchecked parameters of the logits processors, named as in the API. The default changes no logit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogitsProcessorParams {
    /// Subtracted from the logit of every generated token; -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence of a generated token; -2 to 2.
    pub frequency_penalty: f32,
    /// Divides the positive logits of the tokens of the prompt and of the output, and multiplies the others; 0.01 to
    /// 100, 1 changes nothing.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens; -100 to 100.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Number of tokens to generate before one of `stops` is allowed.
    pub min_tokens: usize,
    /// Token ids that end the request.
    pub stops: Vec<u32>,
    /// The only tokens that may be sampled; `None` allows all.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Token sequences that must not be generated: if the output ends with all but the last token of one, that last
    /// token is banned.
    pub bad_words: Vec<Vec<u32>>,
}

impl Default for LogitsProcessorParams {
    fn default() -> Self {
        Self {
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: BTreeMap::new(),
            min_tokens: 0,
            stops: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
        }
    }
}

impl LogitsProcessorParams {
    fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }

    fn check(&self, vocab_size: usize) -> Result<(), SamplingError> {
        let check = |ok: bool, field, expected, got: &dyn ToString| {
            if ok { Ok(()) } else { Err(SamplingError { field, expected, got: got.to_string() }) }
        };
        let (range, unit) = ("a number from -2 to 2", -2.0..=2.0);
        check(unit.contains(&self.presence_penalty), "presence_penalty", range, &self.presence_penalty)?;
        check(unit.contains(&self.frequency_penalty), "frequency_penalty", range, &self.frequency_penalty)?;
        let (repetition, range) = (self.repetition_penalty, "a number from 0.01 to 100");
        check((0.01..=100.0).contains(&repetition), "repetition_penalty", range, &repetition)?;
        let ids = |field, largest: Option<&u32>| match largest.filter(|id| **id as usize >= vocab_size) {
            Some(id) => check(false, field, "made of token ids of the vocabulary", id),
            None => Ok(()),
        };
        ids("logit_bias", self.logit_bias.keys().max())?;
        for bias in self.logit_bias.values() {
            check((-100.0..=100.0).contains(bias), "logit_bias", "made of numbers from -100 to 100", bias)?;
        }
        ids("bad_words", self.bad_words.iter().flatten().max())?;
        let empty = self.bad_words.iter().any(Vec::is_empty);
        check(!empty, "bad_words", "made of words of at least one token", &"an empty one")?;
        let Some(allowed) = &self.allowed_token_ids else { return Ok(()) };
        ids("allowed_token_ids", allowed.iter().max())?;
        let banned = |id: &u32| self.bad_words.contains(&vec![*id]) || (self.min_tokens > 0 && self.stops.contains(id));
        let expected = "a list with a token that min_tokens and bad_words leave";
        check(!allowed.iter().all(banned), "allowed_token_ids", expected, &"none")
    }
}

/// The checked logits processors of a request: parsed once, valid by construction.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitsProcessors {
    fields: LogitsProcessorParams,
    allowed: Option<Arc<TokenMask>>,
}

impl LogitsProcessors {
    /// Checks every value against its range and the vocabulary size. `None` if no logit would change.
    ///
    /// # Errors
    /// The first field whose value is out of range.
    pub fn new(fields: LogitsProcessorParams, vocab_size: usize) -> Result<Option<Arc<Self>>, SamplingError> {
        fields.check(vocab_size)?;
        let allowed = fields.allowed_token_ids.as_ref().map(|ids| Arc::new(TokenMask::new(ids, vocab_size)));
        let bans = fields.min_tokens > 0 || !fields.bad_words.is_empty();
        let any = fields.has_penalties() || !fields.logit_bias.is_empty() || bans || allowed.is_some();
        Ok(any.then(|| Arc::new(Self { fields, allowed })))
    }

    /// The parameters.
    pub fn params(&self) -> &LogitsProcessorParams {
        &self.fields
    }

    /// The first field that bans tokens, if any. The remaining tokens may be disjoint from those of a grammar.
    pub fn ban(&self) -> Option<&'static str> {
        let LogitsProcessorParams { min_tokens, bad_words, .. } = &self.fields;
        let bans = [("min_tokens", *min_tokens > 0), ("bad_words", !bad_words.is_empty())];
        let bans = bans.into_iter().chain([("allowed_token_ids", self.allowed.is_some())]);
        bans.filter(|(_, bans)| *bans).map(|(field, _)| field).next()
    }

    /// True if an update depends on which tokens were generated, not only on how many.
    pub fn need_history(&self) -> bool {
        self.fields.bad_words.iter().any(|word| word.len() > 1)
    }

    /// The penalties, if the request has any.
    pub fn penalties(&self) -> Option<Penalties> {
        let LogitsProcessorParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = self.fields;
        let penalties =
            Penalties { presence: presence_penalty, frequency: frequency_penalty, repetition: repetition_penalty };
        self.fields.has_penalties().then_some(penalties)
    }

    /// Edits of the logits of the token after `generated` ones, sorted by token. `tokens` are the known ones of them,
    /// which must be all if [`need_history`](Self::need_history).
    pub fn edits(&self, generated: usize, tokens: &[u32]) -> Vec<LogitEdit> {
        let stops = if generated < self.fields.min_tokens { self.fields.stops.as_slice() } else { &[] };
        let words = self.fields.bad_words.iter().filter_map(|word| word.split_last());
        let words = words.filter(|(_, rest)| tokens.ends_with(rest)).map(|(last, _)| last);
        let mut edits: BTreeMap<u32, f32> = self.fields.logit_bias.clone();
        edits.extend(stops.iter().chain(words).map(|token| (*token, f32::NEG_INFINITY)));
        edits.into_iter().map(|(token, add)| LogitEdit { token, scale: 1.0, add }).collect()
    }

    /// The mask of the allowed tokens, if the request has one.
    pub fn allowed(&self) -> Option<Arc<TokenMask>> {
        self.allowed.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAN: f32 = f32::NEG_INFINITY;

    fn processors(fields: LogitsProcessorParams) -> Arc<LogitsProcessors> {
        LogitsProcessors::new(fields, 40).unwrap().unwrap()
    }

    /// (token, add) by token.
    fn edits(processors: &LogitsProcessors, generated: &[u32]) -> Vec<(u32, f32)> {
        processors.edits(generated.len(), generated).iter().map(|edit| (edit.token, edit.add)).collect()
    }

    #[test]
    fn bans_come_and_go() {
        let fields = LogitsProcessorParams {
            min_tokens: 2,
            stops: vec![1, 3],
            bad_words: vec![vec![4], vec![5, 6, 3]],
            logit_bias: [(3, 1.0)].into(),
            ..LogitsProcessorParams::default()
        };
        let words = processors(fields);
        assert_eq!(edits(&words, &[]), [(1, BAN), (3, BAN), (4, BAN)], "the prompt does not count");
        assert_eq!(edits(&words, &[5, 7]), [(3, 1.0), (4, BAN)]);
        assert_eq!(edits(&words, &[2, 5, 6]), [(3, BAN), (4, BAN)]);
        assert!(words.need_history() && words.penalties().is_none());
        let simple =
            processors(LogitsProcessorParams { min_tokens: 1, stops: vec![1], ..LogitsProcessorParams::default() });
        assert!(!simple.need_history() && !edits(&simple, &[]).is_empty());
        assert_eq!(edits(&simple, &[0]), [], "after min_tokens no logit changes");
    }

    #[test]
    fn an_edit_moves_both_signs_the_same_way() {
        let edit = LogitEdit { token: 0, scale: 2.0, add: -1.0 };
        assert_eq!([3.0, 0.0, -3.0, BAN].map(|x| edit.apply(x)), [0.5, -1.0, -7.0, BAN]);
    }

    #[test]
    fn masks_have_a_bit_for_each_token() {
        assert_eq!(TokenMask::new(&[0, 33, 39], 40).words(), [1, 2 | 128]);
        let fields = LogitsProcessorParams { allowed_token_ids: Some(vec![39]), ..LogitsProcessorParams::default() };
        let allowed = processors(fields).allowed().unwrap();
        assert_eq!(allowed.words(), [0, 128]);
    }

    #[test]
    fn values_out_of_range_are_named_and_defaults_are_none() {
        let default = LogitsProcessorParams::default;
        assert_eq!(LogitsProcessors::new(LogitsProcessorParams { stops: vec![3], ..default() }, 40).unwrap(), None);
        let ids = |ids: &[u32]| Some(ids.to_vec());
        for (field, fields) in [
            ("presence_penalty", LogitsProcessorParams { presence_penalty: 2.1, ..default() }),
            ("frequency_penalty", LogitsProcessorParams { frequency_penalty: f32::NAN, ..default() }),
            ("repetition_penalty", LogitsProcessorParams { repetition_penalty: 0.0, ..default() }),
            ("repetition_penalty", LogitsProcessorParams { repetition_penalty: f32::INFINITY, ..default() }),
            ("logit_bias", LogitsProcessorParams { logit_bias: [(40, 1.0)].into(), ..default() }),
            ("logit_bias", LogitsProcessorParams { logit_bias: [(1, 101.0)].into(), ..default() }),
            ("allowed_token_ids", LogitsProcessorParams { allowed_token_ids: ids(&[]), ..default() }),
            ("allowed_token_ids", LogitsProcessorParams { allowed_token_ids: ids(&[40]), ..default() }),
            (
                "allowed_token_ids",
                LogitsProcessorParams { allowed_token_ids: ids(&[1]), bad_words: vec![vec![1]], ..default() },
            ),
            (
                "allowed_token_ids",
                LogitsProcessorParams { allowed_token_ids: ids(&[1]), min_tokens: 1, stops: vec![1], ..default() },
            ),
            ("bad_words", LogitsProcessorParams { bad_words: vec![vec![]], ..default() }),
            ("bad_words", LogitsProcessorParams { bad_words: vec![vec![1, 40]], ..default() }),
        ] {
            assert_eq!(LogitsProcessors::new(fields, 40).unwrap_err().field, field);
        }
    }
}
