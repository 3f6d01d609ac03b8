//! Response of `/v1/responses`, whole or streamed.

use super::super::blocks::{self, Block, Blocks, Change, CompleteOutput};
use super::super::delta::{Delta, Finish};
use super::super::generation::Generation;
use super::super::params::Params;
use super::super::sse::{ChunkWriter, Events};
use super::super::submitted_chat::ChoiceParser;
use super::super::timings::Timings;
use super::super::wire::Usage;
use super::request::Reply;
use super::tools::{Kind, Target, Targets};
use crate::error::ApiError;
use crate::text::{CutString, complete_object};
use serde_json::{Map, Value, json};

/// Writes one response object in the writer of OpenAI's Responses API.
pub struct ResponseWriter {
    request_id: String,
    model: String,
    created: u64,
    /// Fields of the request that the response repeats.
    repeated: Map<String, Value>,
    /// What calls of functions become.
    targets: Targets,
    /// Whether reasoning is sent as a summary.
    summary: bool,
    parser: ChoiceParser,
    blocks: Blocks,
    finish: Option<Finish>,
    /// Number of events written so far.
    sequence: usize,
}

impl ResponseWriter {
    /// A writer that has written nothing yet. `reply`: what the request told about its response.
    pub fn new(params: &Params, created: u64, reply: Reply, parser: ChoiceParser) -> Self {
        let (request_id, model) = (params.request_id.clone(), params.model.clone());
        let Reply { repeated, targets, summary } = reply;
        let (blocks, finish, sequence) = (Blocks::default(), None, 0);
        Self { request_id, model, created, repeated, targets, summary, parser, blocks, finish, sequence }
    }

    /// Waits for the end of the generation and returns the whole response.
    pub async fn whole(mut self, generation: &mut Generation) -> Result<Value, ApiError> {
        CompleteOutput { blocks: self.blocks, finish: self.finish } =
            blocks::collect(generation, &mut self.parser).await?;
        let usage = Usage::sum([generation.counts()], 1);
        Ok(self.response(self.status(), Some(&usage), None))
    }

