//! `reasoning_effort` as arguments of a chat template.

use serde_json::{Map, Value};

/// Reasoning arguments that a template accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switches {
    /// The template reads `enable_thinking`, which turns reasoning on and off.
    thinking: bool,
    /// The template reads `reasoning_effort` itself.
    effort: bool,
    /// The model reasons.
    reasons: bool,
}

impl Switches {
    /// Detects them in the source of a template.
    pub fn of_template(source: &str, reasons: bool) -> Self {
        Self { thinking: source.contains("enable_thinking"), effort: source.contains("reasoning_effort"), reasons }
    }

    /// Adds the arguments for `effort`; arguments that `kwargs` already has are kept. In a template without levels, `none`
    /// turns reasoning off and all other levels turn it on. False if the model does not reason, so that there is nothing to
    /// set: coding agents ask every model to reason.
    ///
    /// # Errors
    /// One sentence: the reasoning cannot be switched off, or `kwargs` contradict it.
    pub fn set(self, effort: &str, kwargs: &mut Map<String, Value>) -> Result<bool, String> {
        let reason = effort != "none";
        if !reason && kwargs.get("enable_thinking") == Some(&Value::Bool(true)) {
            return Err("is none, but enable_thinking is true".into());
        }
        if self.effort {
            kwargs.entry("reasoning_effort").or_insert(effort.into());
        }
        if self.thinking {
            kwargs.entry("enable_thinking").or_insert(reason.into());
        }
        match (self.effort || self.thinking, reason) {
            (true, _) => Ok(true),
            (false, true) if !self.reasons => Ok(false),
            (false, false) if self.reasons => {
                Err("cannot be none: this model's chat template has no switch for its reasoning".into())
            }
            // The template has no switch, and the request asks for what the model does anyway.
            (false, _) => Ok(true),
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
            let outcome = Switches::of_template(source, source.contains("</think>")).set(effort, &mut set);
            match expected {
                Ok((honoured, expected)) => {
                    assert_eq!((outcome, Value::Object(set)), (Ok(honoured), expected), "{source} {effort}");
                }
                Err(expected) => assert!(outcome.unwrap_err().contains(expected), "{source} {effort}"),
            }
        }
    }
}
