//! Events of a streamed response. The order of the fields is the order on the wire.

use super::wire::{ContentPart, Empty, OutputItem, ResponseObject};
use crate::error::ErrorEvent;
use schemars::JsonSchema;
use serde::Serialize;

/// Defines the events with their names, which are the values of their field `type`.
macro_rules! events {
    ($($(#[$doc:meta])* $variant:ident($body:ident) = $name:literal),+ $(,)?) => {
        /// An event of a stream.
        #[derive(Serialize, JsonSchema)]
        #[serde(tag = "type")]
        #[schemars(rename = "ResponseEvent")]
        pub enum ResponseEvent<'a> {
            $($(#[$doc])* #[serde(rename = $name)] $variant($body<'a>)),+
        }

        impl ResponseEvent<'_> {
            /// The name of the event: its `type`.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name),+
                }
            }
        }
    };
}

events! {
    /// The response begins.
    Created(ResponseUpdate) = "response.created",
    /// The response grows.
    InProgress(ResponseUpdate) = "response.in_progress",
    /// The response is whole.
    Completed(ResponseUpdate) = "response.completed",
    /// The response was cut off.
    Incomplete(ResponseUpdate) = "response.incomplete",
    /// The response failed.
    Failed(ResponseUpdate) = "response.failed",
    /// An item begins.
    ItemAdded(ItemUpdate) = "response.output_item.added",
    /// An item ends.
    ItemDone(ItemUpdate) = "response.output_item.done",
    /// The content of an item begins.
    PartAdded(PartUpdate) = "response.content_part.added",
    /// The content of an item ends.
    PartDone(PartUpdate) = "response.content_part.done",
    /// The summary of reasoning begins.
    SummaryPartAdded(PartUpdate) = "response.reasoning_summary_part.added",
    /// The summary of reasoning ends.
    SummaryPartDone(PartUpdate) = "response.reasoning_summary_part.done",
    /// More text.
    TextDelta(Delta) = "response.output_text.delta",
    /// The whole text.
    TextDone(TextDone) = "response.output_text.done",
    /// More reasoning.
    ReasoningDelta(Delta) = "response.reasoning_text.delta",
    /// The whole reasoning.
    ReasoningDone(TextDone) = "response.reasoning_text.done",
    /// More of the summary.
    SummaryDelta(Delta) = "response.reasoning_summary_text.delta",
    /// The whole summary.
    SummaryDone(TextDone) = "response.reasoning_summary_text.done",
    /// More of a call's arguments.
    ArgumentsDelta(Delta) = "response.function_call_arguments.delta",
    /// The whole arguments of a call.
    ArgumentsDone(ArgumentsDone) = "response.function_call_arguments.done",
    /// The input of a custom tool.
    InputDelta(Delta) = "response.custom_tool_call_input.delta",
    /// The whole input of a custom tool.
    InputDone(InputDone) = "response.custom_tool_call_input.done",
}

/// An event about the response.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct ResponseUpdate<'a> {
    /// Number of the event, from 0.
    pub sequence_number: usize,
    /// The response.
    pub response: ResponseObject<'a>,
}

/// An event about an item.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct ItemUpdate<'a> {
    /// Number of the event, from 0.
    pub sequence_number: usize,
    /// Index of the item.
    pub output_index: usize,
    /// The item.
    pub item: OutputItem<'a>,
}

/// Place of an event in the output.
#[derive(Serialize, JsonSchema, Clone, Copy)]
#[schemars(inline)]
pub struct EventPlace<'a> {
    /// Number of the event, from 0.
    pub sequence_number: usize,
    /// Id of the item.
    pub item_id: &'a str,
    /// Index of the item.
    pub output_index: usize,
    /// Index of the summary's part, which is the only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary_index: Option<usize>,
    /// Index of the content's part, which is the only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<usize>,
}

/// An event about a part of an item's content.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct PartUpdate<'a> {
    /// Place of the event.
    #[serde(flatten)]
    pub place: EventPlace<'a>,
    /// The part.
    pub part: ContentPart<'a>,
}

/// More of a text.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct Delta<'a> {
    /// Place of the event.
    #[serde(flatten)]
    pub place: EventPlace<'a>,
    /// The new part.
    pub delta: &'a str,
    /// Empty for text, else left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Empty>,
}

/// A whole text.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct TextDone<'a> {
    /// Place of the event.
    #[serde(flatten)]
    pub place: EventPlace<'a>,
    /// The text.
    pub text: &'a str,
    /// Empty for text, else left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Empty>,
}

/// The whole arguments of a call.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct ArgumentsDone<'a> {
    /// Place of the event.
    #[serde(flatten)]
    pub place: EventPlace<'a>,
    /// The text of a JSON object.
    pub arguments: &'a str,
}

/// The whole input of a custom tool.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub struct InputDone<'a> {
    /// Place of the event.
    #[serde(flatten)]
    pub place: EventPlace<'a>,
    /// The input.
    pub input: &'a str,
}

/// Any event of a stream, for the OpenAPI document.
#[derive(JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "ResponseStreamEvent")]
#[allow(dead_code, reason = "only its schema is used")]
pub enum StreamEvent {
    /// An event.
    Event(ResponseEvent<'static>),
    /// The only event of a response that could not begin.
    Error(ErrorEvent<'static>),
}
