//! Logging to standard error through logforth, one line per event.
//!
//! A log line never delays or fails what it reports: [`queue`] hands it to a thread, and drops it if that thread cannot keep up.

mod line;
mod queue;

use anyhow::{Context, Result, anyhow, bail};
use line::{JsonLine, TextLine};
use log::LevelFilter;
use logforth::Layout;
use logforth::filter::rustlog::RustLogFilterBuilder;
use pegainfer_models::args::LogFormat;
use queue::{DroppedLines, QueueAppender};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;

static DROPPED: DroppedLines = DroppedLines::new();

/// Number of log lines that were dropped since the start, because standard error was full, closed or slow.
pub fn dropped_lines() -> u64 {
    DROPPED.total()
}

/// Starts logging. `spec` is a level, or a comma-separated list of levels for modules.
pub fn init(spec: &str, format: LogFormat) -> Result<()> {
    if !is_valid(spec) {
        bail!("--log-level {spec} is not a level: use error, warn, info, debug or trace");
    }
    let filter = RustLogFilterBuilder::from_spec(spec.to_string());
    let layout: Box<dyn Layout> = match format {
        LogFormat::Text => Box::new(TextLine::default()),
        LogFormat::Json => Box::new(JsonLine::default()),
    };
    let appender = QueueAppender::start(layout, std::io::stderr(), &DROPPED).context("no thread for the log")?;
    logforth::starter_log::builder()
        .dispatch(|d| d.filter(filter.build()).append(appender))
        .try_apply()
        .map_err(|e| anyhow!("logging cannot be started: {e}"))?;
    // A plain level also spares disabled log calls the work of building their record.
    if let Ok(level) = spec.parse::<LevelFilter>() {
        log::set_max_level(level);
    }
    Ok(())
}

/// Sends panics to the log. The default hook writes to standard error itself, and waits for ever if nobody reads that pipe.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        let place = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
        let message = info.payload_as_str().unwrap_or("no message");
        log::error!("thread {name} panicked{place}: {message}");
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            backtrace.to_string().lines().for_each(|line| log::error!("{line}"));
        }
    }));
}

/// Waits until the log is written, for a second at most.
pub fn flush() {
    log::logger().flush();
}

/// Whether each part is `level` or `module=level`. (The filter itself accepts any word as a module.)
fn is_valid(spec: &str) -> bool {
    spec.split(',').all(|part| part.rsplit('=').next().is_some_and(|level| level.parse::<LevelFilter>().is_ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_levels_are_refused() {
        for good in ["info", "WARN", "off", "info,pegainfer_server=debug", "hyper=error"] {
            assert!(is_valid(good), "{good}");
        }
        for bad in ["", "loud", "info,", "pegainfer_server", "info,x=y"] {
            assert!(!is_valid(bad), "{bad}");
        }
    }
}
