//! Readers of request traces: arrival times, lengths of prompts and outputs, and shared prompt blocks.
//!
//! # Layout
//! - [`detect`]: the known formats, and their detection from a file's first line.
//! - [`azure`], [`burst_gpt`], [`mooncake`], [`bailian`], [`recording`]: one format each.
//! - [`csv`]: columns by name. [`lines`]: lines of bounded length. [`request`]: a request of a trace. [`mod@format`],
//!   [`reader`]: common parts of the formats.

mod azure;
mod bailian;
mod burst_gpt;
mod csv;
pub mod detect;
pub mod error;
pub mod format;
mod lines;
mod mooncake;
mod reader;
mod recording;
pub mod request;

use detect::recognise;
use error::TraceError;
use format::Format;
use lines::Lines;
use reader::Read;
use request::TraceRequest;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::path::Path;
use std::time::Duration;

/// Maximum duration of a trace in days; BurstGPT's is 213.
const MAX_DAYS: u64 = 366;
/// Maximum time between two requests of a session.
const MAX_DELAY: Duration = Duration::from_secs(MAX_DAYS * DAY);
/// Maximum number of tokens in a request, more than any model's context.
const MAX_TOKENS: usize = 1 << 26;
/// Seconds per day.
const DAY: u64 = 24 * 3600;

/// The requests of a file.
#[derive(Debug, Clone)]
pub struct Trace {
    /// Format of the file.
    pub format: &'static Format,
    /// Requests in the order of arrival; the first one arrives at 0.
    pub requests: Vec<TraceRequest>,
    /// Number of skipped requests: without a prompt, without output (failures) or without an end.
    pub skipped: usize,
}

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read, is of no known format, has an invalid line, or lasts longer than the maximum.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::read_first(path, usize::MAX)
    }

    /// Reads a file up to `limit` requests.
    ///
    /// # Errors
    /// Same as [`read`](Self::read).
    pub fn read_first(path: &Path, limit: usize) -> Result<Self, TraceError> {
        let unreadable = |source: std::io::Error| TraceError::Unreadable { path: path.into(), source };
        let mut lines = Lines::new(BufReader::new(File::open(path).map_err(unreadable)?));
        let bad_line = |line: usize, reason: String| TraceError::Line { path: path.into(), line, reason };
        let next = |lines: &mut Lines<_>| {
            lines.next().map_err(|error| match error.kind() {
                ErrorKind::InvalidData => bad_line(lines.number(), error.to_string()),
                _ => unreadable(error),
            })
        };
        let first = next(&mut lines)?.unwrap_or_default();
        let Some((mut reader, has_header)) = recognise(&first) else {
            return Err(TraceError::unknown(path, &first));
        };
        let mut trace = Self { format: reader.format(), requests: Vec::new(), skipped: 0 };
        let mut line = if has_header { next(&mut lines)? } else { Some(first) };
        while let Some(text) = line {
            match reader.read(&text).map_err(|reason| bad_line(lines.number(), reason))? {
                Read::Request(request) => {
                    check(&request).map_err(|reason| bad_line(lines.number(), reason))?;
                    trace.add(request);
                }
                Read::Skipped(requests) => trace.skipped += requests,
                Read::Nothing => {}
            }
            line = if trace.requests.len() < limit { next(&mut lines)? } else { None };
        }
        trace.skipped += reader.open();
        trace.sort();
        let days = trace.duration().as_secs_f64() / DAY as f64;
        match days <= MAX_DAYS as f64 {
            true => Ok(trace),
            false => Err(TraceError::TooLong { path: path.into(), days, max_days: MAX_DAYS, time: trace.format.time }),
        }
    }

    /// Time from the first arrival to the last one.
    pub fn duration(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |request| request.at)
    }

    fn add(&mut self, request: TraceRequest) {
        if request.prompt_len == 0 || request.output_len == 0 {
            self.skipped += 1;
            return;
        }
        self.requests.push(request);
    }

    /// Sorts the requests by arrival, counts times from the first one, and numbers the requests.
    fn sort(&mut self) {
        self.requests.sort_by_key(|request| request.at);
        let start = self.requests.first().map_or(Duration::ZERO, |request| request.at);
        for (number, request) in self.requests.iter_mut().enumerate() {
            request.number = number as u64;
            request.at -= start;
        }
    }
}

/// Refuses a request with too many tokens or too long a delay.
fn check(request: &TraceRequest) -> Result<(), String> {
    for (name, tokens) in [("prompt", request.prompt_len), ("output", request.output_len)] {
        if tokens > MAX_TOKENS {
            return Err(format!("its {name} has {tokens} tokens, and at most {MAX_TOKENS} are read"));
        }
    }
    match request.delay.filter(|delay| *delay > MAX_DELAY) {
        Some(delay) => Err(format!("its delay is {} days, and must be at most {MAX_DAYS}", delay.as_secs() / DAY)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
