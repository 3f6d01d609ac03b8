//! End-of-text tokens: the union of those in a checkpoint's files.

use pegainfer_model_files::ModelFiles;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;

/// Ids that end a text, in order of precedence: generation_config.json, config.json, the tokenizer's `eos_token`.
///
/// Fine-tunes of base models often name the end of a turn in only one of the files. An additional id outside of the
/// vocabulary is left out, because the model cannot generate it.
pub fn union(generation: Vec<u32>, config: Vec<u32>, tokenizer: Option<u32>, vocab_size: usize) -> Vec<u32> {
    let (mut ids, more) = if generation.is_empty() { (config, Vec::new()) } else { (generation, config) };
    for id in more.into_iter().chain(tokenizer) {
        if !ids.contains(&id) && (id as usize) < vocab_size {
            ids.push(id);
        }
    }
    ids
}

/// A token in a tokenizer file: a text, or an object with its `content`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

impl Token {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

/// Id of the `eos_token` of the model's tokenizer; `None` if tokenizer_config.json has none or the files do not
/// contain its id. Files that cannot be parsed are ignored here and refused by the tokenizer's loader.
pub fn tokenizer_eos(files: &ModelFiles) -> Option<u32> {
    #[derive(Deserialize)]
    struct Config {
        eos_token: Option<Token>,
        #[serde(default)]
        added_tokens_decoder: BTreeMap<String, Value>,
    }
    #[derive(Deserialize)]
    struct Tokenizer {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    #[derive(Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    let config: Config = read(files, "tokenizer_config.json")?;
    let eos = config.eos_token?;
    let declared = config.added_tokens_decoder.iter().find(|(_, token)| token["content"] == eos.text());
    if let Some((id, _)) = declared {
        return id.parse().ok();
    }
    let tokenizer: Tokenizer = read(files, "tokenizer.json")?;
    tokenizer.added_tokens.into_iter().find(|token| token.content == eos.text()).map(|token| token.id)
}

fn read<T: DeserializeOwned>(files: &ModelFiles, name: &str) -> Option<T> {
    serde_json::from_str(&files.read(name).ok()??).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_file_adds_its_ids() {
        assert_eq!(union(vec![], vec![7], None, 10), [7]);
        assert_eq!(union(vec![3], vec![7, 3], Some(5), 10), [3, 7, 5]);
        assert_eq!(union(vec![], vec![], Some(5), 10), [5]);
        assert_eq!(
            union(vec![12], vec![13], Some(14), 10),
            [12],
            "what the loader refuses is kept, other ids are not added"
        );
        assert_eq!(union(vec![], vec![13], Some(5), 10), [13, 5]);
    }

    #[test]
    fn the_id_of_the_tokenizer_is_in_either_file() {
        let dir = std::env::temp_dir().join(format!("pegainfer-eos-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let files = ModelFiles::open(&dir).unwrap();
        let write = |file: &str, value: Value| std::fs::write(dir.join(file), value.to_string()).unwrap();
        assert_eq!(tokenizer_eos(&files), None);
        write("tokenizer_config.json", json!({"eos_token": "<e>", "added_tokens_decoder": {"9": {"content": "<e>"}}}));
        assert_eq!(tokenizer_eos(&files), Some(9));
        write("tokenizer_config.json", json!({"eos_token": {"content": "<e>", "lstrip": false}}));
        assert_eq!(tokenizer_eos(&files), None);
        write("tokenizer.json", json!({"model": {"vocab": {}}, "added_tokens": [{"id": 4, "content": "<e>"}]}));
        assert_eq!(tokenizer_eos(&files), Some(4));
        write("tokenizer_config.json", json!({"eos_token": null}));
        assert_eq!(tokenizer_eos(&files), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
