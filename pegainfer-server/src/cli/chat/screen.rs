//! Prints answers. On a terminal, lines are wrapped at words and reasoning is dimmed; elsewhere it is left out.

use super::wrap::Wrap;
use anyhow::Result;
use pegainfer_terminal::printable::printable;
use pegainfer_terminal::stderr;
use pegainfer_terminal::stdout::{print, print_exact, print_style};
use std::io::IsTerminal;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Where an answer is printed.
pub(super) struct Screen {
    is_terminal: bool,
    /// True if the last output was dimmed.
    is_dim: bool,
    /// True if the cursor is at the start of a line.
    at_start: bool,
    /// The open line of a terminal.
    wrap: Wrap,
}

impl Screen {
    pub(super) fn stdout() -> Self {
        Self { is_terminal: std::io::stdout().is_terminal(), is_dim: false, at_start: true, wrap: Wrap::default() }
    }

    /// Prints the next part of the reasoning.
    pub(super) fn reasoning(&mut self, text: &str) -> Result<()> {
        if text.is_empty() || !self.is_terminal {
            return Ok(());
        }
        if !self.is_dim {
            print_style(DIM)?;
            self.is_dim = true;
        }
        self.put(text)
    }

    /// Prints the next part of the answer.
    pub(super) fn content(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.end_reasoning()?;
        self.put(text)
    }

    /// Ends an answer, with an optional remark.
    pub(super) fn end(&mut self, remark: Option<&str>) -> Result<()> {
        self.end_reasoning()?;
        self.end_line()?;
        remark.map_or(Ok(()), |remark| self.note(&format!("[{remark}]")))
    }

    /// Prints a remark of the program.
    pub(super) fn note(&mut self, text: &str) -> Result<()> {
        match self.is_terminal {
            true => {
                print_style(DIM)?;
                print(text)?;
                print_style(PLAIN)?;
                print("\n")
            }
            // Only the answer goes into a file or pipe.
            false => {
                stderr::print(text);
                Ok(())
            }
        }
    }

    fn end_reasoning(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_dim) {
            return Ok(());
        }
        let rest = self.wrap.finish(width());
        self.show(&rest)?;
        print_style(PLAIN)?;
        self.end_line()
    }

    fn end_line(&mut self) -> Result<()> {
        let rest = std::mem::take(&mut self.wrap).finish(width());
        self.show(&rest)?;
        if std::mem::replace(&mut self.at_start, true) { Ok(()) } else { print("\n") }
    }

    fn put(&mut self, text: &str) -> Result<()> {
        match self.is_terminal {
            // Escaped first, so that each character has its width on the screen.
            true => {
                let lines = self.wrap.push(&printable(text), width());
                self.show(&lines)
            }
            false => self.show(text),
        }
    }

    fn show(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.at_start = text.ends_with('\n');
        print_exact(text)
    }
}

/// Columns of the terminal.
#[cfg(unix)]
fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    size.ok().map(|size| size.ws_col.into()).filter(|&columns| columns > 0).unwrap_or(usize::MAX)
}

/// The terminal wraps the lines itself.
#[cfg(not(unix))]
fn width() -> usize {
    usize::MAX
}
