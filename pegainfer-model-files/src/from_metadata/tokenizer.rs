//! tokenizer.json and tokenizer_config.json from metadata: byte-level BPE with the pre-tokenizers that are served.

use crate::gguf::Metadata;
use serde_json::{Map, Value, json};

/// Words of Qwen2 to Qwen3, and of Qwen3.5, whose letters include combining marks.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Types of tokens: `tokenizer.ggml.token_type`.
mod token_type {
    pub const UNKNOWN: u64 = 2;
    pub const CONTROL: u64 = 3;
    pub const USER_DEFINED: u64 = 4;
    /// Padding of the embedding table.
    pub const UNUSED: u64 = 5;
}

/// tokenizer.json of the model.
pub fn tokenizer(metadata: &Metadata) -> Result<Value, String> {
    let (normalizer, pre_tokenizer) = pre_tokenizer(metadata)?;
    let (vocabulary, added) = vocabulary(metadata)?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(metadata)?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": merges(metadata)?,
        },
    }))
}

/// tokenizer_config.json of the model: its special tokens and its chat template.
pub fn tokenizer_config(metadata: &Metadata) -> Result<Value, String> {
    let tokens = tokens(metadata)?;
    let token = |name: &str| -> Result<Value, String> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = metadata.unsigned(&key)? else { return Ok(Value::Null) };
        let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
        token.map(|token| Value::from(*token)).ok_or_else(|| format!("{key} is {id}, for {} tokens", tokens.len()))
    };
    Ok(json!({
        "bos_token": token("bos")?,
        "eos_token": token("eos")?,
        "pad_token": token("padding")?,
        "unk_token": token("unknown")?,
        "chat_template": metadata.text("tokenizer.chat_template")?,
    }))
}

/// The normalizer and the splits of `tokenizer.ggml.pre`.
fn pre_tokenizer(metadata: &Metadata) -> Result<(Value, Value), String> {
    let text = |key: &str| -> Result<String, String> {
        metadata.text(key)?.ok_or_else(|| format!("its metadata has no {key}"))
    };
    let model = text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(format!("its tokenizer is {}, and byte-level BPE (gpt2) is served", model.escape_debug()));
    }
    let byte_level = |use_regex: bool| {
        let (kind, no) = ("ByteLevel", false);
        json!({"type": kind, "add_prefix_space": no, "trim_offsets": no, "use_regex": use_regex})
    };
    let sequence =
        |first: Value, use_regex: bool| json!({"type": "Sequence", "pretokenizers": [first, byte_level(use_regex)]});
    let split = |pattern: &str| {
        let first = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        (json!({"type": "NFC"}), sequence(first, false))
    };
    match text("tokenizer.ggml.pre")?.as_str() {
        "qwen2" => Ok(split(QWEN2)),
        "qwen35" => Ok(split(QWEN35)),
        "smollm" => Ok((Value::Null, sequence(json!({"type": "Digits", "individual_digits": true}), true))),
        other => Err(format!(
            "its pre-tokenizer (tokenizer.ggml.pre) is {}, and qwen2, qwen35 and smollm are served",
            other.escape_debug()
        )),
    }
}

fn tokens(metadata: &Metadata) -> Result<Vec<&str>, String> {
    let key = "tokenizer.ggml.tokens";
    metadata.texts(key)?.ok_or_else(|| format!("its metadata has no {key}"))
}

/// Ids of the tokens that merges make, by spelling, and the tokens that match whole: control tokens and tags.
///
/// The first list has no gaps: every id below its last one is in it, also those of control tokens in front of the
/// others (SmolLM2) and of unused tokens. No merge makes them.
fn vocabulary(metadata: &Metadata) -> Result<(Map<String, Value>, Vec<Value>), String> {
    let (tokens, key) = (tokens(metadata)?, "tokenizer.ggml.token_type");
    let types = metadata.integers(key)?.ok_or_else(|| format!("its metadata has no {key}"))?;
    if types.len() != tokens.len() {
        return Err(format!("{key} has {} elements, for {} tokens", types.len(), tokens.len()));
    }
    let matches_whole =
        |kind: u64| matches!(kind, token_type::UNKNOWN | token_type::CONTROL | token_type::USER_DEFINED);
    let merged = types.iter().rposition(|&kind| kind != token_type::UNUSED && !matches_whole(kind));
    let merged = merged.map_or(0, |last| last + 1);
    let mut vocabulary = Map::with_capacity(merged);
    for (id, token) in tokens[..merged].iter().enumerate() {
        if vocabulary.insert((*token).to_owned(), id.into()).is_some() {
            return Err(format!("its vocabulary has the token {} twice", token.escape_debug()));
        }
    }
    let added = tokens.iter().zip(types).enumerate().filter(|(_, (_, kind))| matches_whole(*kind));
    let added = added.map(|(id, (token, kind))| {
        json!({
            "id": id,
            "content": token,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": kind != token_type::USER_DEFINED,
        })
    });
    Ok((vocabulary, added.collect()))
}

/// The merges, as pairs of tokens.
fn merges(metadata: &Metadata) -> Result<Vec<Value>, String> {
    let key = "tokenizer.ggml.merges";
    let merges = metadata.texts(key)?.ok_or_else(|| format!("its metadata has no {key}"))?;
    let pair = |(i, merge): (usize, &&str)| {
        let pair = merge.split_once(' ').map(|(a, b)| json!([a, b]));
        pair.ok_or_else(|| format!("element {i} of {key} is {}, not two tokens", merge.escape_debug()))
    };
    merges.iter().enumerate().map(pair).collect()
}

/// Adds the beginning-of-text token where the metadata asks for it.
fn post_processor(metadata: &Metadata) -> Result<Value, String> {
    if metadata.flag("tokenizer.ggml.add_bos_token")? != Some(true) {
        return Ok(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}));
    }
    let key = "tokenizer.ggml.bos_token_id";
    let id = metadata.unsigned(key)?.ok_or_else(|| format!("add_bos_token is true, and its metadata has no {key}"))?;
    let tokens = tokens(metadata)?;
    let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
    let token = *token.ok_or_else(|| format!("{key} is {id}, for {} tokens", tokens.len()))?;
    let (bos, text) = (
        json!({"SpecialToken": {"id": token, "type_id": 0}}),
        |id: &str, type_id: u8| json!({"Sequence": {"id": id, "type_id": type_id}}),
    );
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [bos, text("A", 0)],
        "pair": [bos, text("A", 0), text("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }))
}
