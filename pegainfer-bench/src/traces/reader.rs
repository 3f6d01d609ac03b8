//! Common parts of all formats' readers.

use super::format::Format;
use super::request::TraceRequest;
use std::collections::HashMap;
use std::time::Duration;

/// Reads the lines of one format.
pub(super) trait Reader {
    /// The format.
    fn format(&self) -> &'static Format;

    /// Reads a line after the header. The error says why it is invalid. Times count from any moment that is the same
    /// for all lines of a file.
    fn read(&mut self, line: &str) -> Result<Read, String>;

    /// Number of requests that no line has completed yet.
    fn open(&self) -> usize {
        0
    }
}

/// Content of a line.
pub(super) enum Read {
    /// A request.
    Request(TraceRequest),
    /// Requests that cannot be replayed: failures, and missing lines.
    Skipped(usize),
    /// No complete request: another line completes it.
    Nothing,
}

/// Numbers of sessions by name, each with a time: the end or the arrival of its last request.
#[derive(Default)]
pub(super) struct Sessions {
    known: HashMap<String, (u64, Option<Duration>)>,
}

impl Sessions {
    /// Number of the session `name`, and the last time given to [`set`](Self::set).
    pub fn get(&mut self, name: String) -> (u64, Option<Duration>) {
        let next = self.known.len() as u64;
        *self.known.entry(name).or_insert((next, None))
    }

    /// Sets the time of the session `name`.
    pub fn set(&mut self, name: String, time: Option<Duration>) {
        let (number, _) = self.get(name.clone());
        self.known.insert(name, (number, time));
    }
}

/// Maximum time in seconds: 30,000 years, so that times can be added.
const MAX_SECONDS: f64 = 1e12;

/// Converts a number of seconds since some moment.
pub(super) fn seconds(value: f64) -> Result<Duration, String> {
    let time = Duration::try_from_secs_f64(value).ok().filter(|_| value <= MAX_SECONDS);
    time.ok_or_else(|| format!("{value} is not a time"))
}
