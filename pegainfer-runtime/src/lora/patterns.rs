//! Names of modules in adapter_config.json, matched as PEFT matches them.

use super::error::AdapterError;
use regex::Regex;
use serde_json::Value;

/// Compiles a regular expression of field `field`. Python's look-around and back-references are refused.
fn compile(field: &str, pattern: &str) -> Result<Regex, AdapterError> {
    Regex::new(pattern).map_err(|_| {
        AdapterError::field(field, format!("has {pattern:?}, which is no regular expression that the engine reads"))
    })
}

/// Numbers by module: `rank_pattern` or `alpha_pattern`. The first key in the file that matches a module counts.
///
/// A key matches a path if the regular expression `(.*\.)?(key)$` matches from the start of the path: a plain name
/// matches a suffix that starts at a dot.
#[derive(Debug)]
pub struct Numbers(Vec<(Regex, f64)>);

impl Numbers {
    /// Reads the object of field `field`; null is empty.
    pub fn read(field: &str, value: &Value) -> Result<Self, AdapterError> {
        let entries = match value {
            Value::Null => return Ok(Self(Vec::new())),
            Value::Object(entries) => entries,
            other => return Err(AdapterError::field(field, format!("is {other}, and must be an object"))),
        };
        let entry = |(key, value): (&String, &Value)| {
            // Alone first, so that parentheses cannot pair up with those around it.
            compile(field, key)?;
            let number = value.as_f64().filter(|number| number.is_finite());
            let number =
                number.ok_or_else(|| AdapterError::field(field, format!("has {value} for {key:?}, no number")))?;
            Ok((compile(field, &format!(r"^(.*\.)?({key})$"))?, number))
        };
        entries.iter().map(entry).collect::<Result<_, _>>().map(Self)
    }

    /// The number of the module with this path.
    pub fn of(&self, path: &str) -> Option<f64> {
        self.0.iter().find(|(key, _)| key.is_match(path)).map(|(_, number)| *number)
    }
}

/// A set of modules: `target_modules` or `exclude_modules`.
#[derive(Debug)]
pub enum Modules {
    /// Every linear layer.
    All,
    /// Paths, or suffixes of paths that start at a dot.
    Names(Vec<String>),
    /// A regular expression that matches whole paths.
    Pattern(Regex),
}

impl Modules {
    /// Reads field `field`; `None` if it is null.
    pub fn read(field: &str, value: &Value) -> Result<Option<Self>, AdapterError> {
        let wrong = || AdapterError::field(field, format!("is {value}, and must be a list of names or a pattern"));
        Ok(match value {
            Value::Null => None,
            Value::String(text) if text == "all-linear" => Some(Self::All),
            Value::String(pattern) => {
                compile(field, pattern)?;
                Some(Self::Pattern(compile(field, &format!("^(?:{pattern})$"))?))
            }
            Value::Array(names) => {
                let names = names.iter().map(|name| name.as_str().map(str::to_owned));
                Some(Self::Names(names.collect::<Option<_>>().ok_or_else(wrong)?))
            }
            _ => return Err(wrong()),
        })
    }

    /// True if the module with this path belongs to it.
    pub fn has(&self, path: &str) -> bool {
        let ends_with = |name: &str| path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        match self {
            Self::All => true,
            Self::Names(names) => names.iter().any(|name| ends_with(name)),
            Self::Pattern(pattern) => pattern.is_match(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn number(patterns: &Value, path: &str) -> Option<f64> {
        Numbers::read("alpha_pattern", patterns).unwrap().of(path)
    }

    #[test]
    fn keys_are_regular_expressions_at_a_dot() {
        let path = "model.layers.12.self_attn.v_proj";
        for key in ["v_proj", "v.proj", "self_attn.v_proj", "q_proj|v_proj", r"layers\.\d+\..*", path, r"^model\..*"] {
            assert_eq!(number(&json!({key: 3}), path), Some(3.0), "{key}");
        }
        for key in ["proj", "_proj", "v_pro", r"^layers\..*", "self_attn", "layers.2.*"] {
            assert_eq!(number(&json!({key: 3}), path), None, "{key}");
        }
    }

    #[test]
    fn the_first_key_of_the_file_counts() {
        let text = r#"{"up_proj": 1, "layers\\.4\\.mlp\\.up_proj": 2}"#;
        assert_eq!(number(&serde_json::from_str(text).unwrap(), "model.layers.4.mlp.up_proj"), Some(1.0));
        let text = r#"{"layers\\.4\\.mlp\\.up_proj": 2, "a": 3, "up_proj": 1}"#;
        assert_eq!(number(&serde_json::from_str(text).unwrap(), "model.layers.4.mlp.up_proj"), Some(2.0));
    }

    #[test]
    fn wrong_values_are_refused_by_the_name_of_the_field() {
        for value in [json!({"(q_proj": 3}), json!({"q)|(k": 3}), json!({"a": "b"}), json!([1]), json!({"(?=a)a": 1})] {
            let error = Numbers::read("alpha_pattern", &value).unwrap_err().to_string();
            assert!(error.contains("alpha_pattern"), "{error}");
        }
        for value in [json!("(q_proj"), json!([1]), json!(3)] {
            let error = Modules::read("target_modules", &value).unwrap_err().to_string();
            assert!(error.contains("target_modules"), "{error}");
        }
    }

    #[test]
    fn modules_are_names_or_one_pattern() {
        let has = |value: Value, path: &str| Modules::read("target_modules", &value).unwrap().unwrap().has(path);
        let path = "model.layers.1.self_attn.q_proj";
        for value in
            [json!(["q_proj"]), json!([path]), json!("all-linear"), json!(r".*layers\.[01]\.self_attn\.[qkv]_proj")]
        {
            assert!(has(value.clone(), path), "{value}");
        }
        for value in [json!(["proj"]), json!(["k_proj"]), json!("q_proj"), json!(".*q_pro"), json!([])] {
            assert!(!has(value.clone(), path), "{value}");
        }
        assert!(Modules::read("target_modules", &Value::Null).unwrap().is_none());
    }
}
