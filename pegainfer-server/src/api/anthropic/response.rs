//! Response of `/v1/messages`, whole or streamed.

use super::super::blocks::{self, Block, Blocks, Change, CompleteOutput};
use super::super::delta::{Delta, Finish, StopReason};
use super::super::generation::Generation;
use super::super::schema::anthropic::ThinkingDisplay;
use super::super::sse::{ChunkWriter, Events};
use super::super::submitted_chat::ChoiceParser;
use super::super::timings::Timings;
use super::super::wire::Usage;
use super::signature;
use crate::error::ApiError;
use crate::text::{CutString, complete_object};
use serde_json::{Value, json};

/// Writes one message in Anthropic's writer.
pub struct MessageWriter {
    id: String,
    model: String,
    parser: ChoiceParser,
    display: ThinkingDisplay,
    blocks: Blocks,
    finish: Option<Finish>,
    /// `message_start` was written.
    begun: bool,
}

impl MessageWriter {
    /// A writer that has written nothing yet.
    pub fn new(request_id: &str, model: String, parser: ChoiceParser, display: ThinkingDisplay) -> Self {
        let id = format!("msg_{request_id}");
        Self { id, model, parser, display, blocks: Blocks::default(), finish: None, begun: false }
    }

    /// Waits for the end of the generation and returns the whole message.
    pub async fn whole(mut self, generation: &mut Generation) -> Result<Value, ApiError> {
        let CompleteOutput { blocks, finish } = blocks::collect(generation, &mut self.parser).await?;
        let content: Vec<Value> = blocks.all().iter().map(|block| whole(block, self.display)).collect();
        let (reason, sequence) = stop_reason(finish);
        let usage = usage(&Usage::sum([generation.counts()], 1));
        Ok(message(&self.id, &self.model, content, reason, sequence, usage))
    }

    /// Writes the first event, once. Before the request was admitted, its cached tokens count as input tokens; the last event has the
    /// final numbers.
    fn start(&mut self, out: &mut Events, counts: Option<Usage>) {
        if !std::mem::replace(&mut self.begun, true) {
            let usage = counts.map_or(Value::Null, |counts| usage(&counts));
            let message = message(&self.id, &self.model, vec![], Value::Null, Value::Null, usage);
            out.push_named("message_start", &json!({"type": "message_start", "message": message}));
        }
    }

    fn change(&self, out: &mut Events, change: Change) {
        match change {
            Change::Open(index) => {
                let start = json!({"type": "content_block_start", "index": index,
                    "content_block": empty(&self.blocks.all()[index])});
                out.push_named("content_block_start", &start);
            }
            Change::Grow(index, text) => {
                if self.display == ThinkingDisplay::Omitted && matches!(self.blocks.all()[index], Block::Reasoning(_)) {
                    return;
                }
                let delta = match &self.blocks.all()[index] {
                    Block::Text(_) => json!({"type": "text_delta", "text": text}),
                    Block::Reasoning(_) => json!({"type": "thinking_delta", "thinking": text}),
                    Block::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                };
                block_delta(out, index, &delta);
            }
            Change::Close(index) => {
                if let (Block::Reasoning(text), ThinkingDisplay::Omitted) = (&self.blocks.all()[index], self.display) {
                    let delta = json!({"type": "signature_delta", "signature": signature::of(text)});
                    block_delta(out, index, &delta);
                }
                out.push_named("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
            }
        }
    }
}

impl ChunkWriter for MessageWriter {
    fn begin(&mut self, out: &mut Events, counts: Usage) {
        self.start(out, Some(counts));
    }

    fn keep_alive(&mut self, out: &mut Events) {
        out.push_named("ping", &json!({"type": "ping"}));
    }

    fn delta(&mut self, out: &mut Events, _: usize, mut delta: Delta, counts: Option<Option<Usage>>) {
        self.start(out, counts.flatten());
        let changes = self.blocks.push(self.parser.parse(&mut delta));
        changes.into_iter().for_each(|change| self.change(out, change));
        self.finish = delta.finish.or(self.finish.take());
    }

    fn usage(&mut self, out: &mut Events, counts: Usage, _: Option<Timings>) {
        if let Some(change) = self.blocks.close() {
            self.change(out, change);
        }
        let (reason, sequence) = stop_reason(self.finish.take());
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let delta = json!({"type": "message_delta", "delta": delta, "usage": usage(&counts)});
        out.push_named("message_delta", &delta);
        out.push_named("message_stop", &json!({"type": "message_stop"}));
    }

    fn error(&mut self, out: &mut Events, error: &ApiError) {
        out.push_named("error", &error.anthropic_body());
    }

    fn end(&mut self, _: &mut Events) {}
}

fn message(id: &str, model: &str, content: Vec<Value>, reason: Value, sequence: Value, usage: Value) -> Value {
    json!({"id": id, "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": reason, "stop_sequence": sequence, "usage": usage})
}

/// `stop_reason` and `stop_sequence`.
fn stop_reason(finish: Option<Finish>) -> (Value, Value) {
    match finish {
        Some(Finish { reason: "tool_calls", .. }) => (json!("tool_use"), Value::Null),
        Some(Finish { reason: "length", .. }) => (json!("max_tokens"), Value::Null),
        Some(Finish { stop_reason: Some(StopReason::Text(text)), .. }) => (json!("stop_sequence"), json!(text)),
        _ => (json!("end_turn"), Value::Null),
    }
}

/// Anthropic's `usage`: prompt tokens found in the cache are not counted as input tokens.
fn usage(counts: &Usage) -> Value {
    json!({"input_tokens": counts.prompt_tokens - counts.cached_tokens(), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens(), "output_tokens": counts.completion_tokens})
}

/// A block at its start, with empty content.
fn empty(block: &Block) -> Value {
    match block {
        Block::Text(_) => json!({"type": "text", "text": ""}),
        Block::Reasoning(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Block::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
    }
}

fn block_delta(out: &mut Events, index: usize, delta: &Value) {
    out.push_named("content_block_delta", &json!({"type": "content_block_delta", "index": index, "delta": delta}));
}

/// A complete block. Of a call that was cut off, only the arguments that are complete.
fn whole(block: &Block, display: ThinkingDisplay) -> Value {
    match block {
        Block::Text(text) => json!({"type": "text", "text": text}),
        Block::Reasoning(text) if display == ThinkingDisplay::Omitted => {
            json!({"type": "thinking", "thinking": "", "signature": signature::of(text)})
        }
        Block::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Block::Call { id, name, arguments } => {
            let input = complete_object(arguments, CutString::Drop);
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}
