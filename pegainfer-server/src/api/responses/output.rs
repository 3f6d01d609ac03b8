//! The response object of `/v1/responses`, built from parser events.

use super::request::Reply;
use super::tools::{CalledTool, CalledTools, Kind};
use super::wire::{
    Call, ContentPart, Failure, IncompleteDetails, OutputItem, Repeated, ResponseObject, ResponseUsage, Status,
};
use crate::api::blocks::{Block, Blocks};
use crate::api::delta::Finish;
use crate::api::params::Params;
use crate::error::ApiError;
use pegainfer_text::parser::Event;
use pegainfer_text::{CutString, complete_object, exact_object};
use serde::Deserialize;
use serde_json::Value;

/// One response in the shape of OpenAI's Responses API.
pub struct ResponseOutput {
    request_id: String,
    model: String,
    created: u64,
    /// Fields of the request that the response repeats.
    repeated: Repeated,
    /// Tools of the calls, which decide how calls are written.
    targets: CalledTools,
    /// True if reasoning is sent as a summary.
    pub(super) summary: bool,
    pub(super) blocks: Blocks,
    /// Id of each block's item, and the tool that it calls.
    pub(super) heads: Vec<Head>,
    pub(super) finish: Option<Finish>,
    /// Number of events written so far.
    pub(super) sequence: usize,
}

/// Properties of an item that are fixed when it begins.
pub(super) struct Head {
    /// Id of the item.
    pub(super) id: String,
    /// `None` for text and reasoning.
    pub(super) target: Option<CalledTool>,
}

impl ResponseOutput {
    /// An empty response. `reply` holds the parts of the request that the response needs.
    pub fn new(params: &Params, created: u64, reply: Reply) -> Self {
        Self::with(params.request_id.clone(), params.model.clone(), created, reply)
    }

    pub(super) fn with(request_id: String, model: String, created: u64, reply: Reply) -> Self {
        let Reply { repeated, targets, summary } = reply;
        let (blocks, heads, finish, sequence) = (Blocks::default(), Vec::new(), None, 0);
        Self { request_id, model, created, repeated, targets, summary, blocks, heads, finish, sequence }
    }

    /// Appends parser events without writing, for a response that is sent whole.
    pub fn push(&mut self, events: Vec<Event>) {
        self.blocks.push(events);
    }

    /// Stores the reason why the generation ended, if it has.
    pub fn set_finish(&mut self, finish: Option<Finish>) {
        self.finish = finish.or(self.finish.take());
    }

    /// Ends a response that is sent whole.
    pub fn end(&mut self, finish: Option<Finish>) {
        self.blocks.finish(finish.as_ref());
        self.finish = finish;
        while self.heads.len() < self.blocks.all().len() {
            self.open(self.heads.len());
        }
    }

