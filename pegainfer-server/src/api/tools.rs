//! `tools`, `tool_choice` and `parallel_tool_calls`.

use super::fields::{Fields, describe};
use crate::error::{ApiError, truncate_for_error};
use crate::text::parser::{CallPrefix, ToolFormat};
use serde_json::Value;

/// Maximum length of a function's name, in bytes.
const MAX_NAME: usize = 128;

/// The functions that the model may call, and whether it has to.
#[derive(Debug)]
pub struct Tools {
    /// Tool definitions in OpenAI's format. Empty if there are none, or if `tool_choice` is `none`.
    pub definitions: Vec<Value>,
    /// Beginning of the first call that is written into the prompt, to force the call.
    pub prefix: CallPrefix,
    /// Maximum number of calls.
    pub max_calls: usize,
}

impl Tools {
    /// Parses the three fields.
    pub fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut definitions = fields.list("tools")?.unwrap_or_default();
        for (i, tool) in definitions.iter().enumerate() {
            check(i, tool)?;
        }
        let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        let prefix = match fields.remove("tool_choice") {
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
                let message = format!("tool_choice names {:?}, which is not among the tools", truncate_for_error(name));
                return Err(invalid_choice(message));
            }
            CallPrefix::AnyFunction | CallPrefix::Function(_) => {}
        }
        let one = !parallel || matches!(prefix, CallPrefix::Function(_));
        Ok(Self { definitions, prefix, max_calls: if one { 1 } else { usize::MAX } })
    }

    /// The model's format of calls, if the request has tools; 400 if the model has none.
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

    /// Whether the model is forced to call a function.
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
        Some(other) => {
            return invalid(format!(".type {:?} is not supported: only function is", truncate_for_error(other)));
        }
        None => return invalid(".type is missing or not a string".into()),
    }
    let function = &tool["function"];
    // The name is written into prompts, between the delimiters of both call formats.
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

    fn parse(mut body: Value) -> Result<Tools, ApiError> {
        if body.get("tools").is_none() {
            body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        }
        Tools::parse(&mut Fields::new(body.as_object().unwrap().clone()))
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
            let taken = parse(body.clone()).unwrap();
            assert_eq!((taken.definitions.len(), taken.prefix, taken.max_calls), (tools, prefix, max_calls), "{body}");
        }
    }

    #[test]
    fn a_model_without_tools_refuses_them() {
        let tools = parse(json!({})).unwrap();
        assert!(tools.format(None).unwrap_err().body().contains("\"param\":\"tools\""));
        assert_eq!(parse(json!({"tools": []})).unwrap().format(None).unwrap(), None);
    }
}
