//! `--speculative-config`, as vLLM spells it.

use pegainfer_core::schedule::speculation::{
    DraftMethod, DraftSource, MAX_DRAFT_TOKENS, ModelMethod, PromptLookup, Speculation, Suffix,
};
use serde::Deserialize;
use std::sync::Arc;

/// Methods that there are.
const METHODS: &str = "\"ngram\", \"suffix\", \"mtp\" and \"dspark\"";
/// Draft tokens of method dspark unless the user says: a block of the official checkpoint.
const DEFAULT_DSPARK: usize = 5;
/// Tokens of a match of method ngram, unless the user says.
const DEFAULT_NGRAM: usize = 5;
/// Draft tokens of method suffix, and tokens of its matches, unless the user says.
const DEFAULT_SUFFIX: usize = 24;
/// Draft tokens for each token of the match of method suffix, unless the user says.
const DEFAULT_FACTOR: f64 = 1.0;
/// `draft_vocab_size` is a multiple of this, for the tiles of GEMMs.
const VOCAB_UNIT: usize = 256;
/// Probability at which a draft of method suffix ends, unless the user says.
const DEFAULT_PROBABILITY: f64 = 0.1;

/// The JSON object of the flag.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    method: String,
    num_speculative_tokens: Option<usize>,
    prompt_lookup_min: Option<usize>,
    prompt_lookup_max: Option<usize>,
    suffix_decoding_max_tree_depth: Option<usize>,
    suffix_decoding_max_spec_factor: Option<f64>,
    suffix_decoding_min_token_prob: Option<f64>,
    suffix_decoding_max_cached_requests: Option<usize>,
    /// Of methods by the model.
    draft_sample_method: Option<String>,
    /// Our own.
    adaptive: Option<bool>,
    /// Of method mtp.
    draft_vocab_size: Option<usize>,
    synthetic_acceptance_length: Option<f64>,
}

