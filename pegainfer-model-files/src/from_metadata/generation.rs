//! generation_config.json from metadata: ends of text, and sampling parameters.

use crate::gguf::Metadata;
use serde_json::{Map, Value, json};

/// Tokens that end a text wherever a vocabulary has them. Metadata names only one end, as a rule that of a turn; the
/// model also ends with the others.
const ENDS: [&str; 8] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>"];
/// Keys of `general.sampling`, and the fields of generation_config.json with their meaning.
const SAMPLING: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// generation_config.json of the model.
pub fn generation_config(metadata: &Metadata) -> Result<Value, String> {
    let mut config = Map::from_iter([("eos_token_id".to_owned(), json!(ends(metadata)?))]);
    for (key, field) in SAMPLING {
        let key = format!("general.sampling.{key}");
        let value = match metadata.get(&key) {
            None => continue,
            Some(value) => value.unsigned().map(Value::from),
        };
        let value = value.or(metadata.number(&key)?.map(Value::from));
        config.insert(field.to_owned(), value.unwrap_or_default());
    }
    Ok(Value::Object(config))
}

/// Ids of all tokens that end a text; those that the metadata names come first.
fn ends(metadata: &Metadata) -> Result<Vec<u64>, String> {
    let mut ids = Vec::new();
    for key in ["eos", "eot", "eom"] {
        ids.extend(metadata.unsigned(&format!("tokenizer.ggml.{key}_token_id"))?);
    }
    let tokens = metadata.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    let ends = (0..).zip(&tokens).filter(|(_, token)| ENDS.contains(token)).map(|(id, _)| id);
    // A tokenizer has few tokens of these texts, each once.
    let ends: Vec<u64> = ends.filter(|id| !ids.contains(id)).take(ENDS.len()).collect();
    ids.extend(ends);
    ids.dedup();
    Ok(ids)
}
