//! Chat templates of a checkpoint: where exporters store them, and which one a request uses.

use super::error::TemplateError;
use pegainfer_model_files::ModelFiles;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the template for requests without tools, if a checkpoint has several.
const DEFAULT: &str = "default";
/// Name of the template for requests with tools.
const TOOL_USE: &str = "tool_use";
/// Special tokens of tokenizer_config.json that a template may use.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// The text of a template, and its file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub text: String,
    pub path: PathBuf,
}

/// The templates of a checkpoint.
#[derive(Debug)]
pub(super) struct Sources {
    /// Template of requests without tools, and of all requests if it is the only one.
    pub default: Source,
    /// Template of requests with tools.
    pub tool_use: Option<Source>,
    pub special_tokens: Map<String, Json>,
}

impl Sources {
    /// The templates for requests; `None` without a template for requests without tools.
    pub fn find(files: &ModelFiles) -> Result<Option<Self>, TemplateError> {
        let mut named = all(files)?;
        let only = if named.len() == 1 { named.keys().next().cloned() } else { None };
        let Some(default) = named.remove(DEFAULT).or_else(|| named.remove(&only?)) else { return Ok(None) };
        let config = read_json(files, "tokenizer_config.json")?;
        let special_tokens = SPECIAL_TOKENS
            .iter()
            .filter_map(|&name| Some((name.to_string(), Json::from(token_text(&config[name])?))))
            .collect();
        Ok(Some(Self { default, tool_use: named.remove(TOOL_USE), special_tokens }))
    }
}

/// Templates by name, in transformers' order: from `chat_template.jinja` and `additional_chat_templates/`, otherwise
/// from `tokenizer_config.json`, otherwise from the older `chat_template.json`. The latter two contain one template, or
/// several with names, as a list or an object.
fn all(files: &ModelFiles) -> Result<BTreeMap<String, Source>, TemplateError> {
    let mut named = jinja_files(files)?;
    for name in ["tokenizer_config.json", "chat_template.json"] {
        if named.is_empty() {
            named = embedded(&read_json(files, name)?["chat_template"], &files.path(name));
        }
    }
    Ok(named)
}

/// Warns at the start if requests with messages will be refused.
pub(super) fn warn_without(files: &ModelFiles) -> Result<(), TemplateError> {
    let named = all(files)?;
    let names: Vec<&str> = named.keys().map(String::as_str).collect();
    match names.is_empty() {
        true => log::warn!(
            "the checkpoint has no chat template (chat_template.jinja, chat_template.json, or chat_template in \
             tokenizer_config.json): messages are refused, and /v1/completions works"
        ),
        false => log::warn!(
            "the checkpoint has the chat templates {}, none of them named {DEFAULT}: messages are refused; save one \
             of them as chat_template.jinja",
            names.join(", ")
        ),
    }
    Ok(())
}

/// The templates in separate files, by name.
fn jinja_files(files: &ModelFiles) -> Result<BTreeMap<String, Source>, TemplateError> {
    let mut named = BTreeMap::new();
    for (name, file) in [(DEFAULT, "chat_template.jinja"), (TOOL_USE, "additional_chat_templates/tool_use.jinja")] {
        if let Some(text) = files.read(file)? {
            named.insert(name.to_owned(), Source { text, path: files.path(file) });
        }
    }
    Ok(named)
}

/// The templates in a field: a text, a list of `{name, template}`, or an object of texts by name.
fn embedded(field: &Json, path: &Path) -> BTreeMap<String, Source> {
    let source = |text: &str| Source { text: text.to_owned(), path: path.to_path_buf() };
    let named = |(name, text): (&str, &Json)| Some((name.to_owned(), source(text.as_str()?)));
    match field {
        Json::String(text) => BTreeMap::from([(DEFAULT.to_owned(), source(text))]),
        Json::Array(list) => {
            let pairs = list.iter().filter_map(|entry| Some((entry["name"].as_str()?, &entry["template"])));
            pairs.filter_map(named).collect()
        }
        Json::Object(map) => map.iter().map(|(name, text)| (name.as_str(), text)).filter_map(named).collect(),
        _ => BTreeMap::new(),
    }
}

/// A JSON file of the model; null if it does not exist.
pub(super) fn read_json(files: &ModelFiles, name: &str) -> Result<Json, TemplateError> {
    let Some(text) = files.read(name)? else { return Ok(Json::Null) };
    let malformed = |e| TemplateError::File { path: files.path(name), reason: format!("not valid JSON: {e}") };
    serde_json::from_str(&text).map_err(malformed)
}

/// Text of a special token, which is written as a string or as an object with its `content`.
fn token_text(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;
    use serde_json::json;

    /// The texts of the default template and of the one for tools, from a folder with these files.
    fn find(files: &[(&str, String)]) -> Option<(String, Option<String>)> {
        let dir = TempDir::new("template-files");
        std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let found = Sources::find(&ModelFiles::open(dir.path()).unwrap()).unwrap()?;
        Some((found.default.text, found.tool_use.map(|source| source.text)))
    }

    #[test]
    fn every_place_of_a_template_is_read() {
        let config = |template: Json| ("tokenizer_config.json", json!({"chat_template": template}).to_string());
        let older = |template: Json| ("chat_template.json", json!({"chat_template": template}).to_string());
        let jinja = ("chat_template.jinja", "j".to_owned());
        let tools = ("additional_chat_templates/tool_use.jinja", "jt".to_owned());
        let some = |default: &str, tool_use: Option<&str>| Some((default.to_owned(), tool_use.map(str::to_owned)));
        let list = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
        for (files, expected) in [
            (vec![], None),
            (vec![config(json!("c"))], some("c", None)),
            (vec![config(list.clone())], some("d", Some("t"))),
            (vec![config(json!({"default": "d", "tool_use": "t", "rag": "r"}))], some("d", Some("t"))),
            (vec![config(json!([{"name": "chat", "template": "only"}]))], some("only", None)),
            (vec![config(json!({"a": "x", "b": "y"}))], None),
            (vec![older(json!("o"))], some("o", None)),
            (vec![older(list)], some("d", Some("t"))),
            (vec![older(json!("o")), config(json!("c"))], some("c", None)),
            (vec![jinja.clone(), config(json!("c")), older(json!("o"))], some("j", None)),
            (vec![jinja, tools, config(json!("c"))], some("j", Some("jt"))),
        ] {
            assert_eq!(find(&files), expected, "{files:?}");
        }
    }
}
