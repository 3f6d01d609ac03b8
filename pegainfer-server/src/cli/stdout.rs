//! Standard output of commands that print text.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Write};

/// Writes and flushes, so that the text appears as it is generated. If the reader went away (`| head`), the process exits
/// quietly.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.context("the text cannot be written"),
    }
}
