//! A log appender that never blocks its callers: lines go through a bounded queue to a thread that writes them.
//!
//! A line that does not fit into the queue, because nobody reads the pipe that the log goes to, is dropped and counted; so is a line
//! that cannot be written, because the pipe is closed or the disk is full. Once lines can be written again, the first one says how
//! many were lost.

use logforth::append::Append;
use logforth::record::{Level, Record};
use logforth::{Diagnostic, Error, Layout};
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Capacity of the queue in bytes: 5,000 lines of the usual length.
const MAX_QUEUED: usize = 1 << 20;
/// Maximum time that [`Append::flush`] waits for the writer.
const FLUSH: Duration = Duration::from_secs(1);

/// Counts the log lines that were dropped.
#[derive(Debug)]
pub struct DroppedLines(AtomicU64);

impl DroppedLines {
    /// Nothing was dropped yet.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Number of lines dropped since the start.
    pub fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, lines: u64) {
        self.0.fetch_add(lines, Ordering::Relaxed);
    }
}

/// Formats records on the caller's thread and queues them as lines.
#[derive(Debug)]
pub struct QueueAppender(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    /// Signalled when lines are queued, and when all of them are written.
    changed: Condvar,
    layout: Box<dyn Layout>,
    dropped: &'static DroppedLines,
}

#[derive(Debug, Default)]
struct State {
    /// Lines that wait, each with its newline.
    lines: Vec<u8>,
    /// Whether the writer has lines that are not in `lines` any more.
    writing: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A record as one line, with its newline.
    fn line(&self, record: &Record, diagnostics: &[Box<dyn Diagnostic>]) -> Option<Vec<u8>> {
        let mut line = self.layout.format(record, diagnostics).ok()?;
        line.push(b'\n');
        Some(line)
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.state();
        if state.lines.len() + line.len() > MAX_QUEUED {
            self.dropped.add(1);
            return;
        }
        state.lines.extend_from_slice(line);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for lines and takes all of them.
    fn take(&self, mut buffer: Vec<u8>) -> Vec<u8> {
        buffer.clear();
        let mut state = self.state();
        state.writing = false;
        self.changed.notify_all();
        while state.lines.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.writing = true;
        std::mem::replace(&mut state.lines, buffer)
    }
}

impl QueueAppender {
    /// Starts the thread that writes to `sink`. Lost lines are counted in `dropped`.
    pub fn start(
        layout: impl Into<Box<dyn Layout>>,
        sink: impl Write + Send + 'static,
        dropped: &'static DroppedLines,
    ) -> std::io::Result<Self> {
        let queue =
            Arc::new(Queue { state: Mutex::default(), changed: Condvar::new(), layout: layout.into(), dropped });
        let writer = Writer { sink, cut: false, reported: dropped.total() };
        let shared = queue.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || writer.run(&shared))?;
        Ok(Self(queue))
    }
}

impl Append for QueueAppender {
    /// Queues a line, or counts it as dropped. It never fails: logforth prints an error to standard error, and panics where that
    /// fails, too.
    fn append(&self, record: &Record, diagnostics: &[Box<dyn Diagnostic>]) -> Result<(), Error> {
        match self.0.line(record, diagnostics) {
            Some(line) => self.0.push(&line),
            None => self.0.dropped.add(1),
        }
        Ok(())
    }

    /// Waits until all lines are written, but at most [`FLUSH`].
    fn flush(&self) -> Result<(), Error> {
        let busy = |state: &mut State| state.writing || !state.lines.is_empty();
        drop(self.0.changed.wait_timeout_while(self.0.state(), FLUSH, busy));
        Ok(())
    }
}

/// State of the writer thread.
struct Writer<W> {
    sink: W,
    /// Whether the last write ended within a line.
    cut: bool,
    /// Number of dropped lines that the log has reported.
    reported: u64,
}

impl<W: Write> Writer<W> {
    fn run(mut self, queue: &Queue) {
        let mut lines = Vec::new();
        loop {
            lines = queue.take(lines);
            let lost = self.write(&lines);
            queue.dropped.add(lost);
            if lost == 0 {
                self.report(queue);
            }
        }
    }

    /// Reports the lines that were dropped since the last report.
    fn report(&mut self, queue: &Queue) {
        let total = queue.dropped.total();
        if total == self.reported {
            return;
        }
        let dropped = total - self.reported;
        let payload = format_args!("{dropped} log lines were lost: standard error was full, closed or slow");
        let record = Record::builder().level(Level::Warn).target(module_path!()).payload(payload).build();
        if queue.line(&record, &[]).is_some_and(|line| self.write(&line) == 0) {
            self.reported = total;
        }
    }

