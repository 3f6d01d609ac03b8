//! The Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset).

use super::csv::Columns;
use super::format::Format;
use super::reader::{Read, Reader};
use super::request::TraceRequest;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use std::time::Duration;

pub(super) const FORMAT: Format = Format {
    name: "Azure LLM inference",
    columns: "CSV with TIMESTAMP,ContextTokens,GeneratedTokens",
    time: "TIMESTAMP, date and time of day",
};

struct Azure {
    columns: Columns,
    time: usize,
    prompt: usize,
    output: usize,
}

/// The reader of a file with these columns.
pub(super) fn reader(columns: &Columns) -> Option<Box<dyn Reader>> {
    let [time, prompt, output] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"].map(|name| columns.find(name));
    Some(Box::new(Azure { columns: columns.clone(), time: time?, prompt: prompt?, output: output? }))
}

impl Reader for Azure {
    fn format(&self) -> &'static Format {
        &FORMAT
    }

    fn read(&mut self, line: &str) -> Result<Read, String> {
        let row = self.columns.row(line)?;
        Ok(Read::Request(TraceRequest {
            at: time(row.text(self.time))?,
            prompt_len: row.number(self.prompt)?,
            output_len: row.number(self.output)?,
            ..TraceRequest::default()
        }))
    }
}

/// Parses a time since 1970: `2023-11-16 18:15:46.6805900` (2023) or `2024-05-10 00:00:00.009930+00:00` (2024).
fn time(text: &str) -> Result<Duration, String> {
    let in_utc = || Ok(text.parse::<DateTime>()?.to_zoned(TimeZone::UTC)?.timestamp());
    let time = text.parse::<Timestamp>().or_else(|_| in_utc());
    let time = time.map_err(|error: jiff::Error| format!("its time cannot be used: {error}"))?;
    Duration::try_from(time.as_duration()).map_err(|_| format!("{text} is before 1970"))
}
