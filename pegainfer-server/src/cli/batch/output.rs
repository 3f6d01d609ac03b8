//! The file of results: appended line by line, and read at the start to find out what is done.

use anyhow::{Context, Result, bail, ensure};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// Beginning of the id of each result.
pub(super) const ID_PREFIX: &str = "batch_req_";

/// One line of results. The order of the fields is the order in the file.
#[derive(Debug, Serialize)]
pub(super) struct ResultLine {
    pub(super) id: String,
    pub(super) custom_id: String,
    pub(super) response: Option<Response>,
    pub(super) error: Option<Failure>,
}

/// A response of the API, whatever its status.
#[derive(Debug, Serialize)]
pub(super) struct Response {
    pub(super) status_code: u16,
    pub(super) request_id: String,
    pub(super) body: Box<RawValue>,
}

/// A request without a response.
#[derive(Debug, Serialize)]
pub(super) struct Failure {
    pub(super) code: &'static str,
    pub(super) message: String,
}

/// What a line of an earlier run must have.
#[derive(Deserialize)]
struct Written {
    id: String,
    custom_id: String,
}

/// 128 bits of a custom_id's hash, so that millions of ids fit in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; 16]);

impl Key {
    pub(super) fn of(custom_id: &str) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&digest(&SHA256, custom_id.as_bytes()).as_ref()[..16]);
        Self(key)
    }
}

/// The file of results, locked against other runs.
pub(super) struct Output {
    path: PathBuf,
    file: File,
    done: HashSet<Key>,
    failed: usize,
}

impl Output {
    /// Opens or creates the file, and removes the incomplete line that a killed run may have left.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let unusable = || format!("{} cannot be written", path.display());
        let file = File::options().read(true).append(true).create(true).open(path).with_context(unusable)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another process writes to {}", path.display()),
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) => log::warn!("{} cannot be locked: {error}", path.display()),
        }
        let mut output = Self { path: path.to_path_buf(), file, done: HashSet::new(), failed: 0 };
        let complete = output.read().with_context(|| format!("{} cannot be continued", path.display()))?;
        if complete < output.file.metadata()?.len() {
            output.file.set_len(complete).with_context(unusable)?;
        }
        Ok(output)
    }

    /// Notes the results that are there; returns the bytes of the complete lines.
    fn read(&mut self) -> Result<u64> {
        let mut reader = BufReader::new(&self.file);
        let (mut line, mut complete, mut number) = (Vec::new(), 0, 0);
        loop {
            line.clear();
            if reader.read_until(b'\n', &mut line)? == 0 {
                return Ok(complete);
            }
            number += 1;
            if !line.ends_with(b"\n") {
                ensure!(is_beginning(&line), "line {number} is not a result: give another --output-file");
                return Ok(complete);
            }
            let written: Option<Written> = serde_json::from_slice(&line).ok();
            let Some(written) = written.filter(|written| written.id.starts_with(ID_PREFIX)) else {
                bail!("line {number} is not a result: give another --output-file")
            };
            let is_new = self.done.insert(Key::of(&written.custom_id));
            ensure!(is_new, "line {number} is a second result of {:?}", written.custom_id);
            complete += line.len() as u64;
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of results in the file.
    pub(super) fn done(&self) -> usize {
        self.done.len()
    }

    /// Number of requests of this run that failed.
    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    /// Whether the file has the result of a request.
    pub(super) fn has(&self, custom_id: &str) -> bool {
        self.done.contains(&Key::of(custom_id))
    }

    /// Appends a result.
    pub(super) fn append(&mut self, result: &ResultLine) -> Result<()> {
        let mut line = serde_json::to_vec(result).context("a result cannot be written as JSON")?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| format!("{} cannot be written", self.path.display()))?;
        self.done.insert(Key::of(&result.custom_id));
        self.failed += usize::from(result.response.as_ref().is_none_or(|response| response.status_code != 200));
        Ok(())
    }
}

/// Whether the text may be the beginning of a result, so that removing it loses nothing else.
fn is_beginning(text: &[u8]) -> bool {
    let start = format!("{{\"id\":\"{ID_PREFIX}");
    let length = text.len().min(start.len());
    text[..length] == start.as_bytes()[..length]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    fn result(custom_id: &str) -> ResultLine {
        let response = Response { status_code: 200, request_id: "r".into(), body: RawValue::NULL.to_owned() };
        ResultLine { id: format!("{ID_PREFIX}1"), custom_id: custom_id.into(), response: Some(response), error: None }
    }

    #[test]
    fn a_stopped_run_is_continued() {
        let dir = TempDir::new("batch-output");
        let path = dir.path().join("results.jsonl");
        let mut output = Output::open(&path).unwrap();
        output.append(&result("a")).unwrap();
        output.append(&result("b")).unwrap();
        let error = Output::open(&path).err().unwrap().to_string();
        assert!(error.starts_with("another process writes to "), "{error}");
        drop(output);
        let whole = std::fs::read(&path).unwrap();
        let second = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        // Wherever the second line was cut off, the first one stays, and the second is written again.
        for cut in second..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut output = Output::open(&path).unwrap();
            assert_eq!((output.done(), output.has("a"), output.has("b")), (1, true, false), "{cut}");
            output.append(&result("b")).unwrap();
            drop(output);
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let dir = TempDir::new("batch-other-output");
        let path = dir.path().join("notes.txt");
        let first = serde_json::to_string(&result("a")).unwrap();
        for text in ["notes", "notes\n", "{\"custom_id\": \"a\"}\n", &format!("{first}\n{first}\n")] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", Output::open(&path).err().unwrap());
            assert!(error.contains("cannot be continued: line "), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
