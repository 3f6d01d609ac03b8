//! Rules that change logits before a token is drawn: penalties, biases, bans, allowed tokens.
//!
//! [`LogitRules`] is what a request asks for, a [`RuleTracker`] follows one sequence under it, and an [`Adjustment`] is
//! what the rules do to one row of logits.

mod adjustment;

pub use adjustment::{Adjustment, LogitEdit, TokenMask};

use crate::sampling::SamplingError;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What a request asks for, unchecked; the fields are those of the API. The default asks for nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct RuleFields {
    /// Taken off the logit of every token that was generated, -2 to 2.
    pub presence_penalty: f32,
    /// Taken off once for each time that a token was generated, -2 to 2.
    pub frequency_penalty: f32,
    /// Divides the logit of every token of the prompt and of the generated text, or multiplies it if it is not above 0;
    /// 0.01 to 100, 1 is none.
    pub repetition_penalty: f32,
    /// Added to the logit of a token, -100 to 100.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens to generate before one of `stops` may come.
    pub min_tokens: usize,
    /// Token ids that would end the request.
    pub stops: Vec<u32>,
    /// The only tokens that may be drawn.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Token sequences that must not be generated: where the generated text ends like one without its last token, that
    /// token is banned.
    pub bad_words: Vec<Vec<u32>>,
}

impl Default for RuleFields {
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

impl RuleFields {
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

/// What a request asks for, checked: parsed once, valid by construction.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitRules {
    fields: RuleFields,
    allowed: Option<Arc<TokenMask>>,
}

impl LogitRules {
    /// Checks every value against its range and the vocabulary. `None` when nothing is asked for.
    ///
    /// # Errors
    /// Names the field whose value cannot be used.
    pub fn new(fields: RuleFields, vocab_size: usize) -> Result<Option<Arc<Self>>, SamplingError> {
        fields.check(vocab_size)?;
        let allowed = fields.allowed_token_ids.as_ref().map(|ids| Arc::new(TokenMask::new(ids, vocab_size)));
        let bans = fields.min_tokens > 0 || !fields.bad_words.is_empty();
        let any = fields.has_penalties() || !fields.logit_bias.is_empty() || bans || allowed.is_some();
        Ok(any.then(|| Arc::new(Self { fields, allowed })))
    }

    /// The field that takes tokens out, if one does: what is left may have nothing in common with a grammar.
    pub fn ban(&self) -> Option<&'static str> {
        let RuleFields { min_tokens, bad_words, .. } = &self.fields;
        let bans = [("min_tokens", *min_tokens > 0), ("bad_words", !bad_words.is_empty())];
        let bans = bans.into_iter().chain([("allowed_token_ids", self.allowed.is_some())]);
        bans.filter(|(_, bans)| *bans).map(|(field, _)| field).next()
    }

    /// Whether a row's adjustment depends on which tokens came before it, not only on how many.
    pub fn need_history(&self) -> bool {
        self.fields.has_penalties() || self.fields.bad_words.iter().any(|word| word.len() > 1)
    }
}

/// The rules of one sequence and what they need to know of its tokens. A new token costs the same however long the
/// sequence is.
#[derive(Debug)]
pub struct RuleTracker {
    rules: Arc<LogitRules>,
    /// Of every token that a bias or a penalty touches.
    edits: Vec<LogitEdit>,
    /// How often each of them was generated.
    counts: Vec<u32>,
    /// Index of each of them.
    places: HashMap<u32, usize>,
}

impl RuleTracker {
    /// The start of a sequence with this prompt.
    pub fn new(rules: Arc<LogitRules>, prompt: &[u32]) -> Self {
        let mut tracker = Self { rules: rules.clone(), edits: Vec::new(), counts: Vec::new(), places: HashMap::new() };
        for token in rules.fields.logit_bias.keys() {
            tracker.place(*token);
        }
        if rules.fields.repetition_penalty != 1.0 {
            for token in prompt {
                let at = tracker.place(*token);
                tracker.edits[at].scale = rules.fields.repetition_penalty;
            }
        }
        tracker
    }

