//! `reasoning_effort` as arguments of a chat template.

use serde_json::{Map, Value};

/// No reasoning.
const NONE: &str = "none";
/// The levels of reasoning that clients ask for, lowest first.
const LEVELS: [&str; 6] = ["minimal", "low", "medium", "high", "xhigh", "max"];

/// Reasoning arguments that a template accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switches {
    /// True if the template reads `enable_thinking`, which turns reasoning on and off.
    thinking: bool,
    /// Values of `reasoning_effort` that the template accepts; empty if it does not read it.
    efforts: Vec<&'static str>,
    /// True if the model reasons.
    reasons: bool,
}

impl Switches {
    /// Detects them in the source of a template and by trial. `renders` tells whether the template renders a
    /// conversation with this `reasoning_effort`. Qwen3.8's, for example, raises an exception at levels that the model
    /// was not trained for.
    pub fn detect(source: &str, reasons: bool, renders: impl Fn(&str) -> bool) -> Self {
        let mut efforts = Vec::new();
        if source.contains("reasoning_effort") {
            efforts.extend(LEVELS.into_iter().chain([NONE]).filter(|effort| renders(effort)));
            if efforts.is_empty() {
                // It rejects the conversation itself, so its levels remain unknown.
                efforts.extend(LEVELS.into_iter().chain([NONE]));
            }
        }
        Self { thinking: source.contains("enable_thinking"), efforts, reasons }
    }

    /// Adds the arguments for `effort`; existing arguments of `kwargs` are kept. A level that the template does not
    /// accept becomes the next higher accepted level, or the highest. In a template without levels, `none` turns
    /// reasoning off and all other levels turn it on. Returns false if the model does not reason and nothing is set:
    /// coding agents ask every model to reason.
    ///
    /// # Errors
    /// One sentence: the reasoning cannot be switched off, or `kwargs` contradict it.
    pub fn set(&self, effort: &str, kwargs: &mut Map<String, Value>) -> Result<bool, String> {
        let reason = effort != NONE;
        if !reason && kwargs.get("enable_thinking") == Some(&Value::Bool(true)) {
            return Err("is none, but enable_thinking is true".into());
        }
        let level = self.level(effort);
        if let Some(level) = level {
            kwargs.entry("reasoning_effort").or_insert(level.into());
        }
        if self.thinking {
            kwargs.entry("enable_thinking").or_insert(reason.into());
        }
        match (level.is_some() || self.thinking, reason) {
            (true, _) => Ok(true),
            (false, true) if !self.reasons => Ok(false),
            (false, false) if self.reasons => {
                Err("cannot be none: this model's chat template has no switch for its reasoning".into())
            }
            // The template has no switch, and the model always behaves as requested.
            (false, _) => Ok(true),
        }
    }

    /// The template's `reasoning_effort` value for this effort, if it has one.
    fn level(&self, effort: &str) -> Option<&'static str> {
        let accepted = |level: &&&str| self.efforts.contains(level);
        match LEVELS.iter().position(|level| *level == effort) {
            Some(asked) => LEVELS[asked..].iter().chain(LEVELS[..asked].iter().rev()).find(accepted).copied(),
            None => [NONE].iter().find(accepted).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_effort_becomes_the_template_s_arguments() {
        let switch = "{% if enable_thinking %}<think>{% else %}</think>{% endif %}";
        for (source, effort, kwargs, expected) in [
            (switch, "none", json!({}), Ok((true, json!({"enable_thinking": false})))),
            (switch, "low", json!({"a": 1}), Ok((true, json!({"a": 1, "enable_thinking": true})))),
            (switch, "max", json!({"enable_thinking": false}), Ok((true, json!({"enable_thinking": false})))),
            (switch, "none", json!({"enable_thinking": true}), Err("enable_thinking is true")),
            ("{{ reasoning_effort }}</think>", "high", json!({}), Ok((true, json!({"reasoning_effort": "high"})))),
            (
                "{{ reasoning_effort }}",
                "low",
                json!({"reasoning_effort": "x"}),
                Ok((true, json!({"reasoning_effort": "x"}))),
            ),
            ("no reasoning", "none", json!({}), Ok((true, json!({})))),
            ("no reasoning", "low", json!({}), Ok((false, json!({})))),
            ("always </think>", "low", json!({}), Ok((true, json!({})))),
            ("always </think>", "none", json!({}), Err("no switch")),
        ] {
            let mut set = kwargs.as_object().unwrap().clone();
            let outcome = Switches::detect(source, source.contains("</think>"), |_| true).set(effort, &mut set);
            match expected {
                Ok((honoured, expected)) => {
                    assert_eq!((outcome, Value::Object(set)), (Ok(honoured), expected), "{source} {effort}");
                }
                Err(expected) => assert!(outcome.unwrap_err().contains(expected), "{source} {effort}"),
            }
        }
    }

    #[test]
    fn a_level_that_the_template_refuses_becomes_the_next_one() {
        let effort = |accepted: &'static [&str], source: &str, effort: &str| {
            let mut kwargs = Map::new();
            let switches = Switches::detect(source, true, |level| accepted.contains(&level));
            switches.set(effort, &mut kwargs).map(|_| Value::Object(kwargs))
        };
        let levels = ["low", "medium", "xhigh"].as_slice();
        let both = "enable_thinking reasoning_effort";
        for (asked, expected) in [
            ("minimal", "low"),
            ("low", "low"),
            ("medium", "medium"),
            ("high", "xhigh"),
            ("xhigh", "xhigh"),
            ("max", "xhigh"),
        ] {
            let expected = json!({"reasoning_effort": expected, "enable_thinking": true});
            assert_eq!(effort(levels, both, asked), Ok(expected), "{asked}");
        }
        assert_eq!(effort(levels, both, "none"), Ok(json!({"enable_thinking": false})));
        assert!(effort(levels, "reasoning_effort", "none").unwrap_err().contains("no switch"));
        let any = json!({"reasoning_effort": "high", "enable_thinking": true});
        assert_eq!(effort(&[], both, "high"), Ok(any), "a template that refuses the conversation");
    }
}
