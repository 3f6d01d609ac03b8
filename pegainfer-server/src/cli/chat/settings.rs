//! Generation parameters that `/set` changes.

use super::generation::Generation;
use serde_json::{Map, Number, Value};
use std::num::NonZeroUsize;

/// Request fields that `/set` knows.
pub(super) const NAMES: [&str; 10] = [
    "frequency_penalty",
    "max_tokens",
    "min_p",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "temperature",
    "top_k",
    "top_p",
];

/// Fields of a request; those that are missing have the checkpoint's defaults. The API checks their ranges.
pub(super) type Settings = Map<String, Value>;

/// The settings of the command line.
pub(super) fn from_flags(flags: &Generation) -> Settings {
    match serde_json::to_value(flags) {
        Ok(Value::Object(settings)) => settings,
        _ => Settings::new(),
    }
}

/// The set limit of an answer's tokens.
pub(super) fn max_tokens(settings: &Settings) -> Option<NonZeroUsize> {
    NonZeroUsize::new(settings.get("max_tokens")?.as_u64()?.try_into().ok()?)
}

/// Runs `/set TEXT`: `NAME VALUE` sets a field, `NAME` returns it to its default, and an empty text lists all. Returns
/// what to tell the user.
pub(super) fn set(settings: &mut Settings, text: &str) -> String {
    let (name, value) = text.trim().split_once([' ', '=']).unwrap_or((text.trim(), ""));
    let value = value.trim();
    if name.is_empty() {
        return list(settings);
    }
    if !NAMES.contains(&name) {
        return format!("{name} is not a setting; choose one of {}", NAMES.join(", "));
    }
    if value.is_empty() {
        settings.remove(name);
        return format!("{name} has its default");
    }
    let parsed = match name {
        "reasoning_effort" => Some(Value::from(value)),
        _ => serde_json::from_str::<Number>(value).ok().map(Value::Number),
    };
    let Some(parsed) = parsed else { return format!("{name} must be a number, such as /set {name} 1") };
    settings.insert(name.to_owned(), parsed);
    format!("{name} is {value}")
}

fn list(settings: &Settings) -> String {
    let lines: Vec<String> = settings.iter().map(|(name, value)| format!("{name} is {value}")).collect();
    let rest = "all other settings have their defaults";
    if lines.is_empty() {
        "all settings have their defaults".to_owned()
    } else {
        format!("{}\n{rest}", lines.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_set_listed_and_returned_to_their_defaults() {
        let mut settings = from_flags(&Generation { temperature: Some(0.5), ..Generation::default() });
        assert_eq!(set(&mut settings, "temperature 0.7"), "temperature is 0.7");
        assert_eq!(set(&mut settings, "  top_k=40 "), "top_k is 40");
        assert_eq!(set(&mut settings, "reasoning_effort none"), "reasoning_effort is none");
        let all = json!({"temperature": 0.7, "top_k": 40, "reasoning_effort": "none"});
        assert_eq!(Value::Object(settings.clone()), all);
        assert!(set(&mut settings, "").contains("top_k is 40\n"));
        for (text, said) in [
            ("temperature hot", "temperature must be a number, such as /set temperature 1"),
            ("heat 3", "heat is not a setting; choose one of frequency_penalty, max_tokens"),
        ] {
            assert!(set(&mut settings, text).starts_with(said), "{text}");
        }
        assert_eq!(Value::Object(settings.clone()), all, "a refused setting changes nothing");
        for name in ["temperature", "top_k", "reasoning_effort"] {
            assert_eq!(set(&mut settings, name), format!("{name} has its default"));
        }
        assert_eq!(set(&mut settings, ""), "all settings have their defaults");
        assert_eq!((settings.len(), max_tokens(&settings)), (0, None));
        set(&mut settings, "max_tokens 5");
        assert_eq!(max_tokens(&settings), NonZeroUsize::new(5));
    }
}
