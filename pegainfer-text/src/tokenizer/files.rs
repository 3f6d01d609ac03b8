//! Checks a checkpoint's tokenizer files before fastokens reads them.

use super::growth;
use pegainfer_model_files::ModelFiles;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;

/// Maximum id of added tokens: tables are as long as the highest id.
const MAX_ADDED_ID: u32 = 1 << 24;

/// Detects errors in `text`, tokenizer.json, and in tokenizer_config.json that fastokens would blame on the wrong file, or that would take any amount of memory.
///
/// # Errors
/// The file at fault, and what is wrong with it.
pub fn check(files: &ModelFiles, text: &str) -> Result<(), (PathBuf, String)> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<Added>,
        #[serde(default)]
        normalizer: Value,
        #[serde(default)]
        post_processor: Value,
    }
    #[derive(Deserialize)]
    struct Added {
        id: u32,
    }
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        added_tokens_decoder: HashMap<u32, IgnoredAny>,
    }
    let (name, config) = ("tokenizer.json", "tokenizer_config.json");
    let malformed = |name: &str, reason: String| (files.path(name), reason);
    let file: File = parse(text).map_err(|reason| malformed(name, reason))?;
    growth::check(&file.normalizer, &file.post_processor).map_err(|reason| malformed(name, reason))?;
    let mut ids: Vec<u32> = file.added_tokens.iter().map(|token| token.id).collect();
    // This file may declare more tokens.
    if let Some(text) = files.read(config).map_err(|error| malformed(config, error.to_string()))? {
        let parsed: Config = parse(&text).map_err(|reason| malformed(config, reason))?;
        ids.extend(parsed.added_tokens_decoder.keys());
    }
    match ids.into_iter().max().filter(|id| *id >= MAX_ADDED_ID) {
        Some(id) => Err(malformed(name, format!("an added token has the id {id}; ids are below {MAX_ADDED_ID}"))),
        None => Ok(()),
    }
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing as testing;

    #[test]
    fn the_file_at_fault_is_named() {
        let dir = testing::TempDir::new("tokenizer-files");
        let (file, config) = ("tokenizer.json", "tokenizer_config.json");
        let load = || {
            let files = ModelFiles::open(dir.path()).unwrap();
            check(&files, &files.read(file).unwrap().unwrap())
                .map_err(|(path, reason)| format!("{}: {reason}", path.display()))
        };
        std::fs::copy(testing::model_dir().join(file), dir.path().join(file)).unwrap();
        load().unwrap();
        std::fs::write(dir.path().join(config), "{\"added_tokens_decoder\":").unwrap();
        assert!(load().unwrap_err().contains("tokenizer_config.json: EOF"));
        let token = |id: u32| {
            let token = serde_json::json!({"content": "<x>", "special": true});
            serde_json::json!({"added_tokens_decoder": {id.to_string(): token}}).to_string()
        };
        for (id, valid) in [(4200, true), (u32::MAX, false), (1 << 30, false)] {
            std::fs::write(dir.path().join(config), token(id)).unwrap();
            match load() {
                Ok(()) => assert!(valid, "{id}"),
                Err(error) => assert!(!valid && error.contains(&format!("the id {id}")), "{error}"),
            }
        }
        std::fs::remove_file(dir.path().join(config)).unwrap();
        let text = std::fs::read_to_string(testing::model_dir().join(file)).unwrap();
        let mut parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
        let hostile =
            serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1_000_000)});
        let normalizer = std::mem::replace(&mut parsed["normalizer"], hostile);
        std::fs::write(dir.path().join(file), parsed.to_string()).unwrap();
        assert!(load().unwrap_err().contains("tokenizer.json: its normalizer makes up to 1000000 bytes of one"));
        parsed["normalizer"] = normalizer;
        parsed["added_tokens"][0]["id"] = u32::MAX.into();
        std::fs::write(dir.path().join(file), parsed.to_string()).unwrap();
        let error = load().unwrap_err();
        assert!(error.contains("tokenizer.json: an added token has the id"), "{error}");
    }
}
