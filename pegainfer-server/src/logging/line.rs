//! Layouts of one event: one line of at most [`MAX_LINE`] bytes without control characters, for any message.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use logforth::layout::JsonLayout;
use logforth::record::Record;
use logforth::{Diagnostic, Error, Layout};
use pegainfer_terminal::printable::{json_line, one_line};
use std::io::Write;

/// Maximum length of a line in bytes.
pub(super) const MAX_LINE: usize = 16 << 10;
/// End of a message that was cut.
const CUT: &str = " [cut]";

/// `2026-11-21 11:16:07.123  INFO message`, without the source line, which operators do not need.
#[derive(Debug)]
pub(super) struct TextLine {
    zone: TimeZone,
}

impl Default for TextLine {
    fn default() -> Self {
        Self { zone: TimeZone::system() }
    }
}

impl Layout for TextLine {
    fn format(&self, record: &Record, _: &[Box<dyn Diagnostic>]) -> Result<Vec<u8>, Error> {
        fit(record, |record| {
            let mut line = Vec::with_capacity(160);
            let time = Timestamp::try_from(record.time()).unwrap_or(Timestamp::UNIX_EPOCH).to_zoned(self.zone.clone());
            let time = time.strftime("%Y-%m-%d %H:%M:%S%.3f");
            let level = record.level().name();
            write!(line, "{time} {level:>5} {}", record.payload()).map_err(Error::from_io_error)?;
            Ok(line)
        })
    }
}

/// One JSON object.
#[derive(Debug, Default)]
pub(super) struct JsonLine(JsonLayout);

impl Layout for JsonLine {
    fn format(&self, record: &Record, diagnostics: &[Box<dyn Diagnostic>]) -> Result<Vec<u8>, Error> {
        fit(record, |record| {
            let line = self.0.format(record, diagnostics)?;
            let text = std::str::from_utf8(&line).map_err(|_| Error::new("a log line is not UTF-8"))?;
            Ok(json_line(text).into_owned().into_bytes())
        })
    }
}

/// Formats the record on one line, and cuts its message until the line fits.
fn fit(record: &Record, format: impl Fn(&Record) -> Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
    let message = record.payload().to_string();
    let message = one_line(&message);
    let line = format(&with_message(record, format_args!("{message}")))?;
    if line.len() <= MAX_LINE {
        return Ok(line);
    }
    // JSON takes one to six bytes for a byte of the message: the longest beginning that fits is found by halving.
    let (mut fits, mut too_long, mut best) = (0, message.len().min(MAX_LINE), None);
    while too_long > fits {
        let kept = (fits + too_long).div_ceil(2);
        let beginning = &message[..message.floor_char_boundary(kept)];
        let line = format(&with_message(record, format_args!("{beginning}{CUT}")))?;
        match line.len() <= MAX_LINE {
            true => (fits, best) = (kept, Some(line)),
            false => too_long = kept - 1,
        }
    }
    best.ok_or_else(|| Error::new("the fields of a log line are too long"))
}

fn with_message<'a>(record: &Record<'a>, message: std::fmt::Arguments<'a>) -> Record<'a> {
    record.to_builder().payload(message).build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn lines(message: &str) -> [String; 2] {
        let layouts: [Box<dyn Layout>; 2] = [Box::new(TextLine::default()), Box::new(JsonLine::default())];
        layouts.map(|layout| {
            let line = layout.format(&Record::builder().payload(format_args!("{message}")).build(), &[]);
            String::from_utf8(line.unwrap()).unwrap()
        })
    }

    /// A cut at any byte would break characters, escapes and the closing brace.
    #[test]
    fn long_lines_stay_utf8_and_json() {
        for part in ["x", "é", "文", "😀", "\"", "\\", "\x1b", "\n", "a\u{202e}\""] {
            for length in (MAX_LINE - 300..MAX_LINE + 8).step_by(61).chain([3 * MAX_LINE]) {
                let message = part.repeat(length / part.len() + 1);
                let [text, json] = lines(&message);
                assert!(text.len() <= MAX_LINE && json.len() <= MAX_LINE, "{part:?} {length}");
                let value: Value = serde_json::from_str(&json).unwrap();
                let whole = one_line(&message);
                for shown in [text.split_once(" INFO ").unwrap().1, value["message"].as_str().unwrap()] {
                    let kept = shown.strip_suffix(CUT).unwrap_or(shown);
                    assert!(
                        whole.starts_with(kept) && (kept.len() < shown.len() || kept == whole),
                        "{part:?} {length}"
                    );
                }
                let all = MAX_LINE.min(length);
                assert!(text.len() + 8 > all && json.len() + 16 > all, "{part:?}: not more than needed is cut");
            }
        }
    }

    #[test]
    fn a_message_cannot_begin_another_line_or_steer_the_terminal() {
        for line in lines("name\n2026-11-21 11:16:07.123  INFO forged\x1b]0;title\x07\u{9b}2J\u{202e}\r") {
            assert!(!line.contains(pegainfer_terminal::printable::is_control), "{line}");
            assert!(line.contains("forged") && line.contains("u{1b}]0;title"), "{line}");
        }
    }
}
