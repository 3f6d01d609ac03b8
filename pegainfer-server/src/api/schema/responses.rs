//! Fields of `/v1/responses`.

use super::conversation::{Effort, Parameters, ToolMode};
use super::forms::{Alternative, TextOr, TextOrList};
use super::numbers::{Count, Int};
use super::structure::JsonSchemaValue;
use super::values::{Object, names};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A conversation to answer, and how.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ResponsesFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// A text, or the items of the conversation.
    #[schemars(required)]
    pub input: Option<TextOrList<Object<ItemFields>>>,
    /// The system prompt.
    pub instructions: Option<String>,
    /// Tools that the model may call; those that OpenAI runs itself are left out.
    pub tools: Option<Vec<Object<ToolFields>>>,
    /// none, auto, required, a tool, or the tools that may be called.
    pub tool_choice: Option<ToolChoiceField>,
    /// False allows one call only.
    pub parallel_tool_calls: Option<bool>,
    /// Form of the text.
    pub text: Option<Object<TextFields>>,
    /// How much to reason, and how to report it.
    pub reasoning: Option<Object<ReasoningFields>>,
    /// Maximum number of tokens to generate; less if the context is full earlier.
    pub max_output_tokens: Option<Count<1>>,
    /// Send events as tokens are generated.
    pub stream: Option<bool>,
    /// Options of a stream.
    pub stream_options: Option<Value>,
    /// Has no effect: responses are not stored.
    pub store: Option<bool>,
    /// Has no effect: its items do not exist here, or are always in the response.
    pub include: Option<Vec<String>>,
    /// Has no effect: a prompt that is too long is an error.
    pub truncation: Option<Truncation>,
    /// Has no effect: log-probabilities are not reported.
    pub top_logprobs: Option<Int<0, 20>>,
    /// Has no effect: OpenAI's own tools are left out.
    pub max_tool_calls: Option<Value>,
    /// Has no effect.
    pub service_tier: Option<String>,
    /// Repeated in the response.
    pub metadata: Option<Value>,
    /// Not implemented: responses are not stored.
    pub previous_response_id: Option<String>,
    /// Not implemented: conversations are not stored.
    pub conversation: Option<Value>,
    /// Only false.
    pub background: Option<bool>,
    /// Not implemented: prompts are not stored.
    pub prompt: Option<Value>,
    /// Arguments of the chat template, such as enable_thinking.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

names! {
    /// `truncation`.
    Truncation {
        /// Leave out items that do not fit.
        Auto = "auto",
        /// An error if they do not fit.
        Disabled = "disabled",
    }
}

/// An item of the conversation: which fields it has depends on its type.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"role": "user", "content": "Hello!"}))]
pub struct ItemFields {
    /// The type, message by default; items of OpenAI's own tools are left out, other types are refused by name.
    #[serde(rename = "type")]
    #[schemars(extend("examples" = [
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "tool_search_call", "tool_search_output", "additional_tools", "web_search_call",
    ]))]
    pub kind: Option<String>,
    /// Author of a message.
    #[schemars(extend("enum" = ["user", "assistant", "system", "developer"]))]
    pub role: Option<String>,
    /// Content of a message, or of reasoning.
    pub content: Option<TextOrList<Object<PartFields>>>,
    /// Summary of reasoning; used if there is no content.
    pub summary: Option<Vec<Object<PartFields>>>,
    /// Has no effect: reasoning is not encrypted.
    pub encrypted_content: Option<String>,
    /// Has no effect.
    pub id: Option<String>,
    /// Has no effect.
    pub status: Option<String>,
    /// Has no effect.
    pub phase: Option<String>,
    /// Id of a call and of its output.
    pub call_id: Option<String>,
    /// Name of the tool of a call.
    pub name: Option<String>,
    /// Namespace of the tool of a call.
    pub namespace: Option<String>,
    /// Arguments of a call: the text of an object, maybe cut off, or the object.
    pub arguments: Option<Value>,
    /// Input of a custom tool's call.
    pub input: Option<String>,
    /// Output of a call.
    pub output: Option<TextOrList<Object<PartFields>>>,
    /// Has no effect: searches are the client's.
    pub execution: Option<String>,
    /// Tools that a search has found, or that the request has besides those of its field `tools`.
    pub tools: Option<Vec<Object<ToolFields>>>,
}

/// A part of a content.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "input_text", "text": "Hello!"}))]
pub struct PartFields {
    /// The type; files are refused by name, or replaced by a note in the output of a call, and so are images if the model
    /// does not read them.
    #[serde(rename = "type")]
    #[schemars(required, extend("examples" = [
        "input_text", "input_image", "output_text", "text", "reasoning_text", "summary_text", "refusal",
    ]))]
    pub kind: Option<String>,
    /// The text.
    pub text: Option<String>,
    /// The text of a refusal.
    pub refusal: Option<String>,
    /// The image of an input_image: a data URL in base64 of a PNG, JPEG, WebP or GIF file.
    pub image_url: Option<String>,
    /// How many tokens the image may have: low at most 256, others as many as the server allows.
    #[schemars(extend("enum" = ["low", "high", "auto", "original", null]))]
    pub detail: Option<String>,
    /// Not implemented: files are not stored.
    #[schemars(with = "()")]
    pub file_id: Option<Value>,
    /// Has no effect.
    pub annotations: Option<Value>,
    /// Has no effect.
    pub logprobs: Option<Value>,
}

