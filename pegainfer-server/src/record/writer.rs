//! A thread that writes the lines of a recording. Callers never wait: lines that it cannot keep up with are dropped,
//! and a line reports their number. If the file can no longer be written, the recording ends and the server continues.

use crate::flush::flush;
use pegainfer_bench::recording::format::{Header, RecordLine};
use std::fs::File;
use std::io::{BufWriter, Error, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

/// Maximum number of waiting lines, and of their bytes.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_BYTES: usize = 64 << 20;
/// Maximum time that [`RecordWriter::flush`] waits.
const FLUSH: Duration = Duration::from_secs(5);

enum Message {
    Line(Vec<u8>),
    /// A line that is not serialised yet, and its estimated bytes.
    Event(RecordLine, usize),
    /// A request to write all lines before it to the file.
    Flush(SyncSender<()>),
}

/// The handle of callers. Clones share the file.
#[derive(Debug, Clone)]
pub(super) struct RecordWriter {
    lines: SyncSender<Message>,
    counts: Arc<LineCounts>,
}

#[derive(Debug, Default)]
struct LineCounts {
    /// Number of waiting bytes.
    waiting: AtomicUsize,
    /// Dropped lines that no line in the file reports yet.
    missing: AtomicU64,
    /// Total number of dropped lines.
    lost: AtomicU64,
    /// True after the file could not be written or reached its maximum size.
    ended: AtomicBool,
}

impl RecordWriter {
    /// Creates `file`, which must not exist, with its header. The file grows to at most `max_bytes`.
    pub fn create(file: &Path, header: &Header, max_bytes: u64) -> std::io::Result<Self> {
        let mut out = RecordFile::new(File::create_new(file)?, max_bytes);
        out.write(&json(header)?)?;
        out.lines.flush()?;
        Self::start(out, file.display().to_string())
    }

    /// Starts the writer thread.
    fn start(mut out: RecordFile<impl Write + Send + 'static>, name: String) -> std::io::Result<Self> {
        let (lines, waiting) = sync_channel(MAX_WAITING);
        let counts = Arc::new(LineCounts::default());
        let shared = counts.clone();
        std::thread::Builder::new().name("record".into()).spawn(move || {
            if let Err(error) = run(&mut out, &waiting, &shared) {
                shared.ended.store(true, Ordering::Relaxed);
                log::error!("the recording {name} ends, the server continues: {error}");
            }
        })?;
        Ok(Self { lines, counts })
    }

    /// Queues a line. Returns false if it was dropped.
    pub fn write(&self, line: &RecordLine) -> bool {
        if self.has_ended() {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let Ok(line) = json(line) else { return false };
        let bytes = line.len();
        self.send(Message::Line(line), bytes)
    }

    /// Queues a line of about `bytes` bytes; the writer thread serialises it.
    pub fn write_later(&self, line: RecordLine, bytes: usize) {
        self.send(Message::Event(line, bytes), bytes);
    }

    /// True after the recording ended, although the server continues.
    pub fn has_ended(&self) -> bool {
        self.counts.ended.load(Ordering::Relaxed)
    }

    /// Number of dropped lines.
    pub fn lost_lines(&self) -> u64 {
        self.counts.lost.load(Ordering::Relaxed)
    }

    fn send(&self, message: Message, bytes: usize) -> bool {
        let fits = self.counts.waiting.fetch_add(bytes, Ordering::Relaxed) + bytes <= MAX_WAITING_BYTES;
        let is_sent = fits && self.lines.try_send(message).is_ok();
        if !is_sent {
            self.counts.waiting.fetch_sub(bytes, Ordering::Relaxed);
            self.counts.missing.fetch_add(1, Ordering::Relaxed);
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
        }
        is_sent
    }

    /// Waits until all lines so far are in the file, at most for [`FLUSH`].
    pub fn flush(&self) {
        self.flush_within(FLUSH);
    }

    fn flush_within(&self, limit: Duration) {
        if !flush(&self.lines, Message::Flush, limit) && !self.has_ended() {
            log::warn!("the end of the recording is not written: the disk takes longer than {limit:?}");
        }
    }
}

/// The file, and the bytes by which it may still grow.
struct RecordFile<W: Write> {
    lines: BufWriter<W>,
    left: u64,
    max_bytes: u64,
}

impl<W: Write> RecordFile<W> {
    fn new(file: W, max_bytes: u64) -> Self {
        Self { lines: BufWriter::new(file), left: max_bytes, max_bytes }
    }

    fn write(&mut self, line: &[u8]) -> std::io::Result<()> {
        let Some(left) = self.left.checked_sub(line.len() as u64) else {
            // Keep the lines that fit.
            self.lines.flush()?;
            let message = format!(
                "it has {} bytes, at most {} are allowed (--record-max-bytes)",
                self.max_bytes - self.left,
                self.max_bytes
            );
            return Err(Error::other(message));
        };
        self.left = left;
        self.lines.write_all(line)
    }
}

/// One line with its newline.
fn json(value: &impl serde::Serialize) -> std::io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Writes until all callers are gone. Waiting lines are written together.
fn run<W: Write>(out: &mut RecordFile<W>, waiting: &Receiver<Message>, counts: &LineCounts) -> std::io::Result<()> {
    loop {
        let message = match waiting.try_recv() {
            Ok(message) => message,
            Err(TryRecvError::Empty) => {
                out.lines.flush()?;
                let Ok(message) = waiting.recv() else { return Ok(()) };
                message
            }
            Err(TryRecvError::Disconnected) => return out.lines.flush(),
        };
        let gap = counts.missing.swap(0, Ordering::Relaxed);
        if gap > 0 {
            out.write(&json(&RecordLine::Gap { gap })?)?;
        }
        match message {
            Message::Line(line) => {
                counts.waiting.fetch_sub(line.len(), Ordering::Relaxed);
                out.write(&line)?;
            }
            Message::Event(line, bytes) => {
                counts.waiting.fetch_sub(bytes, Ordering::Relaxed);
                out.write(&json(&line)?)?;
            }
            Message::Flush(done) => {
                out.lines.flush()?;
                let _ = done.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_bench::recording::Prompts;
    use pegainfer_bench::recording::format::Added;
    use pegainfer_core::engine::GenerateRequest;
    use pegainfer_testing::TempDir;
    use std::time::Instant;

    #[test]
    fn lines_that_do_not_fit_are_counted() {
        let (sender, receiver) = sync_channel(2);
        let writer = RecordWriter { lines: sender, counts: Arc::default() };
        assert_eq!(
            [0, 1, 2, 3, 4].map(|gap| writer.write(&RecordLine::Gap { gap })),
            [true, true, false, false, false]
        );
        let file = std::env::temp_dir().join(format!("pegainfer-record-{}", std::process::id()));
        let mut out = RecordFile::new(File::create(&file).unwrap(), 1000);
        let counts = writer.counts.clone();
        assert_eq!(writer.lost_lines(), 3);
        drop(writer);
        run(&mut out, &receiver, &counts).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "{\"gap\":3}\n{\"gap\":0}\n{\"gap\":1}\n");
        let header = Header { record: 1, model: "m".into(), version: "v".into(), prompts: Prompts::Ids };
        assert!(RecordWriter::create(&file, &header, 1000).is_err(), "a file that is there is kept");
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_ends_the_recording_only() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let writer = RecordWriter::start(RecordFile::new(full, u64::MAX), "/dev/full".into()).unwrap();
        assert!(!writer.has_ended());
        writer.write(&RecordLine::Gap { gap: 1 });
        wait_until_ended(&writer);
        for gap in 0..10 {
            writer.write(&RecordLine::Gap { gap });
        }
        writer.flush();
        assert!(writer.lost_lines() >= 10);
    }

    fn wait_until_ended(writer: &RecordWriter) {
        let started = Instant::now();
        while !writer.has_ended() {
            assert!(started.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_recording_ends_at_its_maximum_size() {
        let dir = TempDir::new("record-size");
        let file = dir.path().join("requests.jsonl");
        let header = Header { record: 1, model: "m".into(), version: "v".into(), prompts: Prompts::Ids };
        let lines = json(&header).unwrap().len() as u64 + 10 * json(&RecordLine::Gap { gap: 1 }).unwrap().len() as u64;
        let writer = RecordWriter::create(&file, &header, lines + 3).unwrap();
        for _ in 0..11 {
            writer.write(&RecordLine::Gap { gap: 1 });
        }
        wait_until_ended(&writer);
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!((text.len() as u64, text.lines().count(), text.ends_with('\n')), (lines, 11, true));
        assert!(!writer.write(&RecordLine::Gap { gap: 1 }));
    }

    /// The queue and the pipe are full, and nobody reads them: the disk hangs.
    #[test]
    fn a_disk_that_hangs_does_not_hang_the_exit() {
        let (_reader, pipe) = std::io::pipe().unwrap();
        let writer = RecordWriter::start(RecordFile::new(pipe, u64::MAX), "pipe".into()).unwrap();
        let line =
            RecordLine::Added(Box::new(Added::new(0.0, 0, &GenerateRequest::greedy([7; 100], 1), Prompts::Ids, None)));
        while writer.write(&line) {}
        assert!(!writer.has_ended());
        let started = Instant::now();
        writer.flush_within(Duration::from_millis(100));
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }
}
