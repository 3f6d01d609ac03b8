//! The JSON of the Messages API. The order of the fields is the order on the wire.

use crate::api::wire::Usage;
use crate::error::AnthropicError;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A message, complete or at the start of a stream.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Message")]
pub struct Message<'a> {
    /// `msg_` and the id of the request.
    pub id: &'a str,
    /// Always `message`.
    #[schemars(extend("const" = "message"))]
    pub r#type: &'static str,
    /// Always `assistant`.
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    /// Model name that the client used.
    pub model: &'a str,
    /// Content blocks, in the order that the model wrote them.
    pub content: Vec<ContentBlock<'a>>,
    /// Why the message ended.
    #[serde(flatten)]
    pub stop: Stop<'a>,
    /// Token counts.
    pub usage: MessageUsage,
}

/// Why a message ended; both null until the end.
#[derive(Serialize, JsonSchema, Default)]
pub struct Stop<'a> {
    /// `end_turn`, `stop_sequence`, `max_tokens` or `tool_use`.
    pub stop_reason: Option<&'static str>,
    /// The stop sequence that ended the message.
    pub stop_sequence: Option<&'a str>,
}

/// Token counts of a message.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "MessageUsage")]
pub struct MessageUsage {
    /// Prompt tokens that were not found in the prefix cache.
    pub input_tokens: usize,
    /// Always 0: nothing is charged for the cache.
    pub cache_creation_input_tokens: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub cache_read_input_tokens: usize,
    /// Generated tokens.
    pub output_tokens: usize,
}

impl From<&Usage> for MessageUsage {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens - usage.cached_tokens(),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens(),
            output_tokens: usage.completion_tokens,
        }
    }
}

/// A content block, complete or empty at its start.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ContentBlock")]
pub enum ContentBlock<'a> {
    /// Text.
    Text {
        /// The text.
        text: &'a str,
    },
    /// Reasoning.
    Thinking {
        /// The reasoning; empty if the client does not want to see it.
        thinking: &'a str,
        /// Empty at the start of a streamed block.
        signature: String,
    },
    /// A call of a tool.
    ToolUse {
        /// Id of the call.
        id: &'a str,
        /// Name of the tool.
        name: &'a str,
        /// Arguments; empty at the start of a streamed block.
        #[schemars(with = "Map<String, Value>")]
        input: Box<RawValue>,
    },
}

/// An event of a stream.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "MessageEvent")]
pub enum MessageEvent<'a> {
    /// The message begins.
    MessageStart {
        /// The message, without content.
        message: Message<'a>,
    },
    /// A content block begins.
    ContentBlockStart {
        /// Index of the block.
        index: usize,
        /// The block, without content.
        content_block: ContentBlock<'a>,
    },
    /// A content block grows.
    ContentBlockDelta {
        /// Index of the block.
        index: usize,
        /// The new part.
        delta: BlockDelta<'a>,
    },
    /// A content block ends.
    ContentBlockStop {
        /// Index of the block.
        index: usize,
    },
    /// The message ends.
    MessageDelta {
        /// Why it ended.
        delta: Stop<'a>,
        /// Final token counts.
        usage: MessageUsage,
    },
    /// The last event.
    MessageStop,
    /// A keep-alive event.
    Ping,
}

impl MessageEvent<'_> {
    /// The name of the event: its `type`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Ping => "ping",
        }
    }
}

/// The new part of a content block.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
#[schemars(rename = "BlockDelta")]
pub enum BlockDelta<'a> {
    /// More text.
    #[serde(rename = "text_delta")]
    Text {
        /// The text.
        text: &'a str,
    },
    /// More reasoning.
    #[serde(rename = "thinking_delta")]
    Thinking {
        /// The reasoning.
        thinking: &'a str,
    },
    /// More of a call's arguments.
    #[serde(rename = "input_json_delta")]
    InputJson {
        /// The next part of a JSON object.
        partial_json: &'a str,
    },
    /// The signature of the reasoning, at its end.
    #[serde(rename = "signature_delta")]
    Signature {
        /// The signature.
        signature: String,
    },
}

/// Any event of a stream, for the OpenAPI document.
#[derive(JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "MessageStreamEvent")]
#[allow(dead_code, reason = "only its schema is used")]
pub enum StreamEvent {
    /// An event.
    Event(MessageEvent<'static>),
    /// The last event of a stream that failed.
    Error(AnthropicError<'static>),
}

/// The response of `/v1/messages/count_tokens`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TokenCount")]
pub struct TokenCount {
    /// Number of prompt tokens.
    pub input_tokens: usize,
}
