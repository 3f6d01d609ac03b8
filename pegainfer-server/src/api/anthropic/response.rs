//! Response of `/v1/messages`, whole or streamed.

use super::signature;
use super::wire::{BlockDelta, ContentBlock, Message, MessageEvent, MessageUsage, Stop};
use crate::api::blocks::{self, Block, BlockChange, Blocks};
use crate::api::delta::{Counts, Delta, Finish, StopReason};
use crate::api::generation::Generation;
use crate::api::large_response::{GrowingResponse, json_bytes};
use crate::api::schema::anthropic::ThinkingDisplay;
use crate::api::sse::{ChunkWriter, Events};
use crate::api::state::AppState;
use crate::api::submitted_chat::ChoiceParser;
use crate::api::timings::Timings;
use crate::api::wire::Usage;
use crate::error::ApiError;
use axum::response::Response;
use pegainfer_text::exact_object;
use pegainfer_text::parser::Event;

/// One message in the shape of Anthropic's API.
pub struct MessageOutput {
    id: String,
    model: String,
    display: ThinkingDisplay,
    blocks: Blocks,
    finish: Option<Finish>,
    /// True after `message_start` was written.
    begun: bool,
}

impl MessageOutput {
    /// An empty message.
    pub fn new(request_id: &str, model: String, display: ThinkingDisplay) -> Self {
        let id = format!("msg_{request_id}");
        Self { id, model, display, blocks: Blocks::default(), finish: None, begun: false }
    }

    /// Appends parser events without writing, for a message that is sent whole.
    pub fn push(&mut self, events: Vec<Event>) {
        self.blocks.push(events);
    }

    /// Stores the reason why the generation ended, if it has.
    pub fn set_finish(&mut self, finish: Option<Finish>) {
        self.finish = finish.or(self.finish.take());
    }

    /// Ends a message that is sent whole.
    pub fn end(&mut self, finish: Option<Finish>) {
        self.blocks.finish(finish.as_ref());
        self.finish = finish;
    }

    /// The whole message.
    pub fn message(&self, usage: &Usage) -> Message<'_> {
        let content = self.blocks.all().iter().map(|block| self.whole(block)).collect();
        self.envelope(content, self.stop(), usage)
    }

    fn envelope<'a>(&'a self, content: Vec<ContentBlock<'a>>, stop: Stop<'a>, usage: &Usage) -> Message<'a> {
        let (r#type, role, usage) = ("message", "assistant", MessageUsage::from(usage));
        Message { id: &self.id, r#type, role, model: &self.model, content, stop, usage }
    }

    fn stop(&self) -> Stop<'_> {
        let (stop_reason, stop_sequence) = match &self.finish {
            Some(Finish { reason: "tool_calls", .. }) => ("tool_use", None),
            Some(Finish { reason: "length", .. }) => ("max_tokens", None),
            Some(Finish { stop_reason: Some(StopReason::Text(text)), .. }) => ("stop_sequence", Some(text.as_str())),
            _ => ("end_turn", None),
        };
        Stop { stop_reason: Some(stop_reason), stop_sequence }
    }

    /// A complete block. A call that was cut off has the arguments that are complete.
    fn whole<'a>(&self, block: &'a Block) -> ContentBlock<'a> {
        match block {
            Block::Text(text) => ContentBlock::Text { text },
            Block::Reasoning(text) => {
                let thinking = if self.is_shown() { text } else { "" };
                ContentBlock::Thinking { thinking, signature: self.signature(text) }
            }
            Block::Call { id, name, arguments, .. } => {
                ContentBlock::ToolUse { id, name, input: exact_object(arguments) }
            }
        }
    }

    /// True if the client wants to see the reasoning.
    fn is_shown(&self) -> bool {
        self.display != ThinkingDisplay::Omitted
    }

    fn signature(&self, reasoning: &str) -> String {
        if self.is_shown() { signature::for_shown(reasoning) } else { signature::for_omitted(reasoning) }
    }

    /// Writes the first event, once. Cached tokens count as input tokens before the request was admitted; the last
    /// event has the final numbers.
    pub fn begin(&mut self, out: &mut Events, usage: &Usage) {
        if !std::mem::replace(&mut self.begun, true) {
            let message = self.envelope(Vec::new(), Stop::default(), usage);
            push(out, &MessageEvent::MessageStart { message });
        }
    }

    /// Appends parser events and writes the resulting changes.
    pub fn write(&mut self, out: &mut Events, events: Vec<Event>) {
        for change in self.blocks.push(events) {
            self.change(out, &change);
        }
    }

    fn change(&self, out: &mut Events, change: &BlockChange) {
        match change {
            BlockChange::Open(index) => {
                let content_block = empty(&self.blocks.all()[*index]);
                push(out, &MessageEvent::ContentBlockStart { index: *index, content_block });
            }
            BlockChange::Grow(index, text) => {
                let delta = match &self.blocks.all()[*index] {
                    Block::Text(_) => BlockDelta::Text { text },
                    Block::Reasoning(_) if !self.is_shown() => return,
                    Block::Reasoning(_) => BlockDelta::Thinking { thinking: text },
                    Block::Call { .. } => BlockDelta::InputJson { partial_json: text },
                };
                push(out, &MessageEvent::ContentBlockDelta { index: *index, delta });
            }
            BlockChange::Close(index) => {
                if let Block::Reasoning(text) = &self.blocks.all()[*index] {
                    let delta = BlockDelta::Signature { signature: self.signature(text) };
                    push(out, &MessageEvent::ContentBlockDelta { index: *index, delta });
                }
                push(out, &MessageEvent::ContentBlockStop { index: *index });
            }
        }
    }

    /// Writes the events after the last delta.
    pub fn write_end(&mut self, out: &mut Events, usage: &Usage) {
        if let Some(change) = self.blocks.finish(self.finish.as_ref()) {
            self.change(out, &change);
        }
        push(out, &MessageEvent::MessageDelta { delta: self.stop(), usage: usage.into() });
        push(out, &MessageEvent::MessageStop);
    }
}

