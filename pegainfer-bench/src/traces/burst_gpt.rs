//! BurstGPT traces (github.com/HPMLL/BurstGPT), with and without the second release's columns `Session ID` and `Elapsed
//! time`.

use super::csv::Columns;
use super::format::Format;
use super::reader::{Read, Reader, Sessions, seconds};
use super::request::TraceRequest;

pub(super) const FORMAT: Format = Format {
    name: "BurstGPT",
    columns: "CSV with Timestamp,Request tokens,Response tokens,[Session ID],[Elapsed time]",
    time: "Timestamp, seconds",
};

struct BurstGpt {
    columns: Columns,
    time: usize,
    prompt: usize,
    output: usize,
    session: Option<usize>,
    elapsed: Option<usize>,
    sessions: Sessions,
}

/// The reader of a file with these columns.
pub(super) fn reader(columns: &Columns) -> Option<Box<dyn Reader>> {
    let [time, prompt, output] = ["Timestamp", "Request tokens", "Response tokens"].map(|name| columns.find(name));
    Some(Box::new(BurstGpt {
        time: time?,
        prompt: prompt?,
        output: output?,
        session: columns.find("Session ID"),
        elapsed: columns.find("Elapsed time"),
        columns: columns.clone(),
        sessions: Sessions::default(),
    }))
}

impl Reader for BurstGpt {
    fn format(&self) -> &'static Format {
        &FORMAT
    }

    fn read(&mut self, line: &str) -> Result<Read, String> {
        let row = self.columns.row(line)?;
        let at = seconds(row.number(self.time)?)?;
        let mut request = TraceRequest {
            at,
            prompt_len: row.number(self.prompt)?,
            output_len: row.number(self.output)?,
            ..TraceRequest::default()
        };
        // API requests have no session.
        let Some(session) = self.session.map(|column| row.text(column)).filter(|name| !name.is_empty()) else {
            return Ok(Read::Request(request));
        };
        let (number, end) = self.sessions.get(session.to_owned());
        request.session = Some(number);
        request.delay = end.map(|end| at.saturating_sub(end));
        let elapsed = self.elapsed.filter(|column| !row.text(*column).is_empty());
        let elapsed = elapsed.map(|column| row.number(column).and_then(seconds)).transpose()?;
        self.sessions.set(session.to_owned(), elapsed.map(|elapsed| at + elapsed));
        Ok(Read::Request(request))
    }
}