    fn status(&self) -> &'static str {
        if self.finish.as_ref().is_some_and(|finish| finish.reason == "length") { "incomplete" } else { "completed" }
    }

    /// The response object; its output is filled in once the generation has ended.
    fn response(&self, status: &str, usage: Option<&Usage>, error: Option<&ApiError>) -> Value {
        let ended = usage.is_some();
        let output: Vec<Value> =
            (0..self.blocks.all().len()).filter(|_| ended).map(|at| self.item(at, status)).collect();
        let usage = usage.map(|usage| {
            json!({"input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens()},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.parser.reasoning_tokens},
                "total_tokens": usage.total_tokens})
        });
        let error = error.map(|error| json!({"code": error.responses_code(), "message": error.message()}));
        let details = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut response = json!({"id": format!("resp_{}", self.request_id), "object": "response",
            "created_at": self.created, "status": status, "error": error, "incomplete_details": details,
            "model": self.model, "output": output, "previous_response_id": null, "store": false,
            "truncation": "disabled", "usage": usage});
        if let Some(response) = response.as_object_mut() {
            response.extend(self.repeated.clone());
        }
        response
    }

    /// The id of the item of a block.
    fn item_id(&self, at: usize) -> String {
        let kind = match &self.blocks.all()[at] {
            Block::Reasoning(_) => "rs",
            Block::Text(_) => "msg",
            Block::Call { name, .. } => match self.targets.of(name).kind {
                Kind::Function => "fc",
                Kind::Custom => "ctc",
                Kind::ToolSearch => "ts",
            },
        };
        format!("{kind}_{}_{at}", self.request_id)
    }

    /// The item of a complete block. Only the last one of an incomplete response is incomplete.
    fn item(&self, at: usize, response: &str) -> Value {
        let last = at + 1 == self.blocks.all().len();
        let status = if last && response == "incomplete" { "incomplete" } else { "completed" };
        self.item_with(at, status, true)
    }

    /// The item of a block, at its start (`whole` is false) or with its content.
    fn item_with(&self, at: usize, status: &str, whole: bool) -> Value {
        let id = self.item_id(at);
        let content = if whole { vec![self.part(at, true)] } else { vec![] };
        match &self.blocks.all()[at] {
            Block::Reasoning(_) if self.summary => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": content, "encrypted_content": null})
            }
            Block::Reasoning(_) => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Block::Text(_) => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Block::Call { id: call_id, name, arguments } => {
                let arguments = if whole { arguments } else { "" };
                let mut item = json!({"id": id, "status": status, "call_id": call_id});
                let fields = call_fields(self.targets.of(name), arguments);
                if let (Some(item), Value::Object(fields)) = (item.as_object_mut(), fields) {
                    item.extend(fields);
                }
                item
            }
        }
    }

    /// The only content part of a block, at its start or with its content; null for calls, which have none.
    fn part(&self, at: usize, whole: bool) -> Value {
        let or_empty = |text: &String| if whole { text.clone() } else { String::new() };
        match &self.blocks.all()[at] {
            Block::Reasoning(text) => {
                let kind = if self.summary { "summary_text" } else { "reasoning_text" };
                json!({"type": kind, "text": or_empty(text)})
            }
            Block::Text(text) => {
                json!({"type": "output_text", "text": or_empty(text), "annotations": [], "logprobs": []})
            }
            Block::Call { .. } => Value::Null,
        }
    }

    /// Writes the first events, once.
    fn start(&mut self, out: &mut Events) {
        if self.sequence == 0 {
            for kind in ["response.created", "response.in_progress"] {
                let response = self.response("in_progress", None, None);
                self.event(out, kind, json!({"response": response}));
            }
        }
    }

    fn event(&mut self, out: &mut Events, kind: &str, fields: Value) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        out.push_named(kind, &event);
    }

    /// Writes an event about the content of a block's item.
    fn content_event(&mut self, out: &mut Events, kind: &str, at: usize, field: (&str, Value)) {
        let mut fields =
            Map::from_iter([("item_id".to_string(), json!(self.item_id(at))), ("output_index".to_string(), json!(at))]);
        match &self.blocks.all()[at] {
            Block::Call { .. } => {}
            Block::Reasoning(_) if self.summary => _ = fields.insert("summary_index".into(), json!(0)),
            Block::Reasoning(_) | Block::Text(_) => _ = fields.insert("content_index".into(), json!(0)),
        }
        fields.insert(field.0.into(), field.1);
        if kind.starts_with("response.output_text.") {
            fields.insert("logprobs".into(), json!([]));
        }
        self.event(out, kind, fields.into());
    }

    fn change(&mut self, out: &mut Events, change: Change) {
        match change {
            Change::Open(at) => {
                let item = self.item_with(at, "in_progress", false);
                self.event(out, "response.output_item.added", json!({"output_index": at, "item": item}));
                if let Some(kind) = self.part_event(at) {
                    self.content_event(out, &format!("{kind}.added"), at, ("part", self.part(at, false)));
                }
            }
            Change::Grow(at, text) => {
                // The input of other tools is part of an argument, which is needed whole.
                if let Some(stem) = self.stem(at).filter(|stem| *stem != CUSTOM_INPUT) {
                    self.content_event(out, &format!("{stem}.delta"), at, ("delta", text.into()));
                }
            }
            Change::Close(at) => self.close(out, at),
        }
    }

    fn close(&mut self, out: &mut Events, at: usize) {
        let field = match &self.blocks.all()[at] {
            Block::Reasoning(text) | Block::Text(text) => ("text", text.clone()),
            Block::Call { name, arguments, .. } => match self.targets.of(name).kind {
                Kind::Function | Kind::ToolSearch => ("arguments", arguments.clone()),
                Kind::Custom => ("input", custom_input(arguments)),
            },
        };
        if let Some(stem) = self.stem(at) {
            if stem == CUSTOM_INPUT {
                self.content_event(out, &format!("{stem}.delta"), at, ("delta", field.1.as_str().into()));
            }
            self.content_event(out, &format!("{stem}.done"), at, (field.0, field.1.into()));
        }
        if let Some(kind) = self.part_event(at) {
            self.content_event(out, &format!("{kind}.done"), at, ("part", self.part(at, true)));
        }
        let item = self.item(at, self.status());
        self.event(out, "response.output_item.done", json!({"output_index": at, "item": item}));
    }

    /// The common beginning of the names of the events about a block's only part; `None` for calls, which have none.
    fn part_event(&self, at: usize) -> Option<&'static str> {
        match &self.blocks.all()[at] {
            Block::Reasoning(_) if self.summary => Some("response.reasoning_summary_part"),
            Block::Reasoning(_) | Block::Text(_) => Some("response.content_part"),
            Block::Call { .. } => None,
        }
    }

    /// The common beginning of the names of the events about a block's text; `None` for a search, which has only an item.
    fn stem(&self, at: usize) -> Option<&'static str> {
        match &self.blocks.all()[at] {
            Block::Reasoning(_) if self.summary => Some("response.reasoning_summary_text"),
            Block::Reasoning(_) => Some("response.reasoning_text"),
            Block::Text(_) => Some("response.output_text"),
            Block::Call { name, .. } => match self.targets.of(name).kind {
                Kind::Function => Some("response.function_call_arguments"),
                Kind::Custom => Some(CUSTOM_INPUT),
                Kind::ToolSearch => None,
            },
        }
    }
}

