//! Where the results of a benchmark go.

use anyhow::{Context, Result};
use pegainfer_terminal::stdout::{print, print_exact};
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Creates a file of results.
pub fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("{} cannot be written", path.display()))
}

/// The destinations of a report. They are opened before the measurement, so that a path that cannot be written is
/// reported at once.
pub struct Output {
    json: Option<File>,
    to_stdout: bool,
}

impl Output {
    /// Opens the path of `--json`; `-` is the standard output.
    pub fn open(json: Option<&Path>) -> Result<Self> {
        let to_stdout = json.is_some_and(|path| path == "-");
        Ok(Self { json: json.filter(|_| !to_stdout).map(create).transpose()?, to_stdout })
    }

    /// Writes the report as JSON, and prints it as a table unless the JSON is printed.
    pub fn show(self, report: &impl Serialize, table: &str) -> Result<()> {
        let text = serde_json::to_string_pretty(report)? + "\n";
        if let Some(mut file) = self.json {
            file.write_all(text.as_bytes()).context("the JSON cannot be written")?;
        }
        if self.to_stdout { print_exact(&text) } else { print(table) }
    }
}
