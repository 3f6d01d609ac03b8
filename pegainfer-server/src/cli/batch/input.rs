//! The file of requests: JSON lines in OpenAI's batch format.

use super::output::{IdHash, ResultsFile};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Allowed values of `url`.
const URLS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];
/// Maximum bytes of a line without the body.
const ENVELOPE: u64 = 64 << 10;

/// One request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestLine {
    custom_id: String,
    method: String,
    url: String,
    body: Box<RawValue>,
}

/// A request that is ready to be sent.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) custom_id: String,
    pub(super) url: String,
    pub(super) body: Vec<u8>,
}

/// A body field that batches must not set.
#[derive(Deserialize)]
struct Streamed {
    #[serde(default)]
    stream: serde_json::Value,
}

/// A file of requests. It is read twice, line by line: to check it, and to send its requests.
pub(super) struct RequestsFile {
    path: PathBuf,
    file: BufReader<File>,
    /// Copy of the lines of a pipe or device, which can be read only once.
    copy: Option<BufWriter<File>>,
    line: usize,
    max_body: u64,
}

impl RequestsFile {
    pub(super) fn open(path: &Path, max_body: u64) -> Result<Self> {
        let unreadable = || format!("{} cannot be read", path.display());
        let file = File::open(path).with_context(unreadable)?;
        let is_file = file.metadata().with_context(unreadable)?.is_file();
        let copy = (!is_file).then(tempfile::tempfile).transpose();
        let copy = copy.with_context(|| {
            format!("{} cannot be copied to {}: set TMPDIR", path.display(), env::temp_dir().display())
        })?;
        let (file, copy) = (BufReader::new(file), copy.map(BufWriter::new));
        Ok(Self { path: path.to_path_buf(), file, copy, line: 0, max_body })
    }

    /// Checks every line, and that each result belongs to a request. Returns the number of requests, and rewinds to the
    /// first line.
    pub(super) fn check(&mut self, output: &ResultsFile) -> Result<usize> {
        let (mut lines, mut done) = (HashMap::new(), 0);
        while let Some(request) = self.next()? {
            let id = &request.custom_id;
            if let Some(first) = lines.insert(IdHash::new(id), self.line) {
                bail!("{}, line {}: custom_id {id:?} is already on line {first}", self.path.display(), self.line);
            }
            done += usize::from(output.has(id));
        }
        ensure!(!lines.is_empty(), "{} has no request", self.path.display());
        ensure!(
            done == output.done(),
            "{} has results of requests that {} does not have: give another --output-file",
            output.path().display(),
            self.path.display()
        );
        self.rewind().with_context(|| format!("{} cannot be read a second time", self.path.display()))?;
        Ok(lines.len())
    }

    fn rewind(&mut self) -> std::io::Result<()> {
        if let Some(copy) = self.copy.take() {
            self.file = BufReader::new(copy.into_inner()?);
        }
        self.line = 0;
        self.file.rewind()
    }

    /// The next request without a result.
    pub(super) fn next_without(&mut self, output: &ResultsFile) -> Result<Option<Request>> {
        while let Some(request) = self.next()? {
            if !output.has(&request.custom_id) {
                return Ok(Some(request));
            }
        }
        Ok(None)
    }

    fn next(&mut self) -> Result<Option<Request>> {
        let mut line = Vec::new();
        loop {
            line.clear();
            let limit = self.max_body.saturating_add(ENVELOPE);
            let read = (&mut self.file).take(limit + 1).read_until(b'\n', &mut line);
            let read = read.with_context(|| format!("{} cannot be read", self.path.display()))?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            let place = || format!("{}, line {}", self.path.display(), self.line);
            ensure!(read as u64 <= limit, "{}: it has more than {limit} bytes; --max-body-size allows more", place());
            if let Some(copy) = &mut self.copy {
                copy.write_all(&line).with_context(|| format!("{} cannot be copied to a file", self.path.display()))?;
            }
            if !line.trim_ascii().is_empty() {
                return parse(&line).map(Some).map_err(|reason| anyhow::anyhow!("{}: {reason}", place()));
            }
        }
    }
}

fn parse(line: &[u8]) -> Result<Request, String> {
    let RequestLine { custom_id, method, url, body } = serde_json::from_slice(line).map_err(|error| {
        let text = error.to_string();
        // The line number of the JSON text is always 1.
        format!("it is not a request: {}", text.split(" at line ").next().unwrap_or(&text))
    })?;
    if custom_id.is_empty() {
        return Err("custom_id is empty".into());
    }
    if method != "POST" {
        return Err(format!("method must be POST, got {method:?}"));
    }
    if !URLS.contains(&url.as_str()) {
        return Err(format!("url must be one of {}, got {url:?}", URLS.join(", ")));
    }
    let streamed = serde_json::from_str::<Streamed>(body.get()).is_ok_and(|body| body.stream == true);
    if streamed {
        return Err("a batch has no streams: leave out \"stream\": true".into());
    }
    Ok(Request { custom_id, url, body: String::from(Box::<str>::from(body)).into_bytes() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_checked() {
        let line = |id: &str, method: &str, url: &str, body: &str| {
            format!(r#"{{"custom_id": "{id}", "method": "{method}", "url": "{url}", "body": {body}}}"#)
        };
        let request = parse(line("a", "POST", "/v1/completions", r#"{"prompt": "x"}"#).as_bytes()).unwrap();
        assert_eq!((request.custom_id.as_str(), request.url.as_str()), ("a", "/v1/completions"));
        assert_eq!(request.body, br#"{"prompt": "x"}"#);
        for (line, expected) in [
            ("{".into(), "it is not a request: EOF"),
            (r#"{"custom_id": "a"}"#.into(), "it is not a request: missing field `method`"),
            (r#"{"custom_id": "a", "x": 1}"#.into(), "it is not a request: unknown field `x`"),
            (line("", "POST", "/v1/completions", "{}"), "custom_id is empty"),
            (line("a", "GET", "/v1/completions", "{}"), "method must be POST, got \"GET\""),
            (line("a", "POST", "/metrics", "{}"), "url must be one of /v1/chat/completions, "),
            (line("a", "POST", "/v1/completions", r#"{"stream": true}"#), "a batch has no streams"),
        ] {
            let error = parse(line.as_bytes()).unwrap_err();
            assert!(error.starts_with(expected), "{line}: {error}");
        }
    }
}
