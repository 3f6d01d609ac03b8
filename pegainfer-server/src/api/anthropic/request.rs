//! Translates a body of `/v1/messages` into a chat request. Fields that both APIs share are passed through.

use super::super::fields::{Fields, describe};
use super::history;
use crate::error::{ApiError, truncate_for_error};
use serde_json::{Map, Value, json};

/// Chat-completion fields that `/v1/messages` expresses differently or does not have.
const CHAT_ONLY: [&str; 18] = [
    "best_of",
    "chat_template_kwargs",
    "functions",
    "function_call",
    "include_metrics",
    "include_reasoning",
    "logprobs",
    "max_completion_tokens",
    "n",
    "parallel_tool_calls",
    "prompt_logprobs",
    "reasoning_effort",
    "response_format",
    "return_token_ids",
    "stop",
    "stream_options",
    "top_logprobs",
    "truncate_prompt_tokens",
];
/// Fields of Anthropic's API that are not implemented.
const UNIMPLEMENTED: [&str; 8] = [
    "container",
    "context_management",
    "diagnostics",
    "inference_geo",
    "mcp_servers",
    "speed",
    "user_profile_id",
    "workspace_id",
];
/// Pairs of a chat-completion field and this API's name for it, for error messages.
const NAMES: [(&str, &str); 5] = [
    ("stop", "stop_sequences"),
    ("response_format", "output_config"),
    ("reasoning_effort", "output_config"),
    ("chat_template_kwargs", "thinking"),
    ("thinking_token_budget", "thinking.budget_tokens"),
];

/// Rewrites an error about a chat-completion field in this API's field names.
pub fn rename(error: ApiError) -> ApiError {
    NAMES.iter().fold(error, |error, (from, to)| error.renamed(from, to))
}

/// Translates a body. `generates`: the request generates tokens; otherwise it only counts those of its prompt.
pub fn chat(mut fields: Fields, generates: bool) -> Result<Fields, ApiError> {
    if let Some(name) = CHAT_ONLY.iter().chain(&UNIMPLEMENTED).find(|name| fields.has(name)) {
        let message = format!("{name} is not implemented by this endpoint");
        return Err(ApiError::invalid(name, message).with_code("unsupported_parameter"));
    }
    if generates && !fields.has("max_tokens") {
        return Err(ApiError::invalid("max_tokens", "max_tokens is missing"));
    }
    // Prefixes are cached whether or not the client asks for it.
    fields.remove("cache_control");
    let mut chat = Map::new();
    chat.insert("messages".into(), history::parse(&mut fields)?.into());
    if let Some(tools) = fields.list("tools")? {
        let tools: Vec<Value> = tools.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?;
        chat.insert("tools".into(), tools.into());
    }
    if let Some(choice) = fields.object("tool_choice")? {
        tool_choice(choice, &mut chat)?;
    }
    if let Some(stops) = fields.list("stop_sequences")? {
        chat.insert("stop".into(), stops.into());
    }
    if let Some(thinking) = fields.object("thinking")? {
        think(thinking, &mut chat)?;
    }
    if let Some(config) = fields.object("output_config")? {
        output_config(config, &mut chat)?;
    }
    match fields.string("service_tier")?.as_deref() {
        None | Some("auto" | "standard_only") => {}
        Some(other) => {
            let message = format!(
                "service_tier {:?} is not implemented: only auto and standard_only are",
                truncate_for_error(other)
            );
            return Err(ApiError::invalid("service_tier", message));
        }
    }
    let mut rest = fields.rest();
    // A stream always reports its token counts.
    if rest.get("stream") == Some(&json!(true)) {
        rest.insert("stream_options".into(), json!({"include_usage": true, "continuous_usage_stats": true}));
    }
    chat.extend(rest);
    Ok(Fields::new(chat))
}

/// Translates `{"name", "description", "input_schema"}`. Tools that a vendor runs itself have another type and are refused.
fn tool((i, tool): (usize, Value)) -> Result<Value, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("tools", format!("tools[{i}]{message}")));
    let Value::Object(mut tool) = tool else { return invalid(format!(" must be an object, got {}", describe(&tool))) };
    match tool.get("type").and_then(Value::as_str) {
        None | Some("custom") => {}
        Some(other) => {
            return invalid(format!(".type {:?} is not supported: only custom is", truncate_for_error(other)));
        }
    }
    let Some(schema) = tool.remove("input_schema") else { return invalid(".input_schema is missing".into()) };
    let mut function = Map::from_iter([("name".to_string(), tool.remove("name").unwrap_or_default())]);
    for name in ["description", "strict"] {
        function.extend(tool.remove(name).filter(|value| !value.is_null()).map(|value| (name.to_string(), value)));
    }
    function.insert("parameters".into(), schema);
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(choice: Map<String, Value>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut choice = Fields::new(choice);
    let (kind, name) = (choice.string("type")?, choice.string("name")?);
    let translated = match (kind.as_deref(), name) {
        (Some("auto"), None) => json!("auto"),
        (Some("none"), None) => json!("none"),
        (Some("any"), None) => json!("required"),
        (Some("tool"), Some(name)) => json!({"type": "function", "function": {"name": name}}),
        _ => {
            let message = "tool_choice.type must be auto, any, none, or tool with a name";
            return Err(ApiError::invalid("tool_choice", message));
        }
    };
    chat.insert("tool_choice".into(), translated);
    if choice.bool("disable_parallel_tool_use")?.unwrap_or(false) {
        chat.insert("parallel_tool_calls".into(), false.into());
    }
    Ok(())
}

/// `thinking`: whether the model reasons, and its token budget.
fn think(thinking: Map<String, Value>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut thinking = Fields::new(thinking);
    let budget = thinking.remove("budget_tokens");
    let reason = match (thinking.string("type")?.as_deref(), &budget) {
        (Some("enabled"), _) | (Some("adaptive"), None) => true,
        (Some("disabled"), None) => false,
        (Some("adaptive" | "disabled"), Some(_)) => {
            let message = "thinking.budget_tokens needs thinking.type \"enabled\"";
            return Err(ApiError::invalid("thinking", message));
        }
        _ => return Err(ApiError::invalid("thinking", "thinking.type must be adaptive, enabled or disabled")),
    };
    chat.insert("chat_template_kwargs".into(), json!({"enable_thinking": reason}));
    chat.extend(budget.map(|budget| ("thinking_token_budget".to_string(), budget)));
    Ok(())
}

fn output_config(config: Map<String, Value>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut config = Fields::new(config);
    if let Some(mut format) = config.object("format")? {
        let schema = format.remove("schema").filter(|_| format.get("type") == Some(&json!("json_schema")));
        let Some(schema) = schema else {
            let message = "output_config.format must be {\"type\": \"json_schema\", \"schema\": …}";
            return Err(ApiError::invalid("output_config", message));
        };
        let inner = json!({"name": "output", "schema": schema});
        chat.insert("response_format".into(), json!({"type": "json_schema", "json_schema": inner}));
    }
    chat.extend(config.remove("effort").map(|effort| ("reasoning_effort".to_string(), effort)));
    match config.rest().keys().next() {
        Some(name) => {
            let message = format!("output_config.{} is not implemented", truncate_for_error(name));
            Err(ApiError::invalid("output_config", message).with_code("unsupported_parameter"))
        }
        None => Ok(()),
    }
}
