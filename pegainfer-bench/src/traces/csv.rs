//! Columns of CSV files by name. Cells contain numbers, times and plain words. No trace has quoted cells, so commas
//! always separate.

use pegainfer_terminal::printable::truncate_for_error;
use std::fmt::Display;
use std::str::FromStr;

/// The names of the columns.
#[derive(Debug, Clone)]
pub(super) struct Columns(Vec<String>);

/// The cells of a line.
pub(super) struct Row<'a>(Vec<&'a str>);

impl Columns {
    /// The columns of a header.
    pub fn parse(header: &str) -> Self {
        Self(header.split(',').map(|name| name.trim().to_owned()).collect())
    }

    /// Position of a column; the case of its name is ignored.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|column| column.eq_ignore_ascii_case(name))
    }

    /// The cells of a line, one for each column.
    pub fn row<'a>(&self, line: &'a str) -> Result<Row<'a>, String> {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        match cells.len() == self.0.len() {
            true => Ok(Row(cells)),
            false => Err(format!("it has {} columns, the header {}", cells.len(), self.0.len())),
        }
    }
}

impl<'a> Row<'a> {
    /// The cell at a position returned by [`Columns::find`].
    pub fn text(&self, column: usize) -> &'a str {
        self.0.get(column).copied().unwrap_or_default()
    }

    /// The number in a cell.
    pub fn number<T: FromStr<Err: Display>>(&self, column: usize) -> Result<T, String> {
        let text = self.text(column);
        text.parse().map_err(|error| format!("{:?} is not a number: {error}", truncate_for_error(text)))
    }
}
