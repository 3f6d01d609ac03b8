//! Fields of `/v1/responses` and `/v1/messages` for the OpenAPI document: name, JSON types, meaning.

use schemars::{Schema, json_schema};
use serde_json::{Map, Value, json};

/// One field; types are separated by `|`.
pub type Field = (&'static str, &'static str, &'static str);

/// Fields of `/v1/responses`.
pub const RESPONSES: &[Field] = &[
    ("model", "string", "A served name; the first one by default."),
    ("input", "string|array", "A text, or items."),
    ("instructions", "string", "The system's message."),
    ("max_output_tokens", "integer", "Maximum number of tokens to generate."),
    ("temperature", "number", "0 is greedy."),
    ("top_p", "number", "Probability mass that is kept."),
    ("stream", "boolean", "Send events."),
    ("tools", "array", "Functions that the model may call."),
    ("tool_choice", "string|object", "none, auto, required, or a function."),
    ("parallel_tool_calls", "boolean", "False allows one call only."),
    ("text", "object", "format: text, json_object or json_schema."),
    ("reasoning", "object", "effort, as reasoning_effort of chats."),
    ("metadata", "object", "Returned in the response."),
    ("store", "boolean", "Only false: responses are not kept."),
];

/// Fields of `/v1/messages`.
pub const MESSAGES: &[Field] = &[
    ("model", "string", "A served name; the first one by default."),
    ("messages", "array", "The conversation."),
    ("system", "string|array", "The system's message."),
    ("max_tokens", "integer", "Maximum number of tokens to generate."),
    ("temperature", "number", "0 is greedy."),
    ("top_p", "number", "Probability mass that is kept."),
    ("top_k", "integer", "Tokens that are kept."),
    ("stop_sequences", "array", "Strings that end the text."),
    ("stream", "boolean", "Send events."),
    ("tools", "array", "Functions that the model may call."),
    ("tool_choice", "object", "auto, any, none, or a tool."),
    ("thinking", "object", "adaptive, enabled (budget_tokens) or disabled."),
    ("output_config", "object", "format: json_schema; effort."),
    ("metadata", "object", "Has no effect."),
];

/// The schema of these fields. Each of them may also be null, which means absent.
pub fn schema(fields: &[Field]) -> Schema {
    let property = |(name, kinds, description): &Field| {
        let kinds: Vec<&str> = kinds.split('|').chain(["null"]).collect();
        (name.to_string(), json!({"type": kinds, "description": description}))
    };
    let properties: Map<String, Value> = fields.iter().map(property).collect();
    json_schema!({"type": "object", "properties": properties})
}