    /// See [`LogitRules::need_history`].
    pub fn needs_history(&self) -> bool {
        self.rules.need_history()
    }

    /// Takes a generated token into account.
    pub fn push(&mut self, token: u32) {
        let rules = self.rules.clone();
        if !rules.fields.has_penalties() {
            return;
        }
        let at = self.place(token);
        self.counts[at] += 1;
        // From the count, not from the sum so far: rounding does not add up.
        let penalty = rules.fields.presence_penalty + rules.fields.frequency_penalty * self.counts[at] as f32;
        self.edits[at].scale = rules.fields.repetition_penalty;
        self.edits[at].add = rules.fields.logit_bias.get(&token).copied().unwrap_or(0.0) - penalty;
    }

    /// What the rules do to the row that draws the token after `generated` ones; `tokens` are those of them that are
    /// known, which is all where [`needs_history`](Self::needs_history). `None` when they do nothing.
    pub fn adjustment(&self, generated: usize, tokens: &[u32]) -> Option<Adjustment> {
        let fields = &self.rules.fields;
        let mut edits = self.edits.clone();
        let stops = if generated < fields.min_tokens { fields.stops.as_slice() } else { &[] };
        let words = fields.bad_words.iter().filter_map(|word| word.split_last());
        let words = words.filter(|(_, rest)| tokens.ends_with(rest)).map(|(last, _)| last);
        let mut bans: Vec<u32> = stops.iter().chain(words).copied().collect();
        bans.sort_unstable();
        bans.dedup();
        for token in bans {
            match self.places.get(&token) {
                Some(&at) => edits[at].add = f32::NEG_INFINITY,
                None => edits.push(LogitEdit { token, scale: 1.0, add: f32::NEG_INFINITY }),
            }
        }
        let allowed = self.rules.allowed.clone();
        (!edits.is_empty() || allowed.is_some()).then_some(Adjustment { edits, allowed })
    }

