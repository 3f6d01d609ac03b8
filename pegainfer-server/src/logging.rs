//! Logging to standard error through logforth, one line per event.

use anyhow::{Result, anyhow, bail};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use log::LevelFilter;
use logforth::append::Stderr;
use logforth::filter::rustlog::RustLogFilterBuilder;
use logforth::record::Record;
use logforth::{Diagnostic, Error, Layout};
use std::io::Write;

/// Starts logging. `spec` is a level, or a comma-separated list of levels for modules.
pub fn init(spec: &str) -> Result<()> {
    if !is_valid(spec) {
        bail!("--log-level {spec} is not a level: use error, warn, info, debug or trace");
    }
    let filter = RustLogFilterBuilder::from_spec(spec.to_string());
    logforth::starter_log::builder()
        .dispatch(|d| d.filter(filter.build()).append(Stderr::default().with_layout(Line { zone: TimeZone::system() })))
        .try_apply()
        .map_err(|e| anyhow!("logging cannot be started: {e}"))?;
    // A plain level also spares disabled log calls the work of building their record.
    if let Ok(level) = spec.parse::<LevelFilter>() {
        log::set_max_level(level);
    }
    Ok(())
}

/// Whether each part is `level` or `module=level`. (The filter itself accepts any word as a module.)
fn is_valid(spec: &str) -> bool {
    spec.split(',').all(|part| part.rsplit('=').next().is_some_and(|level| level.parse::<LevelFilter>().is_ok()))
}

/// Log line `2026-11-21 11:16:07.123  INFO message`, without the source line, which operators do not need.
#[derive(Debug)]
struct Line {
    zone: TimeZone,
}

impl Layout for Line {
    fn format(&self, record: &Record, _: &[Box<dyn Diagnostic>]) -> Result<Vec<u8>, Error> {
        let mut line = Vec::with_capacity(160);
        let time = Timestamp::try_from(record.time()).unwrap_or(Timestamp::UNIX_EPOCH).to_zoned(self.zone.clone());
        let time = time.strftime("%Y-%m-%d %H:%M:%S%.3f");
        let level = record.level().name();
        write!(line, "{time} {level:>5} {}", record.payload()).map_err(Error::from_io_error)?;
        Ok(line)
    }
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
