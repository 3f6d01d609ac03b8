//! Fields of `/v1/messages` and `/v1/messages/count_tokens`.

use super::forms::TextOrList;
use super::numbers::Count;
use super::structure::JsonSchemaValue;
use super::values::{Object, Text, names};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A message to answer, or to count the tokens of.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct MessagesFields {
    /// A served name; the first one by default.
    pub model: Option<String>,
    /// The conversation. A last message of the assistant is continued.
    #[schemars(required, length(min = 1))]
    pub messages: Option<Vec<Object<TurnFields>>>,
    /// The system prompt.
    pub system: Option<TextOrList<Object<BlockFields>>>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Object<ToolFields>>>,
    /// Whether the model may or must call tools.
    pub tool_choice: Option<Object<ToolChoiceFields>>,
    /// Switches reasoning on; off by default.
    pub thinking: Option<Object<ThinkingFields>>,
    /// Structure of the output, and effort.
    pub output_config: Option<Object<OutputConfigFields>>,
    /// The older form of output_config.format.
    pub output_format: Option<Object<FormatFields>>,
    /// Edits of the conversation; they are not applied.
    pub context_management: Option<Object<ContextManagementFields>>,
    /// Only an empty list: MCP servers are the client's affair.
    #[schemars(length(max = 0))]
    pub mcp_servers: Option<Vec<Value>>,
    /// Not implemented.
    pub container: Option<Value>,
    /// Has no effect: prefixes are always cached.
    pub cache_control: Option<Value>,
    /// Has no effect.
    pub metadata: Option<Value>,
    /// Arguments of the chat template, such as enable_thinking.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// How to answer a message.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct AnswerFields {
    /// Maximum number of tokens to generate; less if the context is full earlier.
    #[schemars(required)]
    pub max_tokens: Option<Count<1>>,
    /// Strings that end the text, at most 16.
    pub stop_sequences: Option<Vec<Text>>,
    /// Send events as tokens are generated.
    pub stream: Option<bool>,
    /// Has no effect.
    pub service_tier: Option<ServiceTier>,
}

names! {
    /// `service_tier`.
    ServiceTier {
        /// The server decides.
        Auto = "auto",
        /// Only the ordinary one.
        StandardOnly = "standard_only",
    }
}

/// One turn of the conversation.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct TurnFields {
    /// The author.
    #[schemars(required)]
    pub role: Option<Role>,
    /// The content.
    #[schemars(required)]
    pub content: Option<TextOrList<Object<BlockFields>>>,
}

names! {
    /// The author of a turn.
    Role {
        /// The user.
        User = "user",
        /// The model.
        Assistant = "assistant",
        /// The operator, in the middle of a conversation.
        System = "system",
    }
}

/// A block of content: which fields it has depends on its type.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "text", "text": "Hello!"}))]
pub struct BlockFields {
    /// The type; others than the examples are refused by name or left out.
    #[serde(rename = "type")]
    #[schemars(required, extend("examples" = [
        "text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result", "search_result", "document",
    ]))]
    pub kind: Option<String>,
    /// The text of a text.
    pub text: Option<String>,
    /// The text of a thinking block.
    pub thinking: Option<String>,
    /// The reasoning of a thinking block without text.
    pub signature: Option<String>,
    /// Has no effect: the data of redacted reasoning cannot be read.
    pub data: Option<String>,
    /// Id of a tool_use.
    pub id: Option<String>,
    /// Name of the tool of a tool_use.
    pub name: Option<String>,
    /// Arguments of a tool_use: an object, or the text of one that was cut off.
    pub input: Option<Value>,
    /// Has no effect: who called the tool.
    pub caller: Option<Value>,
    /// The call that a tool_result answers.
    pub tool_use_id: Option<String>,
    /// Content of a tool_result, or of a search_result.
    pub content: Option<Value>,
    /// True if the call failed.
    pub is_error: Option<bool>,
    /// The tool that a tool_reference shows to the model.
    pub tool_name: Option<String>,
    /// Source of an image, a document or a search_result.
    pub source: Option<Value>,
    /// Title of a document or a search_result.
    pub title: Option<String>,
    /// Context of a document.
    pub context: Option<String>,
    /// Has no effect.
    pub citations: Option<Value>,
    /// Has no effect: prefixes are always cached.
    pub cache_control: Option<Value>,
}

