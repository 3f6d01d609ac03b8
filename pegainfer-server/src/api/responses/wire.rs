//! The JSON of the Responses API. The order of the fields is the order on the wire.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A list that is always empty.
pub type Empty = [Value; 0];

/// A response, complete or growing.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Response")]
pub struct ResponseObject<'a> {
    /// `resp_` and the id of the request.
    pub id: String,
    /// Always `response`.
    #[schemars(extend("const" = "response"))]
    pub object: &'static str,
    /// Unix time.
    pub created_at: u64,
    /// Status of the response.
    pub status: Status,
    /// Why it failed.
    pub error: Option<Failure<'a>>,
    /// Why it is incomplete.
    pub incomplete_details: Option<IncompleteDetails>,
    /// Model name that the client used.
    pub model: &'a str,
    /// The output; empty until the response has ended.
    pub output: Vec<OutputItem<'a>>,
    /// Always null: no response is stored.
    pub previous_response_id: Option<&'static str>,
    /// Always false: no response is stored.
    pub store: bool,
    /// Always `disabled`.
    pub truncation: &'static str,
    /// Token counts; null until the response has ended.
    pub usage: Option<ResponseUsage>,
    /// Fields of the request.
    #[serde(flatten)]
    pub repeated: &'a Repeated,
}

/// Status of a response or of one of its items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Status {
    /// It grows.
    InProgress,
    /// It is whole.
    Completed,
    /// It was cut off.
    Incomplete,
    /// An error ended it.
    Failed,
}

/// Why a response failed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ResponseFailure")]
pub struct Failure<'a> {
    /// `server_error` or `invalid_prompt`.
    pub code: &'static str,
    /// One sentence.
    pub message: &'a str,
}

/// Why a response is incomplete.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IncompleteDetails")]
pub struct IncompleteDetails {
    /// Always `max_output_tokens`.
    pub reason: &'static str,
}

/// Token counts of a response.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ResponseUsage")]
pub struct ResponseUsage {
    /// Prompt tokens.
    pub input_tokens: usize,
    /// Details of the prompt tokens.
    pub input_tokens_details: InputDetails,
    /// Generated tokens.
    pub output_tokens: usize,
    /// Details of the generated tokens.
    pub output_tokens_details: OutputDetails,
    /// Prompt and generated tokens together.
    pub total_tokens: usize,
}

/// Details of the prompt tokens.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "InputTokenDetails")]
pub struct InputDetails {
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: usize,
}

/// Details of the generated tokens.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OutputTokenDetails")]
pub struct OutputDetails {
    /// Generated tokens of reasoning.
    pub reasoning_tokens: usize,
}

/// Request fields that a response repeats, or their defaults.
#[derive(Default, Serialize, JsonSchema)]
pub struct Repeated {
    /// The system prompt.
    pub instructions: Value,
    /// Maximum number of tokens.
    pub max_output_tokens: Value,
    /// True if the model may call several tools at once.
    pub parallel_tool_calls: Value,
    /// How much to reason.
    pub reasoning: Value,
    /// Temperature.
    pub temperature: Value,
    /// Tools that the model may call.
    pub tools: Value,
    /// Nucleus sampling.
    pub top_p: Value,
    /// The client's notes.
    pub metadata: Value,
    /// Format of the text.
    pub text: Value,
    /// The request's choice of tools.
    pub tool_choice: Value,
}

/// An item of the output.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "OutputItem")]
pub enum OutputItem<'a> {
    /// Text for the user.
    Message {
        /// Id of the item.
        id: &'a str,
        /// Always `message`.
        #[schemars(extend("const" = "message"))]
        r#type: &'static str,
        /// Status of the item.
        status: Status,
        /// Always `assistant`.
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        /// The text; empty at the start of a streamed item.
        content: Vec<ContentPart<'a>>,
    },
    /// Reasoning, as a summary.
    Summary {
        /// Id of the item.
        id: &'a str,
        /// Always `reasoning`.
        #[schemars(extend("const" = "reasoning"))]
        r#type: &'static str,
        /// Status of the item.
        status: Status,
        /// The whole reasoning; empty at the start of a streamed item.
        summary: Vec<ContentPart<'a>>,
        /// Always null.
        encrypted_content: Option<&'static str>,
    },
    /// Reasoning, as it is.
    Reasoning {
        /// Id of the item.
        id: &'a str,
        /// Always `reasoning`.
        #[schemars(extend("const" = "reasoning"))]
        r#type: &'static str,
        /// Status of the item.
        status: Status,
        /// Always empty.
        summary: Empty,
        /// The reasoning; empty at the start of a streamed item.
        content: Vec<ContentPart<'a>>,
    },
    /// A call of a tool.
    Call {
        /// Id of the item.
        id: &'a str,
        /// Status of the item: incomplete if the model's turn ended inside the call.
        status: Status,
        /// Id of the call.
        call_id: &'a str,
        /// The called tool.
        #[serde(flatten)]
        call: Call<'a>,
    },
}

/// The called tool.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
#[schemars(inline)]
pub enum Call<'a> {
    /// A function.
    #[serde(rename = "function_call")]
    Function {
        /// Name of the function.
        name: &'a str,
        /// Its namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        /// The text of a JSON object; empty at the start of a streamed item.
        arguments: &'a str,
    },
    /// A tool that takes a text.
    #[serde(rename = "custom_tool_call")]
    Custom {
        /// Name of the tool.
        name: &'a str,
        /// Its namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        /// Its input; empty at the start of a streamed item.
        input: String,
    },
    /// A search for tools.
    #[serde(rename = "tool_search_call")]
    ToolSearch {
        /// Always `client`.
        #[schemars(extend("const" = "client"))]
        execution: &'static str,
        /// The search; empty at the start of a streamed item.
        #[schemars(with = "Map<String, Value>")]
        arguments: Box<RawValue>,
    },
}

/// A part of an item's content.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type")]
#[schemars(rename = "OutputPart")]
pub enum ContentPart<'a> {
    /// Text for the user.
    #[serde(rename = "output_text")]
    Output {
        /// The text.
        text: &'a str,
        /// Always empty.
        annotations: Empty,
        /// Always empty.
        logprobs: Empty,
    },
    /// Reasoning.
    #[serde(rename = "reasoning_text")]
    Reasoning {
        /// The reasoning.
        text: &'a str,
    },
    /// Reasoning, as a summary.
    #[serde(rename = "summary_text")]
    Summary {
        /// The reasoning.
        text: &'a str,
    },
}