fn push(out: &mut Events, event: &MessageEvent<'_>) {
    out.push_named(event.name(), event);
}

/// A block at its start, with empty content.
fn empty(block: &Block) -> ContentBlock<'_> {
    match block {
        Block::Text(_) => ContentBlock::Text { text: "" },
        Block::Reasoning(_) => ContentBlock::Thinking { thinking: "", signature: String::new() },
        Block::Call { id, name, .. } => ContentBlock::ToolUse { id, name, input: exact_object("{}") },
    }
}

/// Writes a message as its tokens arrive.
pub struct MessageWriter {
    parser: ChoiceParser,
    output: MessageOutput,
}

impl MessageWriter {
    /// A writer at the start of the message.
    pub fn new(parser: ChoiceParser, output: MessageOutput) -> Self {
        Self { parser, output }
    }

    /// Waits for the end of the generation and responds with the whole message.
    pub async fn respond(self, generation: &mut Generation, state: &AppState) -> Result<Response, ApiError> {
        let (Self { mut parser, mut output }, growing) = (self, GrowingResponse::new(generation.tenant()));
        let finish = blocks::collect(generation, &mut parser, &growing, state, |events| output.push(events)).await?;
        output.end(finish);
        let usage = Usage::sum([generation.counts()], 1);
        growing.respond(state, move || json_bytes(&output.message(&usage))).await
    }
}

impl ChunkWriter for MessageWriter {
    fn begin(&mut self, out: &mut Events, usage: Usage) {
        self.output.begin(out, &usage);
    }

    fn keep_alive(&mut self, out: &mut Events) {
        push(out, &MessageEvent::Ping);
    }

    fn delta(&mut self, out: &mut Events, _: usize, mut delta: Delta, counts: Counts) {
        self.output.begin(out, &Usage::sum([counts], 1));
        self.output.write(out, self.parser.parse(&mut delta));
        self.output.set_finish(delta.finish);
    }

    fn finish(&mut self, out: &mut Events, usage: Usage, _: Option<Timings>) {
        self.output.write_end(out, &usage);
    }

    fn error(&mut self, out: &mut Events, error: &ApiError) {
        out.push_named("error", &error.anthropic(None));
    }

    fn end(&mut self, _: &mut Events) {}
}
