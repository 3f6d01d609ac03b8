//! A thread that writes the lines of a recording. Whoever hands it a line never waits: lines that it cannot keep up with are left out,
//! and a line says how many. If the file cannot be written any more, the recording ends and the server goes on.

use super::format::{Header, Line};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

/// Lines that may wait, and their bytes.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_BYTES: usize = 64 << 20;
/// Maximum time that [`Writer::flush`] waits.
const FLUSH: Duration = Duration::from_secs(5);

enum Message {
    Line(Vec<u8>),
    /// A line that is not text yet, and how many bytes it counts for.
    Event(Line, usize),
    /// All lines before it are to be in the file.
    Flush(SyncSender<()>),
}

/// The side of those that have lines. Clones are of the same file.
#[derive(Debug, Clone)]
pub(super) struct Writer {
    lines: SyncSender<Message>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Bytes that wait.
    waiting: AtomicUsize,
    /// Lines that were left out and that no line in the file counts yet.
    missing: AtomicU64,
}

impl Writer {
    /// Creates `file`, which must not exist, with its header.
    pub fn create(file: &Path, header: &Header) -> std::io::Result<Self> {
        let mut out = BufWriter::new(File::create_new(file)?);
        out.write_all(&json(header)?)?;
        out.flush()?;
        let (lines, waiting) = sync_channel(MAX_WAITING);
        let counts = Arc::new(Counts::default());
        let (shared, name) = (counts.clone(), file.display().to_string());
        std::thread::Builder::new().name("record".into()).spawn(move || {
            if let Err(error) = run(&mut out, &waiting, &shared) {
                log::error!("{name} cannot be written, the recording ends: {error}");
            }
        })?;
        Ok(Self { lines, counts })
    }

    /// Hands over a line.
    pub fn write(&self, line: &Line) {
        let Ok(line) = json(line) else { return };
        let bytes = line.len();
        self.send(Message::Line(line), bytes);
    }

    /// Hands over a line that takes about `bytes` bytes; the thread that writes it makes it text.
    pub fn write_later(&self, line: Line, bytes: usize) {
        self.send(Message::Event(line, bytes), bytes);
    }

    fn send(&self, message: Message, bytes: usize) {
        let fits = self.counts.waiting.fetch_add(bytes, Ordering::Relaxed) + bytes <= MAX_WAITING_BYTES;
        if !fits || self.lines.try_send(message).is_err() {
            self.counts.waiting.fetch_sub(bytes, Ordering::Relaxed);
            self.counts.missing.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all lines so far are in the file.
    pub fn flush(&self) {
        let (done, waiting) = sync_channel(1);
        if self.lines.send(Message::Flush(done)).is_ok() {
            // Nobody answers if the file cannot be written.
            let _ = waiting.recv_timeout(FLUSH);
        }
    }
}

/// One line with its newline.
fn json(value: &impl serde::Serialize) -> std::io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Writes until nobody has lines any more. What waits is written together.
fn run(out: &mut BufWriter<File>, waiting: &Receiver<Message>, counts: &Counts) -> std::io::Result<()> {
    loop {
        let message = match waiting.try_recv() {
            Ok(message) => message,
            Err(TryRecvError::Empty) => {
                out.flush()?;
                let Ok(message) = waiting.recv() else { return Ok(()) };
                message
            }
            Err(TryRecvError::Disconnected) => return out.flush(),
        };
        let gap = counts.missing.swap(0, Ordering::Relaxed);
        if gap > 0 {
            out.write_all(&json(&Line::Gap { gap })?)?;
        }
        match message {
            Message::Line(line) => {
                counts.waiting.fetch_sub(line.len(), Ordering::Relaxed);
                out.write_all(&line)?;
            }
            Message::Event(line, bytes) => {
                counts.waiting.fetch_sub(bytes, Ordering::Relaxed);
                out.write_all(&json(&line)?)?;
            }
            Message::Flush(done) => {
                out.flush()?;
                let _ = done.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::prompts::Prompts;
    use super::*;

    #[test]
    fn lines_that_do_not_fit_are_counted() {
        let (sender, receiver) = sync_channel(2);
        let writer = Writer { lines: sender, counts: Arc::default() };
        (0..5).for_each(|gap| writer.write(&Line::Gap { gap }));
        let file = std::env::temp_dir().join(format!("pegainfer-record-{}", std::process::id()));
        let mut out = BufWriter::new(File::create(&file).unwrap());
        let counts = writer.counts.clone();
        drop(writer);
        run(&mut out, &receiver, &counts).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "{\"gap\":3}\n{\"gap\":0}\n{\"gap\":1}\n");
        let header = Header { record: 1, model: "m".into(), version: "v".into(), prompts: Prompts::Ids };
        assert!(Writer::create(&file, &header).is_err(), "a file that is there is kept");
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_ends_the_recording_only() {
        let (sender, receiver) = sync_channel(2);
        let writer = Writer { lines: sender, counts: Arc::default() };
        let full = File::options().write(true).open("/dev/full").unwrap();
        let ended = std::thread::spawn(move || run(&mut BufWriter::new(full), &receiver, &Counts::default()));
        writer.write(&Line::Gap { gap: 1 });
        assert!(ended.join().unwrap().is_err());
        (0..10).for_each(|gap| writer.write(&Line::Gap { gap }));
        writer.flush();
    }
}
