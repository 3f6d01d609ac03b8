//! `--speculative-config`, as vLLM spells it.

use pegainfer_core::schedule::speculation::{
    DraftSource, MAX_DRAFT_TOKENS, ModelMethod, PromptLookup, Speculation, Suffix,
};
use serde::Deserialize;
use std::sync::Arc;

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
struct Config {
    num_speculative_tokens: Option<usize>,
    /// Our own.
    adaptive: Option<bool>,
    synthetic_acceptance_length: Option<f64>,
    #[serde(flatten)]
    method: Method,
}

/// A method and the fields that it alone has. Serde does not promise that unknown fields are refused here; the tests do.
#[derive(Debug, Deserialize)]
#[serde(tag = "method", rename_all = "lowercase", deny_unknown_fields)]
enum Method {
    Ngram {
        prompt_lookup_min: Option<usize>,
        prompt_lookup_max: Option<usize>,
    },
    Suffix {
        suffix_decoding_max_tree_depth: Option<usize>,
        suffix_decoding_max_spec_factor: Option<f64>,
        suffix_decoding_min_token_prob: Option<f64>,
        suffix_decoding_max_cached_requests: Option<usize>,
    },
    /// The aliases are vLLM's.
    #[serde(alias = "qwen3_5_mtp", alias = "qwen3_next_mtp", alias = "deepseek_mtp")]
    Mtp {
        draft_sample_method: Option<String>,
        draft_vocab_size: Option<usize>,
    },
    DSpark {
        draft_sample_method: Option<String>,
    },
}

/// Parses the flag's value. Errors name the field and what it may be.
pub fn parse(text: &str) -> Result<Speculation, String> {
    let config: Config = serde_json::from_str(text).map_err(|error| {
        format!("{error}; expected a JSON object such as {{\"method\": \"ngram\", \"num_speculative_tokens\": 4}}")
    })?;
    let Config { num_speculative_tokens, adaptive, synthetic_acceptance_length, method } = config;
    if synthetic_acceptance_length.is_some_and(|length| length < 1.0) {
        return Err("\"synthetic_acceptance_length\" must be at least 1".into());
    }
    let (default, source, draft_vocab_size) = match method {
        Method::Ngram { prompt_lookup_min: min, prompt_lookup_max: max } => (None, ngram(min, max)?, None),
        Method::Suffix {
            suffix_decoding_max_tree_depth: depth,
            suffix_decoding_max_spec_factor: factor,
            suffix_decoding_min_token_prob: probability,
            suffix_decoding_max_cached_requests: cached,
        } => {
            if cached.is_some_and(|requests| requests > 0) {
                return Err(
                    "\"suffix_decoding_max_cached_requests\" must be 0: drafts come from the request's own text".into(),
                );
            }
            let suffix = suffix(depth, factor, probability)?;
            (Some(suffix.max_match.min(MAX_DRAFT_TOKENS)), DraftSource::Host(Arc::new(suffix)), None)
        }
        Method::Mtp { draft_sample_method, draft_vocab_size } => {
            if let Some(size) = draft_vocab_size.filter(|size| *size == 0 || !size.is_multiple_of(VOCAB_UNIT)) {
                return Err(format!("\"draft_vocab_size\" must be a multiple of {VOCAB_UNIT}, got {size}"));
            }
            (None, by_model(ModelMethod::Mtp, draft_sample_method)?, draft_vocab_size)
        }
        Method::DSpark { draft_sample_method } => {
            (Some(DEFAULT_DSPARK), by_model(ModelMethod::DSpark, draft_sample_method)?, None)
        }
    };
    let tokens = num_speculative_tokens.or(default).ok_or("\"num_speculative_tokens\" is missing")?;
    let num_tokens = within("num_speculative_tokens", tokens, 1..=MAX_DRAFT_TOKENS)?;
    let adaptive = adaptive.unwrap_or(true);
    Ok(Speculation { num_tokens, source, adaptive, draft_vocab_size, synthetic_acceptance_length })
}

/// `value`, which must be in `range`.
fn within(name: &str, value: usize, range: std::ops::RangeInclusive<usize>) -> Result<usize, String> {
    let (least, most) = (*range.start(), *range.end());
    let ok = range.contains(&value);
    if ok { Ok(value) } else { Err(format!("\"{name}\" must be {least} to {most}, got {value}")) }
}

