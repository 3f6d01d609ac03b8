//! `tools`, `tool_choice` and `parallel_tool_calls`.

use super::schema::conversation::{
    AllowedToolsFields, FunctionFields, NameFields, Parameters, TOOL_CHOICES, ToolChoiceField, ToolFields, ToolMode,
};
use super::schema::values::Object;
use crate::error::{ApiError, truncate_for_error};
use pegainfer_text::dumps;
use pegainfer_text::parser::{CallPrefix, ToolFormat};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The functions that the model may call, and whether it must.
#[derive(Debug, Clone)]
pub struct Tools {
    /// Tool definitions in OpenAI's format: first those that the prompt shows, then deferred ones. Empty without tools,
    /// or if `tool_choice` is `none`.
    pub definitions: Arc<[Value]>,
    /// Number of definitions in the prompt.
    shown: usize,
    /// Beginning of the first call, which is written into the prompt to force the call.
    pub prefix: CallPrefix,
    /// Maximum number of calls.
    pub max_calls: usize,
}

impl Default for Tools {
    fn default() -> Self {
        Self { definitions: Arc::new([]), shown: 0, prefix: CallPrefix::None, max_calls: usize::MAX }
    }
}

impl Tools {
    /// The tools of a request. `parallel` allows more than one call.
    pub fn new(mut definitions: Vec<Definition>, choice: ToolChoice, parallel: bool) -> Result<Self, ApiError> {
        let has = |name: &str| definitions.iter().any(|tool| tool.name() == name);
        let named: &[String] = match &choice {
            ToolChoice::Function(name) => std::slice::from_ref(name),
            ToolChoice::Allowed { names, .. } => names,
            ToolChoice::Auto | ToolChoice::None | ToolChoice::Required => &[],
        };
        if choice.is_forced() && definitions.is_empty() {
            return Err(invalid_choice("tool_choice forces a call: it needs tools"));
        }
        if let Some(name) = named.iter().find(|name| !has(name)) {
            let message = format!("tool_choice names {:?}, which is not among the tools", truncate_for_error(name));
            return Err(invalid_choice(message));
        }
        match &choice {
            ToolChoice::None => definitions.clear(),
            // The prompt hides functions that must not be called.
            ToolChoice::Allowed { names, .. } => {
                definitions.retain(|tool| names.iter().any(|name| tool.name() == name));
            }
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Function(_) => {}
        }
        let prefix = match choice {
            ToolChoice::Function(name) => CallPrefix::Function(name),
            choice if choice.is_forced() => CallPrefix::AnyFunction,
            _ => CallPrefix::None,
        };
        let one = !parallel || matches!(prefix, CallPrefix::Function(_));
        let (shown, deferred): (Vec<_>, Vec<_>) = definitions.into_iter().partition(|tool| !tool.deferred);
        let count = shown.len();
        let definitions = shown.into_iter().chain(deferred).map(|tool| tool.value).collect();
        Ok(Self { definitions, shown: count, prefix, max_calls: if one { 1 } else { usize::MAX } })
    }

    /// The tools of a chat's fields.
    pub fn read(
        tools: Vec<Object<ToolFields>>,
        choice: Option<ToolChoiceField>,
        parallel: bool,
    ) -> Result<Self, ApiError> {
        let tools = tools.into_iter().enumerate();
        let definitions = tools.map(|(i, Object(tool))| definition(i, tool)).collect::<Result<_, _>>()?;
        let choice = choice.map_or(Ok(ToolChoice::Auto), ToolChoice::read)?;
        Self::new(definitions, choice, parallel)
    }

    /// The definitions in the prompt.
    pub fn shown(&self) -> &[Value] {
        &self.definitions[..self.shown]
    }

    /// The model's format of calls, if the request has tools; 400 if the model has no such format.
    pub fn format(&self, model_format: Option<ToolFormat>) -> Result<Option<ToolFormat>, ApiError> {
        match model_format {
            _ if self.definitions.is_empty() => Ok(None),
            Some(format) => Ok(Some(format)),
            None => {
                let message = "this model's chat template does not support tools in a known format";
                Err(ApiError::invalid("tools", message).with_code("unsupported_parameter"))
            }
        }
    }

    /// True if the model is forced to call a function.
    pub fn forced(&self) -> bool {
        self.prefix != CallPrefix::None
    }
}

fn invalid_choice(message: impl Into<String>) -> ApiError {
    ApiError::invalid("tool_choice", message)
}

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// The definition in OpenAI's format, as chat templates expect it.
    pub value: Value,
    /// True if the prompt's list of tools omits it. The conversation tells the model about it later.
    pub deferred: bool,
}