    /// The whole response.
    pub fn whole(&self, usage: ResponseUsage) -> ResponseObject<'_> {
        self.response(self.status(), Some(usage), None)
    }

    pub(super) fn status(&self) -> Status {
        match &self.finish {
            Some(finish) if finish.reason == "length" => Status::Incomplete,
            _ => Status::Completed,
        }
    }

    /// The response object. Its output is filled in after the generation has ended.
    pub(super) fn response<'a>(
        &'a self,
        status: Status,
        usage: Option<ResponseUsage>,
        error: Option<&'a ApiError>,
    ) -> ResponseObject<'a> {
        let ended = if usage.is_some() { self.blocks.all().len() } else { 0 };
        ResponseObject {
            id: format!("resp_{}", self.request_id),
            object: "response",
            created_at: self.created,
            status,
            error: error.map(|error| Failure { code: error.responses_code(), message: error.message() }),
            incomplete_details: (status == Status::Incomplete)
                .then_some(IncompleteDetails { reason: "max_output_tokens" }),
            model: &self.model,
            output: (0..ended).map(|at| self.item(at)).collect(),
            previous_response_id: None,
            store: false,
            truncation: "disabled",
            usage,
            repeated: &self.repeated,
        }
    }

    /// Assigns an id to the item of a new block.
    pub(super) fn open(&mut self, at: usize) {
        let (kind, target) = match &self.blocks.all()[at] {
            Block::Reasoning(_) => ("rs", None),
            Block::Text(_) => ("msg", None),
            Block::Call { name, .. } => {
                let target = self.targets.find(name);
                let kind = match target.kind {
                    Kind::Function => "fc",
                    Kind::Custom => "ctc",
                    Kind::ToolSearch => "ts",
                };
                (kind, Some(target))
            }
        };
        self.heads.push(Head { id: format!("{kind}_{}_{at}", self.request_id), target });
    }

    /// The item of a block that has ended.
    pub(super) fn item(&self, at: usize) -> OutputItem<'_> {
        let status = if self.blocks.is_complete(at) { Status::Completed } else { Status::Incomplete };
        self.item_with(at, status, true)
    }

    /// The item of a block, at its start (`whole` is false) or with its content.
    pub(super) fn item_with(&self, at: usize, status: Status, whole: bool) -> OutputItem<'_> {
        let Head { id, target } = &self.heads[at];
        let content = if whole { Vec::from_iter(self.part(at, true)) } else { vec![] };
        match &self.blocks.all()[at] {
            Block::Reasoning(_) if self.summary => {
                OutputItem::Summary { id, r#type: "reasoning", status, summary: content, encrypted_content: None }
            }
            Block::Reasoning(_) => OutputItem::Reasoning { id, r#type: "reasoning", status, summary: [], content },
            Block::Text(_) => OutputItem::Message { id, r#type: "message", status, role: "assistant", content },
            Block::Call { id: call_id, name, arguments, .. } => {
                let arguments = if whole { arguments } else { "" };
                OutputItem::Call { id, status, call_id, call: call(target.as_ref(), name, arguments) }
            }
        }
    }

    /// The only content part of a block, at its start or with its content; `None` for calls.
    pub(super) fn part(&self, at: usize, whole: bool) -> Option<ContentPart<'_>> {
        let (Block::Reasoning(text) | Block::Text(text)) = &self.blocks.all()[at] else { return None };
        let text = if whole { text } else { "" };
        Some(match &self.blocks.all()[at] {
            Block::Reasoning(_) if self.summary => ContentPart::Summary { text },
            Block::Reasoning(_) => ContentPart::Reasoning { text },
            _ => ContentPart::Output { text, annotations: [], logprobs: [] },
        })
    }

    /// Kind of the tool that a block calls. Text and reasoning are written like functions.
    pub(super) fn kind(&self, at: usize) -> Kind {
        self.heads[at].target.as_ref().map_or(Kind::Function, |target| target.kind)
    }
}

/// The fields of a kind of call. `called` is the name that the model used.
fn call<'a>(target: Option<&'a CalledTool>, called: &'a str, arguments: &'a str) -> Call<'a> {
    let Some(CalledTool { kind, namespace, name }) = target else {
        return Call::Function { name: called, namespace: None, arguments };
    };
    match kind {
        Kind::Function => Call::Function { name, namespace: namespace.as_deref(), arguments },
        Kind::Custom => Call::Custom { name, namespace: namespace.as_deref(), input: custom_input(arguments) },
        Kind::ToolSearch => Call::ToolSearch { execution: "client", arguments: exact_object(arguments) },
    }
}

/// The input of a custom tool: the only argument of its function.
pub(super) fn custom_input(arguments: &str) -> String {
    let Arguments { input } = serde_json::from_str(arguments)
        .unwrap_or_else(|_| Arguments { input: complete_object(arguments, CutString::Keep).remove("input") });
    match input {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

/// Arguments of a custom tool's function. Additional ones from the model are ignored.
#[derive(Deserialize)]
struct Arguments {
    input: Option<Value>,
}
