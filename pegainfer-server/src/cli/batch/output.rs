//! The file of results: appended line by line, and read at the start to find the finished requests.

use anyhow::{Context, Result, bail, ensure};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Beginning of the id of each result.
pub(super) const ID_PREFIX: &str = "batch_req_";
/// Number of hexadecimal digits after the prefix.
const ID_DIGITS: usize = 32;
/// Beginning of each line that this program writes.
const START: &str = "{\"id\":\"batch_req_";

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

/// Required fields of a line from an earlier run.
#[derive(Deserialize)]
struct WrittenLine {
    id: String,
    custom_id: String,
}

/// 128 bits of a custom_id's hash, so that millions of ids fit in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct IdHash([u8; 16]);

impl IdHash {
    pub(super) fn new(custom_id: &str) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&digest(&SHA256, custom_id.as_bytes()).as_ref()[..16]);
        Self(key)
    }
}

/// The file of results, locked against other runs.
pub(super) struct ResultsFile {
    path: PathBuf,
    file: File,
    /// Number of bytes of the complete lines.
    bytes: u64,
    tail: Tail,
    done: HashSet<IdHash>,
    failed: usize,
}

/// Text after the last line break of the file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tail {
    Empty,
    /// A result without its line break.
    Whole,
    /// A result that a killed run left incomplete.
    Cut,
}

impl ResultsFile {
    /// Opens or creates the file and reads its results. Only [`repair`](Self::repair) changes it.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let unusable = || format!("{} cannot be written", path.display());
        // Opening a pipe would wait for its reader.
        ensure!(std::fs::metadata(path).map_or(true, |found| found.is_file()), "{}", not_a_file(path));
        let file = File::options().read(true).append(true).create(true).open(path).with_context(unusable)?;
        ensure!(file.metadata().with_context(unusable)?.is_file(), "{}", not_a_file(path));
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("another process writes to {}", path.display()),
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) => log::warn!("{} cannot be locked: {error}", path.display()),
        }
        let mut output =
            Self { path: path.to_path_buf(), file, bytes: 0, tail: Tail::Empty, done: HashSet::new(), failed: 0 };
        output.read().with_context(|| format!("{} cannot be continued", path.display()))?;
        Ok(output)
    }

    /// Reads the existing results.
    fn read(&mut self) -> Result<()> {
        let mut reader = BufReader::new(&self.file);
        let (mut line, mut number) = (Vec::new(), 0);
        loop {
            line.clear();
            // A file of another kind may have no line breaks: its first byte is enough.
            if reader.by_ref().take(1).read_to_end(&mut line)? == 0 {
                return Ok(());
            }
            number += 1;
            ensure!(line == b"{", "line {number} is not a result: give another --output-file");
            reader.read_until(b'\n', &mut line)?;
            match serde_json::from_slice::<WrittenLine>(&line) {
                Ok(WrittenLine { id, custom_id }) if id.starts_with(ID_PREFIX) => {
                    let is_new = self.done.insert(IdHash::new(&custom_id));
                    ensure!(is_new, "line {number} is a second result of {custom_id:?}");
                }
                // A fragment after complete results is a truncated result. A fragment alone must begin like a file of
                // this program.
                Err(_) if is_beginning(&line) && (number > 1 || has_custom_id(&line)) => {
                    self.tail = Tail::Cut;
                    return Ok(());
                }
                _ => bail!("line {number} is not a result: give another --output-file"),
            }
            self.bytes += line.len() as u64;
            if !line.ends_with(b"\n") {
                self.tail = Tail::Whole;
            }
        }
    }

    /// Makes the file end with a complete line: removes the incomplete line of a killed run, or adds the missing line
    /// break.
    pub(super) fn repair(&mut self) -> Result<()> {
        let repaired = match std::mem::replace(&mut self.tail, Tail::Empty) {
            Tail::Empty => Ok(()),
            Tail::Cut => self.file.set_len(self.bytes),
            Tail::Whole => {
                self.bytes += 1;
                self.file.write_all(b"\n")
            }
        };
        repaired.with_context(|| format!("{} cannot be written", self.path.display()))
    }

    /// Checks that the file has exactly the bytes that were written.
    pub(super) fn verify(&self) -> Result<()> {
        let path = self.path.display();
        self.file.sync_data().with_context(|| format!("{path} cannot be written"))?;
        let bytes = std::fs::metadata(&self.path).with_context(|| format!("{path} was removed during the run"))?.len();
        ensure!(
            bytes == self.bytes,
            "{path} was changed by something else during the run: it has {bytes} bytes, {} were written",
            self.bytes
        );
        Ok(())
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

    /// True if the file has the result of a request.
    pub(super) fn has(&self, custom_id: &str) -> bool {
        self.done.contains(&IdHash::new(custom_id))
    }

    /// Appends a result.
    pub(super) fn append(&mut self, result: &ResultLine) -> Result<()> {
        let mut line = serde_json::to_vec(result).context("a result cannot be written as JSON")?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| format!("{} cannot be written", self.path.display()))?;
        self.bytes += line.len() as u64;
        self.done.insert(IdHash::new(&result.custom_id));
        self.failed += usize::from(result.response.as_ref().is_none_or(|response| response.status_code != 200));
        Ok(())
    }
}