impl Definition {
    /// Checks a function. `at` is the path of its name in the request.
    pub fn new(
        at: &str,
        name: Option<String>,
        description: Option<String>,
        parameters: Option<Map<String, Value>>,
        strict: Option<bool>,
    ) -> Result<Self, ApiError> {
        let Some(name) = name else {
            return Err(ApiError::invalid("tools", format!("{at} is missing or not a string")));
        };
        if !is_function_name(&name) {
            return Err(ApiError::invalid("tools", format!("{at} must be {FUNCTION_NAME}")));
        }
        let mut function = Map::from_iter([("name".to_owned(), Value::from(name))]);
        function.extend(description.map(|text| ("description".to_owned(), text.into())));
        function.extend(parameters.map(|schema| ("parameters".to_owned(), schema.into())));
        function.extend(strict.map(|strict| ("strict".to_owned(), strict.into())));
        Ok(Self { value: json!({"type": "function", "function": function}), deferred: false })
    }

    /// Name of the function.
    pub fn name(&self) -> &str {
        self.value["function"]["name"].as_str().unwrap_or_default()
    }

    /// The definition as text, as prompts show it.
    pub fn text(&self) -> String {
        dumps(&self.value)
    }
}

fn definition(i: usize, tool: ToolFields) -> Result<Definition, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("tools", format!("tools[{i}]{message}")));
    match tool.kind.as_deref() {
        Some("function") => {}
        Some(other) => {
            return invalid(format!(".type {:?} is not supported: only function is", truncate_for_error(other)));
        }
        None => return invalid(".type is missing or not a string".into()),
    }
    let FunctionFields { name, description, parameters, strict } = tool.function.unwrap_or_default().0;
    let parameters = parameters.map(|Parameters(schema)| schema);
    Definition::new(&format!("tools[{i}].function.name"), name, description, parameters, strict)
}

/// The condition of [`is_function_name`] in words, for errors.
const FUNCTION_NAME: &str = "1 to 128 letters, digits, '_', '-', '.', ':' or '/'";

/// True if a function may have this name. Names are written into prompts, between the delimiters of both call formats.
fn is_function_name(name: &str) -> bool {
    (1..=128).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.:/".contains(&b))
}

/// Which tools the model may or must call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// No call.
    None,
    /// At least one call.
    Required,
    /// One call of this function.
    Function(String),
    /// Calls of these functions only.
    Allowed {
        /// Names of the functions.
        names: Vec<String>,
        /// True if at least one call is required.
        required: bool,
    },
}

impl ToolChoice {
    /// True if a call is required.
    fn is_forced(&self) -> bool {
        matches!(self, Self::Required | Self::Function(_) | Self::Allowed { required: true, .. })
    }

    fn read(field: ToolChoiceField) -> Result<Self, ApiError> {
        let malformed = || invalid_choice(format!("tool_choice must be {TOOL_CHOICES}, got an object"));
        let name = |function: Option<Object<NameFields>>| function.and_then(|Object(NameFields { name })| name);
        let choice = match field {
            ToolChoiceField::Text(ToolMode::Auto) => return Ok(Self::Auto),
            ToolChoiceField::Text(ToolMode::None) => return Ok(Self::None),
            ToolChoiceField::Text(ToolMode::Required) => return Ok(Self::Required),
            ToolChoiceField::Other(choice) => choice,
        };
        match (choice.kind.as_deref(), choice.allowed_tools) {
            (Some("function"), _) => name(choice.function).map(Self::Function).ok_or_else(malformed),
            (Some("allowed_tools"), Some(Object(AllowedToolsFields { mode, tools }))) => {
                let tools = tools.unwrap_or_default().into_iter();
                let names = tools.map(|Object(tool)| name(tool.function)).collect::<Option<_>>();
                let required = mode == Some(ToolMode::Required);
                Ok(Self::Allowed { names: names.ok_or_else(malformed)?, required })
            }
            _ => Err(malformed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::Body;
    use crate::api::schema::conversation::ConversationFields;

    fn parse(mut body: Value) -> Result<Tools, ApiError> {
        if body.get("tools").is_none() {
            body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        }
        let text = body.to_string();
        let fields: ConversationFields = Body::parse(text.as_bytes())?.read()?;
        Tools::read(fields.tools.unwrap_or_default(), fields.tool_choice, fields.parallel_tool_calls.unwrap_or(true))
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
            (
                json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                    {"type": "function", "function": {"name": "f"}}]}}}),
                1,
                CallPrefix::AnyFunction,
                usize::MAX,
            ),
            (
                json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
                0,
                CallPrefix::None,
                usize::MAX,
            ),
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
