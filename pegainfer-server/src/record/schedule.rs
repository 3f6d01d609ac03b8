//! The schedule of an engine as lines of a recording.

use super::writer::RecordWriter;
use pegainfer_bench::recording::format::{RecordLine, ScheduleLine};
use pegainfer_core::schedule::recording::{ScheduleEvent, ScheduleSink};

/// Bytes of a line without its lists, and of each list entry: an upper bound for usual numbers.
const LINE_BYTES: usize = 128;
const ENTRY_BYTES: usize = 12;

/// Hands the events of an engine to the writer thread.
pub(super) struct ScheduleLines {
    writer: RecordWriter,
    /// Number of the engine.
    engine: usize,
}

impl ScheduleLines {
    /// Lines of this engine for this writer.
    pub fn new(writer: RecordWriter, engine: usize) -> Self {
        Self { writer, engine }
    }
}

impl ScheduleSink for ScheduleLines {
    fn record(&mut self, event: ScheduleEvent) {
        let entries = match &event {
            ScheduleEvent::Queue(request) => request.prompt.len() + request.stop_token_ids.len(),
            ScheduleEvent::Plan(plan) => {
                2 * (plan.rows.as_ref().map_or(0, Vec::len) + plan.admitted.len()) + plan.waiting_for_mask.len()
            }
            ScheduleEvent::Commit(commit) => commit.tokens.len(),
            ScheduleEvent::Fail(ids) => ids.len(),
            ScheduleEvent::Engine(_)
            | ScheduleEvent::Cancel(_)
            | ScheduleEvent::Retry { .. }
            | ScheduleEvent::Abort {}
            | ScheduleEvent::Reset {} => 0,
        };
        self.writer.write_later(
            RecordLine::Schedule(ScheduleLine { engine_number: self.engine, event }),
            LINE_BYTES + ENTRY_BYTES * entries,
        );
    }
}
