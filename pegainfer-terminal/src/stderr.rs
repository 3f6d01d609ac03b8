//! Standard error of commands, next to the log.

use crate::printable::{one_line, printable};
use std::io::Write;

/// Prints a line with its control characters escaped. Write errors are ignored: the exit code still reports a failed
/// command.
pub fn print(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(line));
}

/// Prints why a command failed, always on one line.
pub fn error(sentence: &str) {
    print(&format!("error: {}", one_line(sentence)));
}
