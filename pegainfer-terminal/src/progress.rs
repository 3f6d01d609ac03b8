//! Progress of long work: a bar if standard error is a terminal, otherwise log lines.

use crate::printable::one_line;
use indicatif::{DecimalBytes, HumanDuration, ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Interval between log lines, and delay of the first one: short work logs none.
const INTERVAL: Duration = Duration::from_secs(10);

/// Unit of progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Requests.
    Requests,
}

/// Progress of one long operation.
pub struct Progress {
    /// Description of the work, such as `downloading model.safetensors`.
    what: String,
    unit: Unit,
    total: u64,
    done: u64,
    /// Progress before this process.
    before: u64,
    started: Instant,
    /// `None` if standard error is not a terminal.
    bar: Option<ProgressBar>,
    logged: Instant,
}

impl Progress {
    /// Shows the progress of `what`, starting at `done`.
    pub fn start(what: impl Into<String>, unit: Unit, done: u64, total: u64) -> Self {
        let (what, now) = (what.into(), Instant::now());
        let bar = std::io::stderr().is_terminal().then(|| bar(&what, unit, done, total));
        Self { what, unit, total, done, before: done, started: now, bar, logged: now }
    }

    /// Sets the total, which may become known only after the work has begun.
    pub fn set_total(&mut self, total: u64) {
        // Unlike an added count, a set length always draws the bar.
        if let Some(bar) = self.bar.as_ref().filter(|_| total != self.total) {
            bar.set_length(total);
        }
        self.total = total;
    }

    /// Counts more work.
    pub fn add(&mut self, count: u64) {
        self.set(self.done + count);
    }

    /// Sets the work that is done.
    pub fn set(&mut self, done: u64) {
        self.done = done;
        match &self.bar {
            Some(bar) => bar.set_position(done),
            None if self.logged.elapsed() >= INTERVAL => {
                self.logged = Instant::now();
                log::info!("{}", self.line(self.started.elapsed()));
            }
            None => {}
        }
    }

    /// Ends the work and removes the bar.
    pub fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn line(&self, elapsed: Duration) -> String {
        let rate = self.done.saturating_sub(self.before) as f64 / elapsed.as_secs_f64().max(1e-9);
        let left = self.total.saturating_sub(self.done) as f64 / rate.max(1e-9);
        let left = HumanDuration(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX));
        match self.unit {
            Unit::Bytes => {
                let [done, total, rate] = [self.done, self.total, rate as u64].map(DecimalBytes);
                format!("{}: {done} of {total}, {rate}/s, {left} left", self.what)
            }
            Unit::Requests => format!("{}: {} of {}, {rate:.2}/s, {left} left", self.what, self.done, self.total),
        }
    }
}

fn bar(what: &str, unit: Unit, done: u64, total: u64) -> ProgressBar {
    let template = match unit {
        Unit::Bytes => "{msg} [{wide_bar}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} ({eta})",
        Unit::Requests => "{msg} [{wide_bar}] {pos}/{len} {per_sec} ({eta})",
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(total).with_style(style).with_message(one_line(what).into_owned()).with_position(done);
    bar.reset_eta();
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_amount_rate_and_time_left() {
        let mut progress = Progress::start("downloading a", Unit::Bytes, 1_000_000, 5_000_000);
        progress.add(2_000_000);
        let line = progress.line(Duration::from_secs(2));
        assert_eq!(line, "downloading a: 3.00 MB of 5.00 MB, 1.00 MB/s, 2 seconds left");
        let mut progress = Progress::start("run-batch", Unit::Requests, 0, 10);
        progress.add(5);
        assert_eq!(progress.line(Duration::from_secs(1)), "run-batch: 5 of 10, 5.00/s, 1 second left");
    }
}
