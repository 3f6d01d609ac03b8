//! `tools`, `tool_choice` and `parallel_tool_calls`.

use super::errors::{ApiError, echo};
use super::fields::{Fields, describe};
use crate::text::parser::{CallPrefix, ToolFormat};
use serde_json::Value;

/// Bytes of a function's name.
const MAX_NAME: usize = 128;

/// The functions that a model may call, and what it must do with them.
#[derive(Debug)]
pub struct Tools {
    /// In OpenAI's form. Empty if there are none, or if they must not be called.
    pub definitions: Vec<Value>,
    /// What the prompt begins of the first call, to force it.
    pub prefix: CallPrefix,
    /// Calls that the client takes.
    pub max_calls: usize,
}

impl Tools {
    /// Takes the three fields out of a body.
    pub fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut definitions = fields.list("tools")?.unwrap_or_default();
        for (i, tool) in definitions.iter().enumerate() {
            check(i, tool)?;
        }
        let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        let prefix = match fields.take("tool_choice") {
            None => CallPrefix::None,
            Some(Value::String(choice)) if choice == "auto" => CallPrefix::None,
            Some(Value::String(choice)) if choice == "none" => {
                definitions.clear();
                CallPrefix::None
            }
            Some(Value::String(choice)) if choice == "required" => CallPrefix::AnyFunction,
            Some(choice) => CallPrefix::Function(named(&choice)?),
        };
        match &prefix {
            CallPrefix::None => {}
            _ if definitions.is_empty() => return Err(invalid_choice("tool_choice forces a call: it needs tools")),
            CallPrefix::Function(name) if !definitions.iter().any(|tool| tool["function"]["name"] == **name) => {
                let message = format!("tool_choice names {:?}, which is not among the tools", echo(name));
                return Err(invalid_choice(message));
            }
            CallPrefix::AnyFunction | CallPrefix::Function(_) => {}
        }
        let one = !parallel || matches!(prefix, CallPrefix::Function(_));
        Ok(Self { definitions, prefix, max_calls: if one { 1 } else { usize::MAX } })
    }

    /// How this model writes calls, if it is to make any; 400 if it cannot.
    pub fn format(&self, of_template: Option<ToolFormat>) -> Result<Option<ToolFormat>, ApiError> {
        match of_template {
            _ if self.definitions.is_empty() => Ok(None),
            Some(format) => Ok(Some(format)),
            None => {
                let message = "this model's chat template has no tools, or in a form that is not supported";
                Err(ApiError::invalid("tools", message).with_code("unsupported_parameter"))
            }
        }
    }

    /// True if the model has no choice but to call.
    pub fn forced(&self) -> bool {
        self.prefix != CallPrefix::None
    }
}

fn invalid_choice(message: impl Into<String>) -> ApiError {
    ApiError::invalid("tool_choice", message)
}

fn check(i: usize, tool: &Value) -> Result<(), ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("tools", format!("tools[{i}]{message}")));
    if !tool.is_object() {
        return invalid(format!(" must be an object, got {}", describe(tool)));
    }
    match tool["type"].as_str() {
        Some("function") => {}
        Some(other) => return invalid(format!(".type {:?} is not supported: only function is", echo(other))),
        None => return invalid(".type is missing or not a string".into()),
    }
    let function = &tool["function"];
    // The name is written into prompts, between the marks of both call formats.
    let plain = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.:/".contains(&b));
    match function["name"].as_str() {
        Some(name) if (1..=MAX_NAME).contains(&name.len()) && plain(name) => {}
        Some(_) => {
            let allowed = "letters, digits, '_', '-', '.', ':' or '/'";
            return invalid(format!(".function.name must be 1 to {MAX_NAME} {allowed}"));
        }
        None => return invalid(".function.name is missing or not a string".into()),
    }
    match &function["parameters"] {
        Value::Null | Value::Object(_) => Ok(()),
        other => invalid(format!(".function.parameters must be a JSON schema, got {}", describe(other))),
    }
}

/// `{"type": "function", "function": {"name": …}}`.
fn named(choice: &Value) -> Result<String, ApiError> {
    let name = choice["function"]["name"].as_str().filter(|_| choice["type"] == "function");
    name.map(str::to_string).ok_or_else(|| {
        let expected = "none, auto, required or {\"type\": \"function\", \"function\": {\"name\": …}}";
        invalid_choice(format!("tool_choice must be {expected}, got {}", describe(choice)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn take(mut body: Value) -> Result<Tools, ApiError> {
        if body.get("tools").is_none() {
            body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        }
        Tools::take(&mut Fields::new(body.as_object().unwrap().clone()))
    }

    #[test]
    fn choices() {
        for (body, tools, prefix, max_calls) in [
            (json!({}), 1, CallPrefix::None, usize::MAX),
            (json!({"tool_choice": "auto", "parallel_tool_calls": false}), 1, CallPrefix::None, 1),
            (json!({"tool_choice": "none"}), 0, CallPrefix::None, usize::MAX),
            (json!({"tool_choice": "required"}), 1, CallPrefix::AnyFunction, usize::MAX),
            (
                json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
                1,
                CallPrefix::Function("f".into()),
                1,
            ),
            (json!({"tools": [], "tool_choice": "auto"}), 0, CallPrefix::None, usize::MAX),
        ] {
            let taken = take(body.clone()).unwrap();
            assert_eq!((taken.definitions.len(), taken.prefix, taken.max_calls), (tools, prefix, max_calls), "{body}");
        }
    }

    #[test]
    fn a_model_without_tools_refuses_them() {
        let tools = take(json!({})).unwrap();
        assert!(tools.format(None).unwrap_err().body().contains("\"param\":\"tools\""));
        assert_eq!(take(json!({"tools": []})).unwrap().format(None).unwrap(), None);
    }
}
