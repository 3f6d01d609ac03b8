//! Prints answers: reasoning dimmed on a terminal and left out elsewhere.

use crate::cli::stdout::print;
use anyhow::Result;
use std::borrow::Cow;
use std::io::IsTerminal;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Where an answer is printed.
pub(super) struct Screen {
    is_terminal: bool,
    /// Whether dimmed text was printed last.
    is_dim: bool,
    /// Whether the cursor is at the start of a line.
    at_start: bool,
}

impl Screen {
    pub(super) fn stdout() -> Self {
        Self { is_terminal: std::io::stdout().is_terminal(), is_dim: false, at_start: true }
    }

    /// Prints the next part of the reasoning.
    pub(super) fn reasoning(&mut self, text: &str) -> Result<()> {
        if text.is_empty() || !self.is_terminal {
            return Ok(());
        }
        if !self.is_dim {
            print(DIM)?;
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

    /// Ends an answer, with a remark on its end.
    pub(super) fn end(&mut self, remark: Option<&str>) -> Result<()> {
        self.end_reasoning()?;
        self.end_line()?;
        remark.map_or(Ok(()), |remark| self.note(&format!("[{remark}]")))
    }

    /// Prints a remark of the program.
    pub(super) fn note(&mut self, text: &str) -> Result<()> {
        match self.is_terminal {
            true => print(&format!("{DIM}{text}{PLAIN}\n")),
            // Only the answer goes into a file or pipe.
            false => {
                eprintln!("{text}");
                Ok(())
            }
        }
    }

    fn end_reasoning(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_dim) {
            return Ok(());
        }
        print(PLAIN)?;
        self.end_line()
    }

    fn end_line(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.at_start, true) { Ok(()) } else { print("\n") }
    }

    fn put(&mut self, text: &str) -> Result<()> {
        self.at_start = text.ends_with('\n');
        if self.is_terminal { print(&printable(text)) } else { print(text) }
    }
}

/// The text without control characters, with which a model could move the cursor or change the terminal's settings.
fn printable(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && c != '\n' && c != '\t';
    match text.contains(is_control) {
        true => Cow::Owned(text.replace(is_control, "\u{fffd}")),
        false => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\tb\n"), "a\tb\n");
        assert_eq!(printable("a\x1b[2Jb\r"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
