//! What `/v1/responses` answers.

use super::super::blocks::{self, Answer, Block, Blocks, Change};
use super::super::errors::ApiError;
use super::super::exchange::Reader;
use super::super::generation::Generation;
use super::super::params::Params;
use super::super::piece::{Finish, Piece};
use super::super::sse::{ChunkFormat, Events};
use super::super::timings::Timings;
use super::super::wire::Usage;
use serde_json::{Map, Value, json};

/// Writes one response.
pub struct Format {
    request_id: String,
    model: String,
    created: u64,
    /// Fields of the request.
    echoed: Map<String, Value>,
    reader: Reader,
    blocks: Blocks,
    finish: Option<Finish>,
    /// Events so far.
    sequence: usize,
}

impl Format {
    /// Nothing written yet.
    pub fn new(params: &Params, created: u64, echoed: Map<String, Value>, reader: Reader) -> Self {
        let (request_id, model) = (params.request_id.clone(), params.model.clone());
        Self { request_id, model, created, echoed, reader, blocks: Blocks::default(), finish: None, sequence: 0 }
    }

    /// Waits for the end of the answer and writes it whole.
    pub async fn whole(mut self, generation: &mut Generation) -> Result<Value, ApiError> {
        Answer { blocks: self.blocks, finish: self.finish } = blocks::collect(generation, &mut self.reader).await?;
        let usage = Usage::sum([generation.counts()], 1);
        Ok(self.response(self.status(), Some(&usage), None))
    }

    fn status(&self) -> &'static str {
        if self.finish.as_ref().is_some_and(|finish| finish.reason == "length") { "incomplete" } else { "completed" }
    }

    /// The response object; its output is there once it has ended.
    fn response(&self, status: &str, usage: Option<&Usage>, error: Option<&ApiError>) -> Value {
        let ended = usage.is_some();
        let output: Vec<Value> =
            (0..self.blocks.all().len()).filter(|_| ended).map(|at| self.item(at, status)).collect();
        let usage = usage.map(|usage| {
            json!({"input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens()},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reader.reasoning_tokens},
                "total_tokens": usage.total_tokens})
        });
        let error = error.map(|error| json!({"code": "server_error", "message": error.message()}));
        let details = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut response = json!({"id": format!("resp_{}", self.request_id), "object": "response",
            "created_at": self.created, "status": status, "error": error, "incomplete_details": details,
            "model": self.model, "output": output, "previous_response_id": null, "store": false,
            "truncation": "disabled", "usage": usage});
        if let Some(response) = response.as_object_mut() {
            response.extend(self.echoed.clone());
        }
        response
    }

    /// The id of the item of a block.
    fn item_id(&self, at: usize) -> String {
        let kind = match self.blocks.all()[at] {
            Block::Reasoning(_) => "rs",
            Block::Text(_) => "msg",
            Block::Call { .. } => "fc",
        };
        format!("{kind}_{}_{at}", self.request_id)
    }

    /// The item of a block. Only the last one of an incomplete response is incomplete.
    fn item(&self, at: usize, response: &str) -> Value {
        let last = at + 1 == self.blocks.all().len();
        let status = if last && response == "incomplete" { "incomplete" } else { "completed" };
        self.item_with(at, status, true)
    }

    /// The item of a block, as it begins or with what is in it.
    fn item_with(&self, at: usize, status: &str, whole: bool) -> Value {
        let id = self.item_id(at);
        let content = if whole { vec![self.part(at, true)] } else { vec![] };
        match &self.blocks.all()[at] {
            Block::Reasoning(_) => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Block::Text(_) => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Block::Call { id: call_id, name, arguments } => {
                let arguments = if whole { arguments } else { "" };
                json!({"id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                    "arguments": arguments})
            }
        }
    }

    /// The only part of a block's content, as it begins or with what is in it; null for calls, which have none.
    fn part(&self, at: usize, whole: bool) -> Value {
        let or_empty = |text: &String| if whole { text.clone() } else { String::new() };
        match &self.blocks.all()[at] {
            Block::Reasoning(text) => json!({"type": "reasoning_text", "text": or_empty(text)}),
            Block::Text(text) => {
                json!({"type": "output_text", "text": or_empty(text), "annotations": [], "logprobs": []})
            }
            Block::Call { .. } => Value::Null,
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

    /// An event about the content of a block's item.
    fn content_event(&mut self, out: &mut Events, kind: &str, at: usize, field: (&str, Value)) {
        let mut fields =
            Map::from_iter([("item_id".to_string(), json!(self.item_id(at))), ("output_index".to_string(), json!(at))]);
        if !matches!(self.blocks.all()[at], Block::Call { .. }) {
            fields.insert("content_index".into(), json!(0));
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
                let part = self.part(at, false);
                if !part.is_null() {
                    self.content_event(out, "response.content_part.added", at, ("part", part));
                }
            }
            Change::Grow(at, text) => {
                let kind = format!("{}.delta", stem(&self.blocks.all()[at]));
                self.content_event(out, &kind, at, ("delta", text.into()));
            }
            Change::Close(at) => {
                let block = &self.blocks.all()[at];
                let (kind, field) = (format!("{}.done", stem(block)), field(block));
                self.content_event(out, &kind, at, field);
                let part = self.part(at, true);
                if !part.is_null() {
                    self.content_event(out, "response.content_part.done", at, ("part", part));
                }
                let item = self.item(at, self.status());
                self.event(out, "response.output_item.done", json!({"output_index": at, "item": item}));
            }
        }
    }
}

/// The beginning of the names of events about a block's content.
fn stem(block: &Block) -> &'static str {
    match block {
        Block::Reasoning(_) => "response.reasoning_text",
        Block::Text(_) => "response.output_text",
        Block::Call { .. } => "response.function_call_arguments",
    }
}

/// What the event at a block's end repeats.
fn field(block: &Block) -> (&'static str, Value) {
    match block {
        Block::Reasoning(text) | Block::Text(text) => ("text", text.as_str().into()),
        Block::Call { arguments, .. } => ("arguments", arguments.as_str().into()),
    }
}

impl ChunkFormat for Format {
    fn piece(&mut self, out: &mut Events, _: usize, mut piece: Piece, _: Option<Option<Usage>>) {
        if self.sequence == 0 {
            for kind in ["response.created", "response.in_progress"] {
                let response = self.response("in_progress", None, None);
                self.event(out, kind, json!({"response": response}));
            }
        }
        for change in self.blocks.push(self.reader.events(&mut piece)) {
            self.change(out, change);
        }
        self.finish = piece.finish.or(self.finish.take());
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
