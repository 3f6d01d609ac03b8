//! Reads a recording line by line.

use crate::recording::Prompts;
use crate::recording::format::{Header, RecordLine, VERSION};
use anyhow::{Context, Result, anyhow, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// The header, which must report prompts, and the lines after it.
pub fn open(file: &Path) -> Result<(Header, impl Iterator<Item = Result<RecordLine>>)> {
    let name = file.display().to_string();
    let mut lines = BufReader::new(File::open(file).with_context(|| format!("{name} cannot be read"))?).lines();
    let first = lines.next().transpose().with_context(|| format!("{name} cannot be read"))?.unwrap_or_default();
    let header: Header = serde_json::from_str(&first).with_context(|| format!("{name} is not a recording"))?;
    ensure!(
        (1..=VERSION).contains(&header.record),
        "{name} is of version {}; this program reads 1 to {VERSION}",
        header.record
    );
    ensure!(header.prompts == Prompts::Ids, "{name} has no prompts: record with --record-prompts ids");
    let lines = (2..).zip(lines).map(move |(number, line)| {
        let line = line.with_context(|| format!("{name} cannot be read"))?;
        line.parse().map_err(|error: serde_json::Error| anyhow!("{name}, line {number}: {error}"))
    });
    Ok((header, lines))
}
