//! The known formats of traces, detected from the first line: the column names of a CSV file, or the fields of an
//! object.

use super::csv::Columns;
use super::format::{Format, JsonFields};
use super::reader::Reader;
use super::{azure, bailian, burst_gpt, mooncake, recording};

/// All formats.
pub const FORMATS: [&Format; 5] =
    [&azure::FORMAT, &burst_gpt::FORMAT, &mooncake::FORMAT, &bailian::FORMAT, &recording::FORMAT];

/// The formats and their columns, one per line.
pub(super) fn known() -> String {
    FORMATS.map(|format| format!("\n  {}: {}", format.name, format.columns)).concat()
}

/// The reader of a file with this first line; true if the line is a header.
pub(super) fn recognise(first: &str) -> Option<(Box<dyn Reader>, bool)> {
    if !first.starts_with('{') {
        let columns = Columns::parse(first);
        return azure::reader(&columns).or_else(|| burst_gpt::reader(&columns)).map(|reader| (reader, true));
    }
    let fields: JsonFields = serde_json::from_str(first).ok()?;
    if let Some(reader) = recording::reader(&fields, first) {
        return Some((reader, true));
    }
    bailian::reader(&fields).or_else(|| mooncake::reader(&fields)).map(|reader| (reader, false))
}