    /// The index of a token's edit, which is its bias until a penalty changes it.
    fn place(&mut self, token: u32) -> usize {
        let Self { rules, edits, counts, places } = self;
        *places.entry(token).or_insert_with(|| {
            let add = rules.fields.logit_bias.get(&token).copied().unwrap_or(0.0);
            edits.push(LogitEdit { token, scale: 1.0, add });
            counts.push(0);
            edits.len() - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAN: f32 = f32::NEG_INFINITY;

    fn tracker(fields: RuleFields, prompt: &[u32]) -> RuleTracker {
        RuleTracker::new(LogitRules::new(fields, 40).unwrap().unwrap(), prompt)
    }

    /// (token, scale, add) by token.
    fn edits(tracker: &RuleTracker, generated: &[u32]) -> Vec<(u32, f32, f32)> {
        let adjustment = tracker.adjustment(generated.len(), generated).unwrap_or_default();
        let mut edits: Vec<_> = adjustment.edits.iter().map(|e| (e.token, e.scale, e.add)).collect();
        edits.sort_by_key(|edit| edit.0);
        edits
    }

    #[test]
    fn penalties_count_what_the_definitions_count() {
        let fields = RuleFields {
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            repetition_penalty: 2.0,
            logit_bias: [(7, 4.0), (9, -4.0)].into(),
            ..RuleFields::default()
        };
        let mut tracker = tracker(fields, &[5, 5, 6]);
        assert_eq!(edits(&tracker, &[]), [(5, 2.0, 0.0), (6, 2.0, 0.0), (7, 1.0, 4.0), (9, 1.0, -4.0)]);
        [6, 7, 7, 8].into_iter().for_each(|token| tracker.push(token));
        let expected = [(5, 2.0, 0.0), (6, 2.0, -1.5), (7, 2.0, 4.0 - 2.0), (8, 2.0, -1.5), (9, 1.0, -4.0)];
        assert_eq!(edits(&tracker, &[6, 7, 7, 8]), expected);
        assert!(tracker.needs_history());
    }

    #[test]
    fn bans_come_and_go() {
        let fields = RuleFields {
            min_tokens: 2,
            stops: vec![1, 3],
            bad_words: vec![vec![4], vec![5, 6, 3]],
            logit_bias: [(3, 1.0)].into(),
            ..RuleFields::default()
        };
        let tracker = tracker(fields, &[5, 6]);
        assert_eq!(edits(&tracker, &[]), [(1, 1.0, BAN), (3, 1.0, BAN), (4, 1.0, BAN)], "the prompt does not count");
        assert_eq!(edits(&tracker, &[5, 7]), [(3, 1.0, 1.0), (4, 1.0, BAN)]);
        assert_eq!(edits(&tracker, &[2, 5, 6]), [(3, 1.0, BAN), (4, 1.0, BAN)]);
        let simple = RuleFields { min_tokens: 1, stops: vec![1], ..RuleFields::default() };
        let simple = self::tracker(simple, &[]);
        assert!(!simple.needs_history() && simple.adjustment(0, &[]).is_some());
        assert_eq!(simple.adjustment(1, &[]), None, "nothing to do any more, and no need to know the token");
    }

    #[test]
    fn an_edit_moves_both_signs_the_same_way() {
        let edit = LogitEdit { token: 0, scale: 2.0, add: -1.0 };
        assert_eq!([3.0, 0.0, -3.0, BAN].map(|x| edit.apply(x)), [0.5, -1.0, -7.0, BAN]);
    }

    #[test]
    fn masks_have_a_bit_for_each_token() {
        assert_eq!(TokenMask::new(&[0, 33, 39], 40).words(), [1, 2 | 128]);
        let fields = RuleFields { allowed_token_ids: Some(vec![39]), ..RuleFields::default() };
        let allowed = tracker(fields, &[]).adjustment(0, &[]).unwrap().allowed.unwrap();
        assert_eq!(allowed.words(), [0, 128]);
    }

    #[test]
    fn what_cannot_be_used_is_named_and_what_does_nothing_is_no_rule() {
        let default = RuleFields::default;
        assert_eq!(LogitRules::new(RuleFields { stops: vec![3], ..default() }, 40).unwrap(), None);
        let ids = |ids: &[u32]| Some(ids.to_vec());
        for (field, fields) in [
            ("presence_penalty", RuleFields { presence_penalty: 2.1, ..default() }),
            ("frequency_penalty", RuleFields { frequency_penalty: f32::NAN, ..default() }),
            ("repetition_penalty", RuleFields { repetition_penalty: 0.0, ..default() }),
            ("repetition_penalty", RuleFields { repetition_penalty: f32::INFINITY, ..default() }),
            ("logit_bias", RuleFields { logit_bias: [(40, 1.0)].into(), ..default() }),
            ("logit_bias", RuleFields { logit_bias: [(1, 101.0)].into(), ..default() }),
            ("allowed_token_ids", RuleFields { allowed_token_ids: ids(&[]), ..default() }),
            ("allowed_token_ids", RuleFields { allowed_token_ids: ids(&[40]), ..default() }),
            ("allowed_token_ids", RuleFields { allowed_token_ids: ids(&[1]), bad_words: vec![vec![1]], ..default() }),
            (
                "allowed_token_ids",
                RuleFields { allowed_token_ids: ids(&[1]), min_tokens: 1, stops: vec![1], ..default() },
            ),
            ("bad_words", RuleFields { bad_words: vec![vec![]], ..default() }),
            ("bad_words", RuleFields { bad_words: vec![vec![1, 40]], ..default() }),
        ] {
            assert_eq!(LogitRules::new(fields, 40).unwrap_err().field, field);
        }
    }
}
