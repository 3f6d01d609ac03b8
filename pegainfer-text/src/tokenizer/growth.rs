//! Bounds of a tokenizer's growth: bytes that its normalizer makes of a text, and tokens that its post-processor adds.
//! A request's memory is estimated from its size, so a tokenizer that multiplies texts is refused at load.

use serde_json::Value;
use std::collections::HashMap;

/// Maximum number of bytes that a normalizer may make of one. SentencePiece's files turn a space into three bytes, and
/// a Unicode normalization form makes a text up to three times as long.
const MAX_FACTOR: f64 = 64.0;
/// Maximum number of bytes or tokens added to a text of any length.
const MAX_ADDED: f64 = 65536.0;
/// Maximum number of copies of a text in a post-processor's output.
const MAX_COPIES: f64 = 2.0;

/// A bound of a length: times `factor`, plus `added`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Growth {
    factor: f64,
    added: f64,
}

impl Growth {
    const NONE: Self = Self { factor: 1.0, added: 0.0 };

    fn times(factor: f64) -> Self {
        Self { factor: factor.max(1.0), added: 0.0 }
    }

    /// The growth of this step followed by `next`.
    fn then(self, next: Self) -> Self {
        Self { factor: self.factor * next.factor, added: self.added * next.factor + next.added }
    }
}

/// Refuses a normalizer or post-processor that multiplies texts.
///
/// # Errors
/// A clause that completes the file's error.
pub fn check(normalizer: &Value, post_processor: &Value) -> Result<(), String> {
    let bytes = normalizer_growth(normalizer);
    if bytes.factor > MAX_FACTOR || bytes.added > MAX_ADDED {
        return Err(format!(
            "its normalizer makes up to {:.0} bytes of one and adds {:.0}, and at most {MAX_FACTOR} and {MAX_ADDED} \
             are served",
            bytes.factor, bytes.added
        ));
    }
    let tokens = post_processor_growth(post_processor);
    if tokens.factor > MAX_COPIES || tokens.added > MAX_ADDED {
        return Err(format!(
            "its post_processor makes up to {:.0} copies of a text and adds {:.0} tokens, and at most {MAX_COPIES} \
             and {MAX_ADDED} are served",
            tokens.factor, tokens.added
        ));
    }
    Ok(())
}

/// The growth of all steps in a list.
fn steps(list: &Value, of: fn(&Value) -> Growth) -> Growth {
    list.as_array().into_iter().flatten().map(of).fold(Growth::NONE, Growth::then)
}

fn normalizer_growth(normalizer: &Value) -> Growth {
    match normalizer["type"].as_str() {
        Some("Sequence") => steps(&normalizer["normalizers"], normalizer_growth),
        Some("Prepend") => Growth { added: length(&normalizer["prepend"]), ..Growth::NONE },
        Some("Replace") => {
            let (content, pattern) = (length(&normalizer["content"]), &normalizer["pattern"]);
            match pattern.as_str().or(pattern["String"].as_str()) {
                Some(text) if !text.is_empty() => Growth::times(content / text.len() as f64),
                // A regular expression may match between any two characters.
                _ => Growth { factor: 1.0 + content, added: content },
            }
        }
        // Unicode forms, and lower case.
        Some(_) => Growth::times(3.0),
        None => Growth::NONE,
    }
}

fn post_processor_growth(processor: &Value) -> Growth {
    match processor["type"].as_str() {
        Some("Sequence") => steps(&processor["processors"], post_processor_growth),
        Some("TemplateProcessing") => {
            let tokens = processor["special_tokens"].as_object().into_iter().flat_map(|tokens| tokens.values());
            let length = |token: &Value| token["ids"].as_array().map_or(0, Vec::len);
            let lengths: HashMap<&str, usize> =
                tokens.filter_map(|token| Some((token["id"].as_str()?, length(token)))).collect();
            let entries = processor["single"].as_array().into_iter().flatten();
            entries.fold(Growth { factor: 0.0, added: 0.0 }, |growth, entry| match entry.get("SpecialToken") {
                Some(token) => {
                    let ids = token["id"].as_str().and_then(|id| lengths.get(id)).copied().unwrap_or(0);
                    Growth { added: growth.added + ids as f64, ..growth }
                }
                None => Growth { factor: growth.factor + 1.0, ..growth },
            })
        }
        _ => Growth::NONE,
    }
}

fn length(text: &Value) -> f64 {
    text.as_str().map_or(0, str::len) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn official_normalizers_and_processors_pass() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let sentence_piece = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(json!({"String": " "}), "▁")]});
        let clip = json!({"type": "Sequence", "normalizers": [
            {"type": "NFC"}, replace(json!({"Regex": "\\s+"}), " "), {"type": "Lowercase"}]});
        let bos = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}});
        let both = json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, bos]});
        for normalizer in [Value::Null, json!({"type": "NFC"}), sentence_piece, clip] {
            for processor in [&Value::Null, &json!({"type": "ByteLevel"}), &bos, &both] {
                check(&normalizer, processor).unwrap();
            }
        }
    }

    #[test]
    fn normalizers_that_multiply_are_refused() {
        let many = "a".repeat(1_000_000);
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let eight = replace(json!("a"), "aaaaaaaa");
        for (normalizer, factor) in [
            (replace(json!({"String": "a"}), &many), "1000000 bytes"),
            (replace(json!({"Regex": ""}), &many), "1000001 bytes"),
            (replace(json!(""), &many), "1000001 bytes"),
            (json!({"type": "Sequence", "normalizers": [eight, eight, eight]}), "512 bytes"),
            (json!({"type": "Prepend", "prepend": many}), "adds 1000000"),
        ] {
            let error = check(&normalizer, &Value::Null).unwrap_err();
            assert!(error.contains("its normalizer makes up to") && error.contains(factor), "{error}");
        }
    }

    #[test]
    fn post_processors_that_multiply_are_refused() {
        let processing = |single: Vec<Value>, ids: usize| {
            json!({"type": "TemplateProcessing", "single": single,
                "special_tokens": {"x": {"id": "<s>", "ids": vec![1; ids], "tokens": []}}})
        };
        let (token, text) =
            (json!({"SpecialToken": {"id": "<s>", "type_id": 0}}), json!({"Sequence": {"id": "A", "type_id": 0}}));
        let doubled = processing(vec![text.clone(), text.clone()], 1);
        for (processor, words) in [
            (processing(vec![token.clone(); 100_000], 1), "tokens, and at most"),
            (processing(vec![token, text.clone()], 1_000_000), "adds 1000000 tokens"),
            (processing(vec![text; 1000], 1), "1000 copies"),
            (json!({"type": "Sequence", "processors": vec![doubled; 40]}), "copies"),
        ] {
            let error = check(&Value::Null, &processor).unwrap_err();
            assert!(error.contains("its post_processor makes") && error.contains(words), "{error}");
        }
    }
}
