//! Mooncake traces (github.com/kvcache-ai/Mooncake), including the sessions, delays and field names of Dynamo and
//! AIPerf.

use super::format::{Format, JsonFields};
use super::reader::{Read, Reader, Sessions, seconds};
use super::request::TraceRequest;
use serde::Deserialize;
use serde_json::Value;

pub(super) const FORMAT: Format = Format {
    name: "Mooncake",
    columns: "JSON Lines with timestamp (or created_time), input_length (input_tokens), output_length (output_tokens), \
              [hash_ids of 512 tokens], [session_id], [delay (delay_ms)]",
    time: "timestamp, milliseconds",
};
/// Tokens per hashed block.
const BLOCK_TOKENS: usize = 512;

#[derive(Deserialize)]
struct Line {
    #[serde(alias = "created_time")]
    timestamp: Option<f64>,
    #[serde(alias = "input_tokens")]
    input_length: usize,
    #[serde(alias = "output_tokens")]
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
    session_id: Option<Value>,
    #[serde(alias = "delay_ms")]
    delay: Option<f64>,
}

#[derive(Default)]
struct Mooncake {
    /// Sessions, each with the arrival of its last request.
    sessions: Sessions,
}

/// The reader of a file whose first line has these fields.
pub(super) fn reader(fields: &JsonFields) -> Option<Box<dyn Reader>> {
    let has = |name, alias| fields.has(name) || fields.has(alias);
    let known = has("input_length", "input_tokens") && has("output_length", "output_tokens");
    known.then(|| Box::new(Mooncake::default()) as Box<dyn Reader>)
}

impl Reader for Mooncake {
    fn format(&self) -> &'static Format {
        &FORMAT
    }

    fn read(&mut self, line: &str) -> Result<Read, String> {
        let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let time = line.timestamp.map(|ms| seconds(ms / 1e3)).transpose()?;
        let delay = line.delay.map(|ms| seconds(ms / 1e3)).transpose()?;
        let (mut at, mut session) = (time, None);
        if let Some(name) = line.session_id.map(|name| name.to_string()) {
            let (number, before) = self.sessions.get(name.clone());
            // Only the first request of a session needs a time, which is 0 by default.
            let expected = before.unwrap_or_default() + delay.unwrap_or_default();
            at = at.or(Some(expected));
            session = Some(number);
            self.sessions.set(name, at);
        }
        Ok(Read::Request(TraceRequest {
            at: at.ok_or("it has neither a timestamp nor a session_id")?,
            prompt_len: line.input_length,
            output_len: line.output_length,
            blocks: line.hash_ids,
            block_tokens: BLOCK_TOKENS,
            session,
            delay: delay.filter(|_| session.is_some()),
            ..TraceRequest::default()
        }))
    }
}
