//! Traces in Chrome's JSON format, for <https://ui.perfetto.dev> and `chrome://tracing`.

use anyhow::{Context, Result, ensure};
use fastrace::collector::{EventRecord, Reporter, SpanRecord};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Maximum size of one file in bytes: viewers hold a whole file in memory. If the limit of all files is low, files are
/// smaller, so that deleting the oldest one leaves most of the traces.
const MAX_FILE: u64 = 64 << 20;
/// Minimum number of files that fit into the limit.
const MIN_FILES: u64 = 8;
/// Maximum number of trace files that are kept.
const MAX_FILES: usize = 1000;
/// End of every file.
const END: &[u8] = b"\n]\n";

/// A directory of trace files. Each file is valid JSON after every trace, even on a full disk, so the server may end at
/// any time. The oldest files are deleted when all of them together would exceed a limit.
#[derive(Debug)]
pub struct ChromeFiles {
    dir: PathBuf,
    /// Maximum size in bytes of all trace files in the directory.
    max_bytes: u64,
    /// The file that traces are appended to; `None` after it could not be created.
    current: Option<TraceFile>,
    /// Other trace files of the directory with their sizes, oldest first.
    older: VecDeque<(PathBuf, u64)>,
    /// Number in the name of the next file.
    number: usize,
    /// Number of timeline rows so far: one for each choice of each request.
    rows: usize,
    /// True if the last trace was lost, which the log reports once.
    failed: bool,
}

impl ChromeFiles {
    /// Starts a file in `dir`, which is created if necessary. All trace files in `dir`, including those of earlier
    /// servers, take at most `max_bytes`.
    pub fn create(dir: &Path, max_bytes: u64) -> Result<Self> {
        let unusable = || format!("--trace-dir {} cannot be used", dir.display());
        std::fs::create_dir_all(dir).with_context(unusable)?;
        let older = trace_files(dir).with_context(unusable)?;
        let dir = dir.to_path_buf();
        let mut files = Self { dir, max_bytes, current: None, older, number: 0, rows: 0, failed: false };
        files.start_file().with_context(unusable)?;
        Ok(files)
    }

    fn append(&mut self, spans: &[SpanRecord]) -> Result<()> {
        let mut text = Vec::new();
        for event in self.events(spans) {
            text.extend_from_slice(b",\n");
            serde_json::to_writer(&mut text, &event)?;
        }
        let size = text.len() as u64;
        ensure!(size <= self.max_bytes, "a trace of {size} bytes is larger than --trace-max-bytes");
        let max_file = MAX_FILE.min(self.max_bytes / MIN_FILES);
        if self.current.as_ref().is_none_or(|file| !file.is_empty() && file.length + size > max_file) {
            self.start_file()?;
        }
        self.make_space(size);
        let Some(file) = &mut self.current else { return Ok(()) };
        file.append(text).with_context(|| format!("{} cannot be written", file.path.display()))
    }

    /// Starts the next file.
    fn start_file(&mut self) -> Result<()> {
        let full = self.current.take();
        self.older.extend(full.map(|file| (file.path, file.length)));
        loop {
            let name = format!("pegainfer-{}-{}.json", std::process::id(), self.number);
            self.number += 1;
            let path = self.dir.join(name);
            match TraceFile::create(&path) {
                Ok(file) => self.current = Some(file),
                // In a container every server has the same process id.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error).with_context(|| format!("{} cannot be created", path.display())),
            }
            return Ok(());
        }
    }

    /// Deletes the oldest files until `more` bytes can be added.
    fn make_space(&mut self, more: u64) {
        let mut total = more + self.current.as_ref().map_or(0, |file| file.length + END.len() as u64);
        total += self.older.iter().map(|(_, length)| length).sum::<u64>();
        while total > self.max_bytes || self.older.len() >= MAX_FILES {
            let Some((path, length)) = self.older.pop_front() else { break };
            total -= length;
            if let Err(error) = std::fs::remove_file(&path) {
                log::warn!("the old trace file {} cannot be deleted: {error}", path.display());
            }
        }
    }

    /// Trace events of the spans. Each request starts with its root span, which carries the request's id.
    fn events(&mut self, spans: &[SpanRecord]) -> Vec<Value> {
        let (mut first_row, mut title) = (self.rows, String::new());
        let mut events = Vec::new();
        for span in spans {
            if let Some((_, id)) = span.properties.iter().find(|(name, _)| name == "request_id") {
                (first_row, title) = (self.rows, format!("{} {id}", span.name));
            }
            let choice = span.properties.iter().find(|(name, _)| name == "choice");
            let row = first_row + choice.and_then(|(_, choice)| choice.parse().ok()).unwrap_or(0);
            while self.rows <= row {
                let args = json!({"name": title});
                events.push(json!({"name": "thread_name", "ph": "M", "pid": 1, "tid": self.rows, "args": args}));
                self.rows += 1;
            }
            events.push(json!({
                "name": span.name, "ph": "X", "pid": 1, "tid": row, "ts": microseconds(span.begin_time_unix_ns),
                "dur": microseconds(span.duration_ns), "args": arguments(span),
            }));
            events.extend(span.events.iter().map(|event| instant(event, row)));
        }
        events
    }
}

fn instant(event: &EventRecord, row: usize) -> Value {
    let args: Map<String, Value> = event.properties.iter().map(|(k, v)| (k.to_string(), json!(v))).collect();
    let ts = microseconds(event.timestamp_unix_ns);
    json!({"name": event.name, "ph": "i", "s": "t", "pid": 1, "tid": row, "ts": ts, "args": args})
}

