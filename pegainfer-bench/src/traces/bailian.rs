//! The Qwen-Bailian traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon).

use super::format::{Format, JsonFields};
use super::reader::{Read, Reader, seconds};
use super::request::TraceRequest;
use serde::Deserialize;
use std::collections::HashMap;

pub(super) const FORMAT: Format = Format {
    name: "Qwen-Bailian",
    columns: "JSON Lines with chat_id, parent_chat_id, timestamp, input_length, output_length, [hash_ids of 16 tokens]",
    time: "timestamp, seconds",
};
/// Tokens per hashed block.
const BLOCK_TOKENS: usize = 16;

#[derive(Deserialize)]
struct Line {
    chat_id: i64,
    /// The previous request in its session; -1 for the first one.
    parent_chat_id: i64,
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

#[derive(Default)]
struct Bailian {
    /// The session of each chat.
    sessions: HashMap<i64, u64>,
    /// Number of the next session.
    next: u64,
}

/// The reader of a file whose first line has these fields.
pub(super) fn reader(fields: &JsonFields) -> Option<Box<dyn Reader>> {
    let known = ["chat_id", "parent_chat_id", "input_length", "output_length"].iter().all(|name| fields.has(name));
    known.then(|| Box::new(Bailian::default()) as Box<dyn Reader>)
}

impl Reader for Bailian {
    fn format(&self) -> &'static Format {
        &FORMAT
    }

    fn read(&mut self, line: &str) -> Result<Read, String> {
        let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
        // A session that began before the trace starts at its first request here.
        let session = self.sessions.get(&line.parent_chat_id).copied().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.sessions.insert(line.chat_id, session);
        Ok(Read::Request(TraceRequest {
            at: seconds(line.timestamp)?,
            prompt_len: line.input_length,
            output_len: line.output_length,
            blocks: line.hash_ids,
            block_tokens: BLOCK_TOKENS,
            session: Some(session),
            ..TraceRequest::default()
        }))
    }
}