/// A limit that is not given is the other one.
fn ngram(min: Option<usize>, max: Option<usize>) -> Result<DraftSource, String> {
    let max = within("prompt_lookup_max", max.or(min).unwrap_or(DEFAULT_NGRAM), 1..=usize::from(u8::MAX))?;
    let min = within("prompt_lookup_min", min.unwrap_or(max), 1..=max)?;
    Ok(DraftSource::Host(Arc::new(PromptLookup { ngram: min..=max })))
}

fn suffix(depth: Option<usize>, factor: Option<f64>, probability: Option<f64>) -> Result<Suffix, String> {
    let depth = depth.unwrap_or(DEFAULT_SUFFIX);
    let max_match = within("suffix_decoding_max_tree_depth", depth, 1..=usize::from(u8::MAX))?;
    let max_factor = factor.unwrap_or(DEFAULT_FACTOR);
    if !(max_factor > 0.0 && max_factor.is_finite()) {
        return Err(format!("\"suffix_decoding_max_spec_factor\" must be above 0, got {max_factor}"));
    }
    let min_probability = probability.unwrap_or(DEFAULT_PROBABILITY);
    if !(0.0..=1.0).contains(&min_probability) {
        return Err(format!("\"suffix_decoding_min_token_prob\" must be 0 to 1, got {min_probability}"));
    }
    Ok(Suffix { max_match, max_factor, min_probability })
}

fn by_model(method: ModelMethod, sample_method: Option<String>) -> Result<DraftSource, String> {
    match sample_method.filter(|name| name != "greedy") {
        Some(other) => Err(format!("\"draft_sample_method\" must be \"greedy\", got {other:?}")),
        None => Ok(DraftSource::Model(method)),
    }
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
            (r#"{"method": "eagle3"}"#, "unknown variant `eagle3`, expected one of `ngram`, `suffix`"),
            (r#"{"method": "ngram", "model": "x"}"#, "unknown field `model`, expected `prompt_lookup_min` or"),
            (r#"{"method": "ngram"}"#, "\"num_speculative_tokens\" is missing"),
            (r#"{"num_speculative_tokens": 3}"#, "missing field `method`"),
            (r#"{"method": "ngram", "num_speculative_tokens": 33}"#, "must be 1 to 32, got 33"),
            (
                r#"{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3}"#,
                "\"prompt_lookup_min\" must be 1 to 2",
            ),
            (
                r#"{"method": "suffix", "prompt_lookup_max": 2}"#,
                "unknown field `prompt_lookup_max`, expected one of `suffix",
            ),
            (r#"{"method": "suffix", "suffix_decoding_max_cached_requests": 9}"#, "must be 0"),
            (r#"{"method": "mtp"}"#, "\"num_speculative_tokens\" is missing"),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2, "synthetic_acceptance_length": 0.5}"#,
                "\"synthetic_acceptance_length\" must be at least 1",
            ),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2, "suffix_decoding_min_token_prob": 0.5}"#,
                "unknown field `suffix_decoding_min_token_prob`, expected `draft_sample_method` or `draft_vocab_size`",
            ),
            (r#"{"method": "suffix", "suffix_decoding_min_token_prob": 2}"#, "must be 0 to 1"),
            (
                r#"{"method": "mtp", "num_speculative_tokens": 2, "draft_vocab_size": 1000}"#,
                "\"draft_vocab_size\" must be a multiple of 256, got 1000",
            ),
            (r#"{"method": "suffix", "draft_vocab_size": 1024}"#, "unknown field `draft_vocab_size`"),
            (r#"{"method": "dspark", "draft_vocab_size": 1024}"#, "unknown field `draft_vocab_size`"),
            (
                r#"{"method": "dspark", "draft_sample_method": "probabilistic"}"#,
                "must be \"greedy\", got \"probabilistic\"",
            ),
            (r#"{"method": "suffix", "draft_sample_method": "greedy"}"#, "unknown field `draft_sample_method`"),
            ("ngram", "such as {\"method\": \"ngram\""),
        ] {
            let got = parse(text).unwrap_err();
            assert!(got.contains(error), "{text}: {got}");
        }
    }
}