impl Fields {
    /// Fields of method ngram alone, and whether they are given.
    fn of_ngram(&self) -> [(&'static str, bool); 2] {
        [
            ("prompt_lookup_min", self.prompt_lookup_min.is_some()),
            ("prompt_lookup_max", self.prompt_lookup_max.is_some()),
        ]
    }

    /// The same of method mtp.
    fn of_mtp(&self) -> [(&'static str, bool); 1] {
        [("draft_vocab_size", self.draft_vocab_size.is_some())]
    }

    /// The same of method suffix.
    fn of_suffix(&self) -> [(&'static str, bool); 4] {
        [
            ("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth.is_some()),
            ("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor.is_some()),
            ("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob.is_some()),
            ("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests.is_some()),
        ]
    }
}

/// Parses the flag's value. Errors name the field and what it may be.
pub fn parse(text: &str) -> Result<Speculation, String> {
    let fields: Fields = serde_json::from_str(text).map_err(|error| {
        format!("{error}; expected a JSON object such as {{\"method\": \"ngram\", \"num_speculative_tokens\": 4}}")
    })?;
    if fields.synthetic_acceptance_length.is_some_and(|length| length < 1.0) {
        return Err("\"synthetic_acceptance_length\" must be at least 1".into());
    }
    match fields.method.as_str() {
        "ngram" => ngram(&fields),
        "suffix" => suffix(&fields),
        // vLLM's other names of it.
        "mtp" | "qwen3_5_mtp" | "qwen3_next_mtp" | "deepseek_mtp" => {
            let tokens = fields.num_speculative_tokens.ok_or("\"num_speculative_tokens\" is missing")?;
            by_model(&fields, ModelMethod::Mtp, tokens)
        }
        "dspark" => by_model(&fields, ModelMethod::DSpark, fields.num_speculative_tokens.unwrap_or(DEFAULT_DSPARK)),
        other => Err(format!("\"method\": {other:?} is not supported; the methods are {METHODS}")),
    }
}

/// `value`, which must be in `range`.
fn within(name: &str, value: usize, range: std::ops::RangeInclusive<usize>) -> Result<usize, String> {
    let (least, most) = (*range.start(), *range.end());
    let ok = range.contains(&value);
    if ok { Ok(value) } else { Err(format!("\"{name}\" must be {least} to {most}, got {value}")) }
}

fn num_tokens(value: usize) -> Result<usize, String> {
    within("num_speculative_tokens", value, 1..=MAX_DRAFT_TOKENS)
}

/// Refuses fields of another method.
fn only_for(method: &str, fields: &[(&str, bool)]) -> Result<(), String> {
    let given = fields.iter().find(|(_, given)| *given);
    given.map_or(Ok(()), |(name, _)| Err(format!("\"{name}\" is for \"method\": {method:?} only")))
}

fn ngram(fields: &Fields) -> Result<Speculation, String> {
    only_for("suffix", &fields.of_suffix())?;
    no_model_fields(fields)?;
    let tokens = fields.num_speculative_tokens.ok_or("\"num_speculative_tokens\" is missing")?;
    let given = (fields.prompt_lookup_min, fields.prompt_lookup_max);
    // One that is not given is the other one.
    let (min, max) = match given {
        (None, None) => (DEFAULT_NGRAM, DEFAULT_NGRAM),
        (Some(n), None) | (None, Some(n)) => (n, n),
        (Some(min), Some(max)) => (min, max),
    };
    let max = within("prompt_lookup_max", max, 1..=usize::from(u8::MAX))?;
    let min = within("prompt_lookup_min", min, 1..=max)?;
    Ok(speculation(num_tokens(tokens)?, fields, host(PromptLookup { ngram: min..=max })))
}

fn suffix(fields: &Fields) -> Result<Speculation, String> {
    only_for("ngram", &fields.of_ngram())?;
    no_model_fields(fields)?;
    if fields.suffix_decoding_max_cached_requests.is_some_and(|requests| requests > 0) {
        return Err("\"suffix_decoding_max_cached_requests\" must be 0: drafts come from the request's own text".into());
    }
    let depth = fields.suffix_decoding_max_tree_depth.unwrap_or(DEFAULT_SUFFIX);
    let max_match = within("suffix_decoding_max_tree_depth", depth, 1..=usize::from(u8::MAX))?;
    let max_factor = fields.suffix_decoding_max_spec_factor.unwrap_or(DEFAULT_FACTOR);
    if !(max_factor > 0.0 && max_factor.is_finite()) {
        return Err(format!("\"suffix_decoding_max_spec_factor\" must be above 0, got {max_factor}"));
    }
    let min_probability = fields.suffix_decoding_min_token_prob.unwrap_or(DEFAULT_PROBABILITY);
    if !(0.0..=1.0).contains(&min_probability) {
        return Err(format!("\"suffix_decoding_min_token_prob\" must be 0 to 1, got {min_probability}"));
    }
    let tokens = fields.num_speculative_tokens.unwrap_or(max_match.min(MAX_DRAFT_TOKENS));
    Ok(speculation(num_tokens(tokens)?, fields, host(Suffix { max_match, max_factor, min_probability })))
}

fn by_model(fields: &Fields, method: ModelMethod, tokens: usize) -> Result<Speculation, String> {
    only_for("ngram", &fields.of_ngram())?;
    only_for("suffix", &fields.of_suffix())?;
    if let Some(other) = fields.draft_sample_method.as_deref().filter(|name| *name != "greedy") {
        return Err(format!("\"draft_sample_method\" must be \"greedy\", got {other:?}"));
    }
    if method != ModelMethod::Mtp {
        only_for("mtp", &fields.of_mtp())?;
    }
    if let Some(size) = fields.draft_vocab_size.filter(|size| *size == 0 || !size.is_multiple_of(VOCAB_UNIT)) {
        return Err(format!("\"draft_vocab_size\" must be a multiple of {VOCAB_UNIT}, got {size}"));
    }
    Ok(speculation(num_tokens(tokens)?, fields, DraftSource::Model(method)))
}

/// Refuses the fields of methods by the model.
fn no_model_fields(fields: &Fields) -> Result<(), String> {
    only_for("mtp", &fields.of_mtp())?;
    match fields.draft_sample_method {
        None => Ok(()),
        Some(_) => Err("\"draft_sample_method\" is for \"method\": \"mtp\" and \"dspark\" only".into()),
    }
}

fn host(method: impl DraftMethod + 'static) -> DraftSource {
    DraftSource::Host(Arc::new(method))
}

fn speculation(num_tokens: usize, fields: &Fields, source: DraftSource) -> Speculation {
    let adaptive = fields.adaptive.unwrap_or(true);
    let &Fields { draft_vocab_size, synthetic_acceptance_length, .. } = fields;
    Speculation { num_tokens, source, adaptive, draft_vocab_size, synthetic_acceptance_length }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_and_their_defaults() {
        let describe = |text: &str| {
            let Speculation { num_tokens, source, .. } = parse(text).unwrap();
            match source {
                DraftSource::Host(method) => format!("{num_tokens} {method:?}"),
                DraftSource::Model(method) => format!("{num_tokens} {method:?}"),
            }
        };
        let ngram = |n, range| format!("{n} PromptLookup {{ ngram: {range} }}");
        assert_eq!(describe(r#"{"method": "ngram", "num_speculative_tokens": 4}"#), ngram(4, "5..=5"));
        let one = r#"{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3}"#;
        assert_eq!(describe(one), ngram(1, "3..=3"));
        let both =
            r#"{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "prompt_lookup_min": 2}"#;
        assert_eq!(describe(both), ngram(2, "2..=4"));
        let suffix = "24 Suffix { max_match: 24, max_factor: 1.0, min_probability: 0.1 }";
        assert_eq!(describe(r#"{"method": "suffix"}"#), suffix);
        for method in ["mtp", "qwen3_5_mtp", "qwen3_next_mtp", "deepseek_mtp"] {
            let text = format!(r#"{{"method": "{method}", "num_speculative_tokens": 3}}"#);
            assert_eq!(describe(&text), "3 Mtp");
        }
        assert_eq!(describe(r#"{"method": "dspark"}"#), "5 DSpark");
        let three = r#"{"method": "dspark", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}"#;
        assert_eq!(describe(three), "3 DSpark");
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (text, error) in [
            (
                r#"{"method": "eagle3"}"#,
                "\"eagle3\" is not supported; the methods are \"ngram\", \"suffix\", \"mtp\" and \"dspark\"",
            ),
            (r#"{"method": "ngram", "model": "x"}"#, "unknown field `model`"),
            (r#"{"method": "ngram"}"#, "\"num_speculative_tokens\" is missing"),
            (r#"{"method": "ngram", "num_speculative_tokens": 33}"#, "must be 1 to 32, got 33"),
            (
                r#"{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3}"#,
                "\"prompt_lookup_min\" must be 1 to 2",
            ),
            (
                r#"{"method": "suffix", "prompt_lookup_max": 2}"#,
                "\"prompt_lookup_max\" is for \"method\": \"ngram\" only",
            ),
            (r#"{"method": "suffix", "suffix_decoding_max_cached_requests": 9}"#, "must be 0"),
            (r#"{"method": "mtp"}"#, "\"num_speculative_tokens\" is missing"),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_length": 0.5}"#,
                "\"synthetic_acceptance_length\" must be at least 1",
            ),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2, "suffix_decoding_min_token_prob": 0.5}"#,
                "is for \"method\": \"suffix\" only",
            ),
            (r#"{"method": "suffix", "suffix_decoding_min_token_prob": 2}"#, "must be 0 to 1"),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2, "draft_vocab_size": 1000}"#,
                "\"draft_vocab_size\" must be a multiple of 256, got 1000",
            ),
            (
                r#"{"method": "suffix", "draft_vocab_size": 1024}"#,
                "\"draft_vocab_size\" is for \"method\": \"mtp\" only",
            ),
            (
                r#"{"method": "dspark", "draft_vocab_size": 1024}"#,
                "\"draft_vocab_size\" is for \"method\": \"mtp\" only",
            ),
            (
                r#"{"method": "dspark", "draft_sample_method": "probabilistic"}"#,
                "must be \"greedy\", got \"probabilistic\"",
            ),
            (
                r#"{"method": "suffix", "draft_sample_method": "greedy"}"#,
                "is for \"method\": \"mtp\" and \"dspark\" only",
            ),
            ("ngram", "such as {\"method\": \"ngram\""),
        ] {
            let got = parse(text).unwrap_err();
            assert!(got.contains(error), "{text}: {got}");
        }
    }
}
