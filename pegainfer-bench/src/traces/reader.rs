//! What the readers of all formats have in common.

use super::format::Format;
use super::request::TraceRequest;
use std::collections::HashMap;
use std::time::Duration;

/// Reads the lines of one format.
pub(super) trait Reader {
    /// The format.
    fn format(&self) -> &'static Format;

    /// Reads a line behind the header; the error says what is wrong with it. Times count from any moment on, which is the same for all
    /// lines of a file.
    fn read(&mut self, line: &str) -> Result<Read, String>;

    /// Requests that no line has completed yet.
    fn open(&self) -> usize {
        0
    }
}

/// What a line says.
pub(super) enum Read {
    /// A request.
    Request(TraceRequest),
    /// Requests that cannot be sent again: failures, and lines that are missing.
    Skipped(usize),
    /// Nothing of its own: a request that another line completes.
    Nothing,
}

/// Numbers of sessions by their names, each with a time: of the end or the arrival of its last request.
#[derive(Default)]
pub(super) struct Sessions {
    known: HashMap<String, (u64, Option<Duration>)>,
}

impl Sessions {
    /// Number of the session `name`, and the time that [`set`](Self::set) was given last.
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

/// Latest time, seconds: 30,000 years, so that times can be added.
const MAX_SECONDS: f64 = 1e12;

/// A number of seconds since some moment.
pub(super) fn seconds(value: f64) -> Result<Duration, String> {
    let time = Duration::try_from_secs_f64(value).ok().filter(|_| value <= MAX_SECONDS);
    time.ok_or_else(|| format!("{value} is not a time"))
}