fn arguments(span: &SpanRecord) -> Map<String, Value> {
    let id = [("trace_id".to_string(), json!(span.trace_id.to_string()))];
    id.into_iter().chain(span.properties.iter().map(|(k, v)| (k.to_string(), json!(v)))).collect()
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// The trace files in `dir` with their sizes, oldest first.
fn trace_files(dir: &Path) -> std::io::Result<VecDeque<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for entry in dir.read_dir()? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_str().unwrap_or_default();
        // The metadata of the entry itself: links are not followed.
        let metadata = entry.metadata()?;
        if metadata.is_file() && name.starts_with("pegainfer-") && name.ends_with(".json") {
            files.push((metadata.modified()?, entry.path(), metadata.len()));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path, length)| (path, length)).collect())
}

/// One file: a JSON list of events.
#[derive(Debug)]
struct TraceFile {
    path: PathBuf,
    file: File,
    /// Length in bytes, without [`END`].
    length: u64,
}

impl TraceFile {
    /// Creates a file with an empty list. It must not exist, not even as a link.
    fn create(path: &Path) -> std::io::Result<Self> {
        let mut file = File::create_new(path)?;
        if let Err(error) = file.write_all(b"[").and_then(|()| file.write_all(END)) {
            // Report the error of the write, not of the removal.
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        Ok(Self { path: path.to_path_buf(), file, length: 1 })
    }

    fn is_empty(&self) -> bool {
        self.length == 1
    }

    /// Appends events, each of which begins with a comma. After a failure, the file keeps its earlier events.
    fn append(&mut self, mut events: Vec<u8>) -> std::io::Result<()> {
        if self.is_empty() && !events.is_empty() {
            events.remove(0);
        }
        let length = self.length + events.len() as u64;
        events.extend_from_slice(END);
        let written = self.write(&events);
        match written {
            Ok(()) => self.length = length,
            // The old end needs no additional space.
            Err(_) => self.write(END).and_then(|()| self.file.set_len(self.length + END.len() as u64))?,
        }
        written
    }

    /// Overwrites the end of the file.
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.file.seek(SeekFrom::Start(self.length))?;
        self.file.write_all(bytes)
    }
}

impl Reporter for ChromeFiles {
    fn report(&mut self, spans: Vec<SpanRecord>) {
        let result = self.append(&spans);
        let failed = std::mem::replace(&mut self.failed, result.is_err());
        match result {
            Err(error) if !failed => log::error!("traces are lost: {error:#}"),
            Ok(()) if failed => log::info!("traces are written again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;

    #[test]
    fn the_file_is_valid_json_after_every_trace() {
        let dir = TempDir::new("chrome");
        let mut files = ChromeFiles::create(dir.path(), 1 << 20).unwrap();
        let path = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let read = || serde_json::from_slice::<Vec<Value>>(&std::fs::read(&path).unwrap()).unwrap();
        assert!(read().is_empty());
        let span = |name: &'static str, value: &str| SpanRecord {
            name: "queue".into(),
            begin_time_unix_ns: 1_795_262_750_123_456_789,
            duration_ns: 1500,
            properties: vec![(name.into(), value.to_string().into())],
            events: vec![EventRecord { name: "token".into(), ..EventRecord::default() }],
            ..SpanRecord::default()
        };
        files.report(vec![span("request_id", "a"), span("choice", "0"), span("choice", "1"), span("request_id", "b")]);
        files.report(vec![span("request_id", "c")]);
        let events = read();
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        let rows: Vec<_> = of("X").iter().map(|event| event["tid"].as_u64().unwrap()).collect();
        assert_eq!(rows, [0, 0, 1, 2, 3], "requests and choices have rows of their own");
        assert_eq!((of("M").len(), of("i").len()), (4, 5));
        assert_eq!(of("X")[0]["dur"], 1.5);
    }

    /// A trace of about `bytes` bytes.
    fn trace(bytes: usize) -> Vec<SpanRecord> {
        vec![SpanRecord { properties: vec![("request_id".into(), "x".repeat(bytes).into())], ..SpanRecord::default() }]
    }

    fn sizes(dir: &TempDir) -> Vec<u64> {
        let files = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let texts: Vec<Vec<u8>> = files.map(|path| std::fs::read(path).unwrap()).collect();
        assert!(texts.iter().all(|text| serde_json::from_slice::<Vec<Value>>(text).is_ok()));
        texts.iter().map(|text| text.len() as u64).collect()
    }

    #[test]
    fn all_files_together_stay_below_the_limit() {
        let dir = TempDir::new("chrome-limit");
        std::fs::write(dir.path().join("pegainfer-0-0.json"), "[\n]\n").unwrap();
        std::fs::write(dir.path().join("other.json"), "[]").unwrap();
        let mut files = ChromeFiles::create(dir.path(), 20_000).unwrap();
        for _ in 0..100 {
            files.report(trace(500));
            assert!(sizes(&dir).iter().sum::<u64>() <= 20_002, "{:?}", sizes(&dir));
        }
        assert!(!files.failed && sizes(&dir).iter().sum::<u64>() > 12_000, "{:?}", sizes(&dir));
        assert!(!dir.path().join("pegainfer-0-0.json").exists(), "a file of an earlier server goes first");
        files.report(trace(20_000));
        assert!(files.failed, "a trace above the limit is lost");
        assert!(dir.path().join("other.json").exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_with_the_name_of_a_file_is_not_followed() {
        let dir = TempDir::new("chrome-link");
        let foreign = dir.path().join("foreign");
        std::fs::write(&foreign, "keep").unwrap();
        let name = format!("pegainfer-{}-0.json", std::process::id());
        std::os::unix::fs::symlink(&foreign, dir.path().join(name)).unwrap();
        let mut files = ChromeFiles::create(dir.path(), 1 << 20).unwrap();
        files.report(trace(10));
        assert_eq!(std::fs::read(&foreign).unwrap(), b"keep");
        assert!(!files.failed);
    }
}