    /// Writes lines; returns the number of those that were not written completely.
    fn write(&mut self, lines: &[u8]) -> u64 {
        let mut rest = lines;
        if !self.cut || self.sink.write_all(b"\n").is_ok() {
            self.cut = false;
            while !rest.is_empty() {
                match self.sink.write(rest) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => break,
                    Ok(written) => rest = &rest[written..],
                }
            }
            self.cut = !rest.is_empty() && lines[..lines.len() - rest.len()].last().is_some_and(|&byte| byte != b'\n');
        }
        rest.iter().filter(|&&byte| byte == b'\n').count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Result;
    use std::sync::mpsc::{Receiver, Sender, channel};

    #[derive(Debug)]
    struct Plain;

    impl Layout for Plain {
        fn format(&self, record: &Record, _: &[Box<dyn Diagnostic>]) -> std::result::Result<Vec<u8>, Error> {
            Ok(record.payload().to_string().into_bytes())
        }
    }

    /// Each write waits for the test's decision: the number of bytes to take, or an error.
    struct Scripted {
        /// A write has begun.
        begun: Sender<()>,
        decisions: Receiver<Option<usize>>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Scripted {
        fn write(&mut self, bytes: &[u8]) -> Result<usize> {
            // The test may have ended.
            let _ = self.begun.send(());
            let Ok(Some(most)) = self.decisions.recv() else { return Err(ErrorKind::StorageFull.into()) };
            let taken = bytes.len().min(most);
            self.written.send(bytes[..taken].to_vec()).unwrap();
            Ok(taken)
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    struct Setup {
        appender: QueueAppender,
        begun: Receiver<()>,
        decide: Sender<Option<usize>>,
        written: Receiver<Vec<u8>>,
        dropped: &'static DroppedLines,
    }

    fn setup() -> Setup {
        let dropped: &DroppedLines = Box::leak(Box::new(DroppedLines::new()));
        let ((decide, decisions), (sender, written), (begins, begun)) = (channel(), channel(), channel());
        let output = Scripted { begun: begins, decisions, written: sender };
        let appender = QueueAppender::start(Plain, output, dropped).unwrap();
        Setup { appender, begun, decide, written, dropped }
    }

    impl Setup {
        fn log(&self, line: &str) {
            self.appender.append(&Record::builder().payload(format_args!("{line}")).build(), &[]).unwrap();
        }

        fn next(&self) -> String {
            String::from_utf8(self.written.recv().unwrap()).unwrap()
        }
    }

    #[test]
    fn a_blocked_log_drops_lines_and_reports_how_many() {
        let log = setup();
        log.log("first");
        // The writer has taken the first line out of the queue.
        log.begun.recv().unwrap();
        let (line, lines) = ("x".repeat(1023), (MAX_QUEUED >> 10) as u64);
        (0..lines + 10).for_each(|_| log.log(&line));
        let dropped = log.dropped.total();
        assert_eq!(dropped, 10);
        (0..4).for_each(|_| log.decide.send(Some(usize::MAX)).unwrap());
        // The first line, those that fit into the queue, and the report, which comes after the write that the log was waiting for.
        let (mut text, expected) = (String::new(), 1 + (lines + 10 - dropped) + 1);
        while (text.matches('\n').count() as u64) < expected {
            text += &log.next();
        }
        assert!(text.starts_with("first\n"), "{}", &text[..20]);
        assert!(text.contains(&format!("\n{dropped} log lines were lost: ")));
    }

    #[test]
    fn a_log_that_cannot_be_written_is_counted_and_works_again_later() {
        let log = setup();
        log.decide.send(Some(4)).unwrap();
        log.decide.send(None).unwrap();
        log.log("a line that is cut off");
        assert_eq!(log.next(), "a li");
        log.appender.flush().unwrap();
        assert_eq!(log.dropped.total(), 1);
        log.decide.send(None).unwrap();
        log.log("lost");
        log.appender.flush().unwrap();
        assert_eq!(log.dropped.total(), 2);
        (0..3).for_each(|_| log.decide.send(Some(usize::MAX)).unwrap());
        log.log("written");
        assert_eq!((log.next().as_str(), log.next().as_str()), ("\n", "written\n"));
        assert!(log.next().starts_with("2 log lines were lost: "));
    }
}