/// A tool.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"name": "get_weather", "input_schema": {"type": "object"}}))]
pub struct ToolFields {
    /// The type; tools that Anthropic runs itself, such as web_search_20250305, are left out, others are refused by
    /// name.
    #[serde(rename = "type")]
    #[schemars(extend("examples" = ["custom", "web_search_20250305"]))]
    pub kind: Option<String>,
    /// Name of the tool.
    #[schemars(required)]
    pub name: Option<String>,
    /// Description of the tool, for the model.
    pub description: Option<String>,
    /// JSON schema of the input.
    pub input_schema: Option<Map<String, Value>>,
    /// True if a forced call's input must satisfy the whole schema.
    pub strict: Option<bool>,
    /// True leaves the tool out of the prompt until a tool_reference names it.
    pub defer_loading: Option<bool>,
    /// Has no effect: prefixes are always cached.
    pub cache_control: Option<Value>,
    /// Has no effect: inputs are always streamed.
    pub eager_input_streaming: Option<bool>,
    /// Settings of a tool that Anthropic runs itself.
    pub max_uses: Option<Value>,
}

/// `tool_choice`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "tool", "name": "get_weather"}))]
pub struct ToolChoiceFields {
    /// auto, any, none or tool.
    #[serde(rename = "type")]
    #[schemars(required)]
    pub kind: Option<ChoiceKind>,
    /// The tool that has to be called.
    pub name: Option<String>,
    /// True allows one call only.
    pub disable_parallel_tool_use: Option<bool>,
}

names! {
    /// Whether the model may or must call tools.
    ChoiceKind {
        /// The model decides.
        Auto = "auto",
        /// At least one call.
        Any = "any",
        /// No call.
        None = "none",
        /// This tool.
        Tool = "tool",
    }
}

/// `thinking`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[schemars(example = json!({"type": "enabled"}))]
pub struct ThinkingFields {
    /// adaptive, enabled or disabled.
    #[serde(rename = "type")]
    #[schemars(required)]
    pub kind: Option<ThinkingKind>,
    /// Maximum number of reasoning tokens; needs type enabled.
    pub budget_tokens: Option<Count<0>>,
    /// Whether the reasoning is sent. Other values have no effect.
    #[schemars(with = "Option<ThinkingDisplay>")]
    pub display: Option<String>,
}

names! {
    /// Whether and how the model reasons.
    ThinkingKind {
        /// The model decides how much.
        Adaptive = "adaptive",
        /// Yes.
        Enabled = "enabled",
        /// No.
        Disabled = "disabled",
    }
}

names! {
    /// Whether the client sees the reasoning.
    ThinkingDisplay {
        /// All of it, as without the field: no other model could summarise it.
        Summarized = "summarized",
        /// None of it; the signature contains it.
        Omitted = "omitted",
    }
}

/// `output_config`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct OutputConfigFields {
    /// Structure of the output.
    pub format: Option<Object<FormatFields>>,
    /// How much to reason; the chat template defines what it does.
    pub effort: Option<super::conversation::Effort>,
}

/// Structure of the output.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct FormatFields {
    /// json_schema.
    #[serde(rename = "type")]
    #[schemars(required)]
    pub kind: Option<FormatKind>,
    /// The schema.
    #[schemars(required)]
    pub schema: Option<JsonSchemaValue>,
}

names! {
    /// Kind of structure.
    FormatKind {
        /// JSON that satisfies a schema.
        JsonSchema = "json_schema",
    }
}

/// `context_management`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub struct ContextManagementFields {
    /// The edits.
    pub edits: Option<Vec<Value>>,
}
