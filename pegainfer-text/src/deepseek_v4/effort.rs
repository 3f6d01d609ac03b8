//! Reasoning effort of DeepSeek-V4: a text of its release at the beginning of the prompt.
//!
//! The texts are not part of this program. They are read from the encoder that the official checkpoints contain.

use serde_json::{Map, Value};
use std::path::Path;

/// Path of the encoder in the model's directory.
const FILE: &str = "encoding/encoding_dsv4.py";
/// Constant of the April release: the text of the level `max`, the only level that has one.
const APRIL: &str = "REASONING_EFFORT_MAX";
/// Constant of the 0731 release: the texts of all levels.
const JULY: &str = "REASONING_EFFORT_PROMPTS";

/// Default level of requests that reason, as in DeepSeek's own API and in vLLM.
const DEFAULT: &str = "high";

/// Levels of a release and their texts, or the reason why they are unknown.
pub struct Efforts(Result<Vec<(String, String)>, String>);

impl Efforts {
    /// Reads the encoder in a model's directory. If it is missing or cannot be parsed, only requests for a level that needs a
    /// text fail.
    pub fn load(dir: &Path) -> Self {
        let path = dir.join(FILE);
        let efforts = match std::fs::read_to_string(&path) {
            Ok(source) => Self::parse(&source),
            Err(error) if path.exists() => Self(Err(format!("{FILE} cannot be read: {error}"))),
            Err(_) => Self(Err(format!("put {FILE} of its release into the model's directory and start again"))),
        };
        if let Err(reason) = &efforts.0 {
            log::warn!("the only reasoning_effort of this model is low: {reason}");
        }
        efforts
    }

    fn parse(source: &str) -> Self {
        let texts = match (value(source, JULY), value(source, APRIL)) {
            (Some(value), _) => read(value, Vec::new()),
            (None, Some(value)) => {
                read(value, ["low", "high", "max"].map(|level| (level.into(), String::new())).into())
            }
            (None, None) => None,
        };
        Self(texts.ok_or_else(|| format!("{FILE} has neither {APRIL} nor {JULY} in the form of a known release")))
    }

    /// Adds the template argument for `effort`; arguments that `kwargs` already has are kept.
    ///
    /// # Errors
    /// Those of [`text`](Self::text).
    pub fn set(&self, effort: &str, kwargs: &mut Map<String, Value>) -> Result<(), String> {
        if effort != "none" {
            self.text(Some(effort))?;
        }
        kwargs.entry("reasoning_effort").or_insert(effort.into());
        Ok(())
    }

    /// The text at the beginning of the prompt of a request that reasons.
    ///
    /// # Errors
    /// One sentence: the release has no such level, or its text is missing.
    pub fn text(&self, asked: Option<&str>) -> Result<&str, String> {
        // OpenAI's levels are mapped as DeepSeek's API maps them.
        let level = match asked.unwrap_or(DEFAULT) {
            "minimal" => "low",
            "medium" | "xhigh" => "high",
            level => level,
        };
        match (&self.0, asked) {
            (Ok(texts), _) => match texts.iter().find(|(name, _)| name == level) {
                Some((_, text)) => Ok(text),
                None => Err(format!("{level:?} is unknown to this model: it has {}", names(texts))),
            },
            // `low` adds no text in any release, and requests without a level are not refused.
            (Err(_), None) => Ok(""),
            (Err(_), _) if level == "low" => Ok(""),
            (Err(reason), _) => Err(format!("{level:?} needs a text that is not here: {reason}")),
        }
    }
}

/// The lines between the brackets of the constant `name`.
fn value<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = source.split_once(&format!("\n{name}"))?;
    let (begin, lines) = rest.split_once('\n')?;
    let end = lines.find("\n)").into_iter().chain(lines.find("\n}")).min()?;
    begin.trim_end().ends_with(['(', '{']).then(|| &lines[..end])
}

/// Reads the string literals of a constant: one before a colon begins a level, others continue the text of the last level. The
/// releases have only literals that are also JSON; `None` if there are others.
fn read(mut value: &str, mut texts: Vec<(String, String)>) -> Option<Vec<(String, String)>> {
    loop {
        value = value.trim_start_matches(|c: char| c.is_whitespace() || "(),".contains(c));
        if value.is_empty() {
            return Some(texts);
        }
        let mut literals = serde_json::Deserializer::from_str(value).into_iter::<String>();
        let literal = literals.next()?.ok()?;
        value = &value[literals.byte_offset()..];
        if let Some(rest) = value.strip_prefix(':') {
            value = rest;
            texts.push((literal, String::new()));
        } else {
            texts.last_mut()?.1 += &literal;
        }
    }
}

fn names(texts: &[(String, String)]) -> String {
    texts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;

    fn load(source: Option<&str>) -> Efforts {
        let dir = TempDir::new("efforts");
        if let Some(source) = source {
            std::fs::create_dir(dir.path().join("encoding")).unwrap();
            std::fs::write(dir.path().join(FILE), source).unwrap();
        }
        Efforts::load(dir.path())
    }

    #[test]
    fn both_releases() {
        let april = load(Some("x = 1\nREASONING_EFFORT_MAX = (\n    \"Think\\n\"\n    \"long.\\n\\n\"\n)\n"));
        let july = load(Some(
            "x = 1\nREASONING_EFFORT_PROMPTS: Dict[str, str] = {\n    \"low\": \"\",\n    \"high\": (\n        \"Think.\\n\"\n    ),\n    \"max\": (\n        \"Think — \"\n        \"more.\\n\"\n    ),\n}\n",
        ));
        for (level, of_april, of_july) in [
            (None, "", "Think.\n"),
            (Some("minimal"), "", ""),
            (Some("low"), "", ""),
            (Some("medium"), "", "Think.\n"),
            (Some("high"), "", "Think.\n"),
            (Some("xhigh"), "", "Think.\n"),
            (Some("max"), "Think\nlong.\n\n", "Think — more.\n"),
        ] {
            assert_eq!((april.text(level), july.text(level)), (Ok(of_april), Ok(of_july)), "{level:?}");
        }
        let error = july.text(Some("most")).unwrap_err();
        assert_eq!(error, "\"most\" is unknown to this model: it has low, high, max");
    }

    #[test]
    fn without_the_texts_only_low_is_available() {
        for (source, expected) in [
            (None, "put encoding/encoding_dsv4.py of its release into the model's directory"),
            (Some("\nREASONING_EFFORT_MAX = 5\n"), "neither"),
            (Some("\nREASONING_EFFORT_MAX = (\n    \"one\"  # a comment\n)\n"), "neither"),
            (Some("\nREASONING_EFFORT_MAX = (\n    'one'\n)\n"), "neither"),
            (Some("\nREASONING_EFFORT_PROMPTS = 'one'\n"), "neither"),
            (Some("\nREASONING_EFFORT_PROMPTS = {\n    \"low\"\n}\n"), "neither"),
            (Some(""), "neither"),
        ] {
            let efforts = load(source);
            assert!([None, Some("low"), Some("minimal")].iter().all(|level| efforts.text(*level) == Ok("")));
            for level in ["high", "max", "xhigh"] {
                let error = efforts.text(Some(level)).unwrap_err();
                assert!(error.contains(expected), "{error}");
            }
        }
    }
}