/// A tool.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "function", "name": "get_weather"}))]
pub struct ToolFields {
    /// The type; others than the examples are left out.
    #[serde(rename = "type")]
    #[schemars(required, extend("examples" = ["function", "custom", "namespace", "tool_search"]))]
    pub kind: Option<String>,
    /// Name of the tool.
    pub name: Option<String>,
    /// Description of the tool, for the model.
    pub description: Option<String>,
    /// JSON schema of a function's arguments.
    pub parameters: Option<Parameters>,
    /// True if a forced call's arguments must satisfy the whole schema.
    pub strict: Option<bool>,
    /// True leaves a function out of the prompt until a search finds it.
    pub defer_loading: Option<bool>,
    /// Form of a custom tool's input.
    pub format: Option<Object<InputFormatFields>>,
    /// Tools of a namespace.
    pub tools: Option<Vec<Object<NamespacedToolFields>>>,
    /// Only client, for tool_search.
    pub execution: Option<String>,
}

/// A function or custom tool of a namespace.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "function", "name": "get_weather"}))]
pub struct NamespacedToolFields {
    /// The type, function by default; others than the examples are left out.
    #[serde(rename = "type")]
    #[schemars(extend("examples" = ["function", "custom"]))]
    pub kind: Option<String>,
    /// Name of the tool.
    pub name: Option<String>,
    /// Description of the tool, for the model.
    pub description: Option<String>,
    /// JSON schema of a function's arguments.
    pub parameters: Option<Parameters>,
    /// Form of a custom tool's input.
    pub format: Option<Object<InputFormatFields>>,
    /// True if a forced call's arguments must satisfy the whole schema.
    pub strict: Option<bool>,
    /// True leaves the tool out of the prompt until a search finds it.
    pub defer_loading: Option<bool>,
}

/// Form of a custom tool's input.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct InputFormatFields {
    /// text or grammar.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// lark or regex.
    pub syntax: Option<String>,
    /// The grammar, or the regular expression.
    pub definition: Option<String>,
}

/// `tool_choice`.
pub type ToolChoiceField = TextOr<NamedChoiceFields, ToolMode>;

impl Alternative for NamedChoiceFields {
    const FORMS: &'static str = TOOL_CHOICES;
    const IS_LIST: bool = false;
}

/// A tool that has to be called, or the tools that may be called.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "function", "name": "get_weather"}))]
pub struct NamedChoiceFields {
    /// Kind of choice.
    #[serde(rename = "type")]
    #[schemars(required, extend("enum" = ["function", "custom", "allowed_tools"]))]
    pub kind: Option<String>,
    /// The tool that has to be called.
    pub name: Option<String>,
    /// Namespace of the tool.
    pub namespace: Option<String>,
    /// auto or required, for allowed_tools.
    pub mode: Option<ToolMode>,
    /// The tools that may be called.
    pub tools: Option<Vec<Object<AllowedToolFields>>>,
}

/// A tool that may be called.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "function", "name": "get_weather"}))]
pub struct AllowedToolFields {
    /// function, custom, ..
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Name of the tool.
    pub name: Option<String>,
    /// Namespace of the tool.
    pub namespace: Option<String>,
}

/// The forms of `tool_choice` in words, for errors.
pub const TOOL_CHOICES: &str = "none, auto, required, {\"type\": \"function\", \"name\": …}, {\"type\": \"custom\", \
    \"name\": …} or {\"type\": \"allowed_tools\", \"mode\": …, \"tools\": […]}";

/// `text`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct TextFields {
    /// Structure of the text.
    pub format: Option<Object<FormatFields>>,
    /// Has no effect.
    pub verbosity: Option<Verbosity>,
}

names! {
    /// How much to say.
    Verbosity {
        /// Little.
        Low = "low",
        /// The usual.
        Medium = "medium",
        /// Much.
        High = "high",
    }
}

/// Structure of the text.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct FormatFields {
    /// text, json_object or json_schema.
    #[serde(rename = "type")]
    #[schemars(required)]
    pub kind: Option<FormatKind>,
    /// Has no effect.
    pub name: Option<String>,
    /// Has no effect.
    pub description: Option<String>,
    /// The text always satisfies the schema.
    pub strict: Option<bool>,
    /// The schema.
    pub schema: Option<JsonSchemaValue>,
}

names! {
    /// Kind of structure.
    FormatKind {
        /// Any text.
        Text = "text",
        /// Any JSON object.
        JsonObject = "json_object",
        /// JSON that satisfies a schema.
        JsonSchema = "json_schema",
    }
}

/// `reasoning`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ReasoningFields {
    /// How much to reason; the chat template defines what it does.
    pub effort: Option<Effort>,
    /// Send the reasoning as a summary; it is the whole reasoning.
    pub summary: Option<Summary>,
    /// The older name of summary.
    pub generate_summary: Option<Summary>,
}

names! {
    /// How to summarise the reasoning.
    Summary {
        /// The server decides.
        Auto = "auto",
        /// Briefly.
        Concise = "concise",
        /// At length.
        Detailed = "detailed",
        /// Not at all.
        None = "none",
    }
}
