//! Standard output of commands that print text. Control characters are escaped, because names, files and models are not
//! trusted.

use crate::printable::printable;
use anyhow::{Context, Result};
use std::io::{ErrorKind, IsTerminal, Write};

/// Prints a report. Control characters are escaped, even in files and pipes.
pub fn print(text: &str) -> Result<()> {
    write(&printable(text))
}

/// Prints text that another program may read, such as JSON, a path or a model's text. A file or pipe gets exactly these
/// bytes; on a terminal, control characters are escaped.
pub fn print_exact(text: &str) -> Result<()> {
    if std::io::stdout().is_terminal() { print(text) } else { write(text) }
}

/// Prints an escape sequence of this program.
pub fn print_style(sequence: &'static str) -> Result<()> {
    write(sequence)
}

/// Writes and flushes, so that the text appears as it is generated. If the reader is gone (`| head`), the process exits
/// quietly.
fn write(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.context("the text cannot be written"),
    }
}