/// Beginning of the names of the events about a custom tool's input.
const CUSTOM_INPUT: &str = "response.custom_tool_call_input";

/// The fields that are particular to a kind of call.
fn call_fields(target: Target, arguments: &str) -> Value {
    let Target { kind, namespace, name } = target;
    match (kind, namespace) {
        (Kind::Function, None) => json!({"type": "function_call", "name": name, "arguments": arguments}),
        (Kind::Function, Some(namespace)) => {
            json!({"type": "function_call", "name": name, "namespace": namespace, "arguments": arguments})
        }
        (Kind::Custom, None) => json!({"type": "custom_tool_call", "name": name, "input": custom_input(arguments)}),
        (Kind::Custom, Some(namespace)) => {
            let input = custom_input(arguments);
            json!({"type": "custom_tool_call", "name": name, "namespace": namespace, "input": input})
        }
        (Kind::ToolSearch, _) => {
            let arguments = complete_object(arguments, CutString::Drop);
            json!({"type": "tool_search_call", "execution": "client", "arguments": arguments})
        }
    }
}

/// The text that a custom tool gets: the only argument of its function.
fn custom_input(arguments: &str) -> String {
    match complete_object(arguments, CutString::Keep).remove("input") {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    }
}

impl ChunkWriter for ResponseWriter {
    fn begin(&mut self, out: &mut Events, _: Usage) {
        self.start(out);
    }

    fn delta(&mut self, out: &mut Events, _: usize, mut delta: Delta, _: Option<Option<Usage>>) {
        self.start(out);
        for change in self.blocks.push(self.parser.parse(&mut delta)) {
            self.change(out, change);
        }
        self.finish = delta.finish.or(self.finish.take());
    }

    fn usage(&mut self, out: &mut Events, usage: Usage, _: Option<Timings>) {
        if let Some(change) = self.blocks.close() {
            self.change(out, change);
        }
        let status = self.status();
        let response = self.response(status, Some(&usage), None);
        self.event(out, &format!("response.{status}"), json!({"response": response}));
    }

    fn error(&mut self, out: &mut Events, error: &ApiError) {
        let response = self.response("failed", None, Some(error));
        self.event(out, "response.failed", json!({"response": response}));
    }

    fn end(&mut self, _: &mut Events) {}
}
