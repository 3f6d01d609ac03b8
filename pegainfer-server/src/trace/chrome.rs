//! Traces in Chrome's JSON format, which <https://ui.perfetto.dev> and `chrome://tracing` open.

use anyhow::{Context, Result};
use fastrace::collector::{EventRecord, Reporter, SpanRecord};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Size in bytes after which a new file is started: viewers hold a whole file in memory.
const MAX_FILE: u64 = 64 << 20;
const END: &[u8] = b"\n]\n";

/// A directory of trace files. Each file is valid JSON after every trace, so the server may end at any time.
#[derive(Debug)]
pub struct ChromeFiles {
    dir: PathBuf,
    file: File,
    /// Length of the file in bytes, without [`END`].
    length: u64,
    files: usize,
    /// Number of timeline rows so far: one for each choice of each request.
    rows: usize,
    failed: bool,
}

impl ChromeFiles {
    /// Starts a file in `dir`, which is created if it does not exist.
    pub fn create(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("--trace-dir {} cannot be created", dir.display()))?;
        let (file, length) = open(dir, 0)?;
        Ok(Self { dir: dir.to_path_buf(), file, length, files: 1, rows: 0, failed: false })
    }

    fn append(&mut self, spans: &[SpanRecord]) -> Result<()> {
        if self.length > MAX_FILE {
            (self.file, self.length) = open(&self.dir, self.files)?;
            self.files += 1;
        }
        let mut text = Vec::new();
        for event in self.events(spans) {
            let comma = self.length > 1 || !text.is_empty();
            text.extend_from_slice(if comma { b",\n" } else { b"\n" });
            serde_json::to_writer(&mut text, &event)?;
        }
        self.file.seek(SeekFrom::Start(self.length))?;
        self.length += text.len() as u64;
        text.extend_from_slice(END);
        self.file.write_all(&text)?;
        Ok(())
    }

    /// Trace events of the spans. Each request starts with its root span, which has the request's id.
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

/// Starts a file with an empty list of events; returns it and its length without [`END`].
fn open(dir: &Path, number: usize) -> Result<(File, u64)> {
    let path = dir.join(format!("pegainfer-{}-{number}.json", std::process::id()));
    let mut file = File::create(&path).with_context(|| format!("{} cannot be written", path.display()))?;
    file.write_all(b"[")?;
    file.write_all(END)?;
    Ok((file, 1))
}

impl Reporter for ChromeFiles {
    fn report(&mut self, spans: Vec<SpanRecord>) {
        if let Err(error) = self.append(&spans)
            && !std::mem::replace(&mut self.failed, true)
        {
            log::error!("traces are lost: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    #[test]
    fn the_file_is_valid_json_after_every_trace() {
        let dir = TempDir::new("chrome");
        let mut files = ChromeFiles::create(dir.path()).unwrap();
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

    #[test]
    fn a_large_file_is_followed_by_another_one() {
        let dir = TempDir::new("chrome");
        let mut files = ChromeFiles::create(dir.path()).unwrap();
        files.length = MAX_FILE + 1;
        files.report(vec![SpanRecord::default()]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
