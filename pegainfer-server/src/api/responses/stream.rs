//! The events of a streamed response.

use super::events::{
    ArgumentsDone, Delta, EventPlace, InputDone, ItemUpdate, PartUpdate, ResponseEvent, ResponseUpdate, TextDone,
};
use super::output::{ResponseOutput, custom_input};
use super::tools::Kind;
use super::wire::{ContentPart, ResponseUsage, Status};
use crate::api::blocks::{Block, BlockChange};
use crate::api::sse::Events;
use crate::error::ApiError;
use pegainfer_text::parser::Event;

impl ResponseOutput {
    /// Writes the first events, once.
    pub fn begin(&mut self, out: &mut Events) {
        if self.sequence == 0 {
            self.write_response(out, Status::InProgress, None, None);
            self.write_response(out, Status::InProgress, None, None);
        }
    }

    /// Writes the event that carries the response with this status.
    fn write_response(
        &mut self,
        out: &mut Events,
        status: Status,
        usage: Option<ResponseUsage>,
        error: Option<&ApiError>,
    ) {
        let sequence_number = self.count();
        let event = ResponseUpdate { sequence_number, response: self.response(status, usage, error) };
        push(
            out,
            &match status {
                Status::InProgress if sequence_number == 0 => ResponseEvent::Created(event),
                Status::InProgress => ResponseEvent::InProgress(event),
                Status::Completed => ResponseEvent::Completed(event),
                Status::Incomplete => ResponseEvent::Incomplete(event),
                Status::Failed => ResponseEvent::Failed(event),
            },
        );
    }

    /// The number of the next event.
    fn count(&mut self) -> usize {
        let sequence_number = self.sequence;
        self.sequence += 1;
        sequence_number
    }

    /// Appends parser events and writes the resulting changes.
    pub fn write(&mut self, out: &mut Events, events: Vec<Event>) {
        for change in self.blocks.push(events) {
            self.change(out, change);
        }
    }

    /// Writes the event of a failed generation.
    pub fn write_error(&mut self, out: &mut Events, error: &ApiError) {
        self.write_response(out, Status::Failed, None, Some(error));
    }

    /// Writes the events after the last delta.
    pub fn write_end(&mut self, out: &mut Events, usage: ResponseUsage) {
        if let Some(change) = self.blocks.finish(self.finish.as_ref()) {
            self.change(out, change);
        }
        self.write_response(out, self.status(), Some(usage), None);
    }

    fn change(&mut self, out: &mut Events, change: BlockChange) {
        match change {
            BlockChange::Open(at) => {
                self.open(at);
                let sequence_number = self.count();
                let item = self.item_with(at, Status::InProgress, false);
                push(out, &ResponseEvent::ItemAdded(ItemUpdate { sequence_number, output_index: at, item }));
                self.write_part(out, at, false);
            }
            BlockChange::Grow(at, text) => self.grow(out, at, &text),
            BlockChange::Close(at) => self.close(out, at),
        }
    }

    /// Writes the begin or end event of an item's content part.
    fn write_part(&mut self, out: &mut Events, at: usize, whole: bool) {
        if matches!(&self.blocks.all()[at], Block::Call { .. }) {
            return;
        }
        let sequence_number = self.count();
        let Some(part) = self.part(at, whole) else { return };
        let is_summary = matches!(part, ContentPart::Summary { .. });
        let event = PartUpdate { place: self.place(at, sequence_number), part };
        let event = match (is_summary, whole) {
            (true, false) => ResponseEvent::SummaryPartAdded(event),
            (true, true) => ResponseEvent::SummaryPartDone(event),
            (false, false) => ResponseEvent::PartAdded(event),
            (false, true) => ResponseEvent::PartDone(event),
        };
        push(out, &event);
    }

    /// Place of an event about a block in the output.
    fn place(&self, at: usize, sequence_number: usize) -> EventPlace<'_> {
        let (summary_index, content_index) = match &self.blocks.all()[at] {
            Block::Call { .. } => (None, None),
            Block::Reasoning(_) if self.summary => (Some(0), None),
            Block::Reasoning(_) | Block::Text(_) => (None, Some(0)),
        };
        EventPlace { sequence_number, item_id: &self.heads[at].id, output_index: at, summary_index, content_index }
    }

    fn grow(&mut self, out: &mut Events, at: usize, delta: &str) {
        // The input of other tools is part of an argument, which is needed whole.
        if self.kind(at) != Kind::Function {
            return;
        }
        let sequence_number = self.count();
        let place = self.place(at, sequence_number);
        let more = |logprobs| Delta { place, delta, logprobs };
        push(
            out,
            &match &self.blocks.all()[at] {
                Block::Text(_) => ResponseEvent::TextDelta(more(Some([]))),
                Block::Reasoning(_) if self.summary => ResponseEvent::SummaryDelta(more(None)),
                Block::Reasoning(_) => ResponseEvent::ReasoningDelta(more(None)),
                Block::Call { .. } => ResponseEvent::ArgumentsDelta(more(None)),
            },
        );
    }

    fn close(&mut self, out: &mut Events, at: usize) {
        match self.kind(at) {
            Kind::Function => self.write_done(out, at),
            Kind::Custom => self.write_input(out, at),
            Kind::ToolSearch => {}
        }
        self.write_part(out, at, true);
        let sequence_number = self.count();
        push(out, &ResponseEvent::ItemDone(ItemUpdate { sequence_number, output_index: at, item: self.item(at) }));
    }

    /// Writes the whole text of a block.
    fn write_done(&mut self, out: &mut Events, at: usize) {
        let sequence_number = self.count();
        let place = self.place(at, sequence_number);
        push(
            out,
            &match &self.blocks.all()[at] {
                Block::Text(text) => ResponseEvent::TextDone(TextDone { place, text, logprobs: Some([]) }),
                Block::Reasoning(text) if self.summary => {
                    ResponseEvent::SummaryDone(TextDone { place, text, logprobs: None })
                }
                Block::Reasoning(text) => ResponseEvent::ReasoningDone(TextDone { place, text, logprobs: None }),
                Block::Call { arguments, .. } => ResponseEvent::ArgumentsDone(ArgumentsDone { place, arguments }),
            },
        );
    }

    /// Writes the input of a custom tool, in one delta.
    fn write_input(&mut self, out: &mut Events, at: usize) {
        let Block::Call { arguments, .. } = &self.blocks.all()[at] else { return };
        let input = custom_input(arguments);
        let n = self.count();
        let delta = Delta { place: self.place(at, n), delta: &input, logprobs: None };
        push(out, &ResponseEvent::InputDelta(delta));
        let n = self.count();
        push(out, &ResponseEvent::InputDone(InputDone { place: self.place(at, n), input: &input }));
    }
}

fn push(out: &mut Events, event: &ResponseEvent<'_>) {
    out.push_named(event.name(), event);
}
