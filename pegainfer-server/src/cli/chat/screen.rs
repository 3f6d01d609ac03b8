//! Prints answers. On a terminal, lines are wrapped at words, Markdown is styled and reasoning is dimmed; elsewhere the answer is
//! printed as it is, without its reasoning.

use super::markdown::{self, Markdown};
use super::wrap::Wrap;
use anyhow::Result;
use pegainfer_terminal::printable::printable;
use pegainfer_terminal::stderr;
use pegainfer_terminal::stdout::{print, print_exact, print_style};
use std::ffi::OsString;
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
    /// The open text of a terminal with styles.
    markdown: Option<Markdown>,
    /// The open line of a terminal.
    wrap: Wrap,
}

impl Screen {
    pub(super) fn stdout() -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let markdown = (is_terminal && has_styles(|name| std::env::var_os(name))).then(Markdown::default);
        Self { is_terminal, is_dim: false, at_start: true, markdown, wrap: Wrap::default() }
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
        match &mut self.markdown {
            // Escaped first, so that a mark can only be the program's.
            Some(markdown) => {
                let styled = markdown.push(&printable(text));
                let lines = self.wrap.push(&styled, width());
                self.show(&lines)
            }
            None => self.put(text),
        }
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
        let held = self.markdown.as_mut().map(Markdown::finish).unwrap_or_default();
        let mut rest = self.wrap.push(&held, width());
        rest += &std::mem::take(&mut self.wrap).finish(width());
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
        if self.markdown.is_none() {
            self.at_start = text.ends_with('\n');
            return print_exact(text);
        }
        for part in text.split_inclusive(|c| markdown::sequence(c).is_some()) {
            let mark = part.chars().next_back().and_then(markdown::sequence);
            // Each mark is one byte.
            let shown = if mark.is_some() { &part[..part.len() - 1] } else { part };
            self.at_start = if shown.is_empty() { self.at_start } else { shown.ends_with('\n') };
            print(shown)?;
            mark.map_or(Ok(()), print_style)?;
        }
        Ok(())
    }
}

/// True if the terminal shows styles and the user wants them: <https://no-color.org>.
fn has_styles(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    variable("NO_COLOR").is_none_or(|value| value.is_empty()) && variable("TERM").is_none_or(|value| value != "dumb")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_can_be_refused() {
        let with = |set: &str, value: &str| has_styles(|name| (name == set).then(|| value.into()));
        assert!(with("TERM", "xterm-256color") && with("NO_COLOR", ""));
        assert!(!with("TERM", "dumb") && !with("NO_COLOR", "1"));
    }
}