fn not_a_file(path: &Path) -> String {
    format!("{} is not a regular file: results are read again from --output-file to go on after a stop", path.display())
}

/// True if the text is an incomplete line of this program.
fn is_beginning(text: &[u8]) -> bool {
    let start = &START.as_bytes()[..text.len().min(START.len())];
    text.starts_with(start) && !text.ends_with(b"\n")
}

/// True if the text begins with the id of a result of this program and a custom_id.
fn has_custom_id(text: &[u8]) -> bool {
    let Some(rest) = text.strip_prefix(START.as_bytes()).filter(|rest| rest.len() > ID_DIGITS) else { return false };
    let (id, rest) = rest.split_at(ID_DIGITS);
    id.iter().all(u8::is_ascii_hexdigit) && rest.starts_with(b"\",\"custom_id\":\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;

    fn result(custom_id: &str) -> ResultLine {
        let response = Response { status_code: 200, request_id: "r".into(), body: RawValue::NULL.to_owned() };
        ResultLine { id: format!("{ID_PREFIX}1"), custom_id: custom_id.into(), response: Some(response), error: None }
    }

    #[test]
    fn a_stopped_run_is_continued() {
        let dir = TempDir::new("batch-output");
        let path = dir.path().join("results.jsonl");
        let mut output = ResultsFile::open(&path).unwrap();
        output.append(&result("a")).unwrap();
        output.append(&result("b")).unwrap();
        let error = ResultsFile::open(&path).err().unwrap().to_string();
        assert!(error.starts_with("another process writes to "), "{error}");
        drop(output);
        let whole = std::fs::read(&path).unwrap();
        let second = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        // Wherever the second line is cut off, the first one stays and the second is written again.
        for cut in second..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut output = ResultsFile::open(&path).unwrap();
            let only_its_line_break = cut == whole.len() - 1;
            assert_eq!((output.has("a"), output.has("b")), (true, only_its_line_break), "{cut}");
            output.repair().unwrap();
            if !only_its_line_break {
                output.append(&result("b")).unwrap();
            }
            assert_eq!(std::fs::read(&path).unwrap(), whole);
            output.verify().unwrap();
        }
    }

    #[test]
    fn a_first_result_is_removed_only_if_it_must_be_of_this_program() {
        let dir = TempDir::new("batch-first-output");
        let path = dir.path().join("results.jsonl");
        let id = format!("{ID_PREFIX}{}", "0123456789abcdef".repeat(2));
        let whole = serde_json::to_string(&ResultLine { id, ..result("a") }).unwrap();
        let known = START.len() + ID_DIGITS + "\",\"custom_id\":\"".len();
        for cut in 1..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let output = ResultsFile::open(&path);
            assert_eq!(output.is_ok(), cut >= known, "{cut}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), whole[..cut], "opening changes nothing");
            if let Ok(mut output) = output {
                output.repair().unwrap();
                assert_eq!((output.done(), std::fs::read(&path).unwrap().len()), (0, 0), "{cut}");
            }
        }
    }

    #[test]
    fn a_file_that_others_changed_is_not_called_complete() {
        let dir = TempDir::new("batch-changed-output");
        let path = dir.path().join("results.jsonl");
        let mut output = ResultsFile::open(&path).unwrap();
        output.append(&result("a")).unwrap();
        output.verify().unwrap();
        std::fs::write(&path, "").unwrap();
        let error = output.verify().unwrap_err().to_string();
        assert!(error.contains("was changed by something else during the run: it has 0 bytes"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let error = output.verify().unwrap_err().to_string();
        assert!(error.contains("was removed during the run"), "{error}");
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let dir = TempDir::new("batch-other-output");
        let path = dir.path().join("notes.txt");
        let first = serde_json::to_string(&result("a")).unwrap();
        let beginning = &START[..START.len() - 3];
        let foreign = [
            "notes",
            "notes\n",
            "{",
            "{\n",
            beginning,
            START,
            &format!("{first}\n{beginning}x"),
            "{\"custom_id\": \"a\"}\n",
            &format!("{first}\n{first}\n"),
        ];
        for text in foreign {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", ResultsFile::open(&path).err().unwrap());
            assert!(error.contains("cannot be continued: line "), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
