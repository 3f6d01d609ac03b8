//! Styles Markdown as it is streamed: headings, emphasis, code and lists. Everything else stays as it is written.
//!
//! The output has [marks](sequence) where a style begins or ends. They are control characters, which printable text has not,
//! and they have no width.

const BOLD: [char; 2] = ['\u{1}', '\u{2}'];
const ITALIC: [char; 2] = ['\u{3}', '\u{4}'];
const CODE: [char; 2] = ['\u{5}', '\u{6}'];
const FENCE: &str = "```";
const MAX_HEADING: usize = 6;
/// Maximum number of bytes that wait for the end of an emphasis or a code span.
const MAX_HELD: usize = 1000;

/// The escape sequence of a mark.
pub(super) fn sequence(mark: char) -> Option<&'static str> {
    Some(match mark {
        '\u{1}' => "\x1b[1m",
        '\u{2}' => "\x1b[22m",
        '\u{3}' => "\x1b[3m",
        '\u{4}' => "\x1b[23m",
        '\u{5}' => "\x1b[36m",
        '\u{6}' => "\x1b[39m",
        _ => return None,
    })
}

/// What has to be known about the text before the next character.
#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
enum Place {
    /// The start of a line.
    #[default]
    Start,
    /// Inside of a line.
    Inside,
    /// Inside of a heading.
    Heading,
    /// Inside of a code block, and true at the start of a line.
    Code(bool),
}

/// Text that is still open.
#[derive(Debug, Default)]
pub(super) struct Markdown {
    /// Text that cannot be shown before more of it is known.
    held: String,
    place: Place,
    /// The last character that was shown.
    last: Option<char>,
}

impl Markdown {
    /// Takes printable text and returns what can be shown.
    pub(super) fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        self.advance(false)
    }

    /// Returns what was held back, and ends all styles.
    pub(super) fn finish(&mut self) -> String {
        let mut out = self.advance(true);
        match self.place {
            Place::Heading => out.push(BOLD[1]),
            Place::Code(_) => out.push(CODE[1]),
            Place::Start | Place::Inside => {}
        }
        *self = Self::default();
        out
    }

    fn advance(&mut self, ends: bool) -> String {
        let mut out = String::new();
        while !self.held.is_empty() {
            let Some(taken) = self.step(&mut out, ends) else { break };
            self.last = self.held[..taken].chars().next_back().or(self.last);
            self.held.drain(..taken);
        }
        out
    }

    /// Shows the beginning of the held text and returns its length; `None` if more has to be known. `ends`: nothing follows.
    fn step(&mut self, out: &mut String, ends: bool) -> Option<usize> {
        match self.place {
            Place::Start => self.start(out, ends),
            Place::Code(true) => self.code_line(out, ends),
            Place::Inside | Place::Heading | Place::Code(false) => {
                if self.held.starts_with('\n') {
                    out.extend((self.place == Place::Heading).then_some(BOLD[1]));
                    out.push('\n');
                    self.place = if self.place == Place::Code(false) { Place::Code(true) } else { Place::Start };
                    return Some(1);
                }
                let first = self.held.chars().next()?;
                let in_code = self.place == Place::Code(false);
                match first {
                    '`' | '*' if !in_code => self.span(out, ends),
                    c => {
                        out.push(c);
                        Some(c.len_utf8())
                    }
                }
            }
        }
    }

    /// The start of a line outside of code: a heading, a list, a code block, or text.
    fn start(&mut self, out: &mut String, ends: bool) -> Option<usize> {
        let text = self.held.trim_start_matches(' ');
        let indent = self.held.len() - text.len();
        let run = |c: char| text.len() - text.trim_start_matches(c).len();
        let is_open = |taken: usize| !ends && taken == text.len();
        match text.chars().next() {
            None if !ends => None,
            Some('`') if is_open(run('`')) => None,
            Some('`') if run('`') >= FENCE.len() => {
                let line = self.line(ends)?;
                out.push(CODE[0]);
                self.place = Place::Code(true);
                Some(line)
            }
            Some('#') if is_open(run('#')) => None,
            Some('#') if run('#') <= MAX_HEADING && text[run('#')..].starts_with(' ') => {
                out.push(BOLD[0]);
                self.place = Place::Heading;
                Some(indent + run('#') + 1)
            }
            Some('*' | '-' | '+') if is_open(1) => None,
            Some('*' | '-' | '+') if text[1..].starts_with(' ') => {
                out.push_str(&self.held[..indent]);
                out.push_str("• ");
                self.place = Place::Inside;
                Some(indent + 2)
            }
            _ => {
                out.push_str(&self.held[..indent]);
                self.place = Place::Inside;
                Some(indent)
            }
        }
    }

    /// The start of a line of code: its end, or more code.
    fn code_line(&mut self, out: &mut String, ends: bool) -> Option<usize> {
        let text = self.held.trim_start_matches(' ');
        if !ends && text.len() < FENCE.len() && FENCE.starts_with(text) {
            return None;
        }
        if !text.starts_with(FENCE) {
            self.place = Place::Code(false);
            return Some(0);
        }
        let line = self.line(ends)?;
        out.push(CODE[1]);
        self.place = Place::Start;
        Some(line)
    }

    /// Length of the line with its end.
    fn line(&self, ends: bool) -> Option<usize> {
        self.held.find('\n').map(|end| end + 1).or(ends.then_some(self.held.len()))
    }

    /// A code span or an emphasis, if it ends in this line; otherwise its first characters.
    fn span(&self, out: &mut String, ends: bool) -> Option<usize> {
        let first = self.held.chars().next()?;
        let run = self.held.len() - self.held.trim_start_matches(first).len();
        let is_complete = ends || self.held.contains('\n') || self.held.len() > MAX_HELD;
        if run == self.held.len() && !is_complete {
            return None;
        }
        let line = &self.held[..self.held.find('\n').unwrap_or(self.held.len())];
        let (mark, after) = line.split_at(run);
        let opens = first == '`' || self.opens(after, run);
        let Some(inner) = opens.then(|| inside(after, mark)).flatten() else {
            if opens && !is_complete {
                return None;
            }
            out.push_str(mark);
            return Some(run);
        };
        let styles: &[[char; 2]] = match (first, run) {
            ('`', _) => &[CODE],
            (_, 1) => &[ITALIC],
            (_, 2) => &[BOLD],
            _ => &[BOLD, ITALIC],
        };
        // A heading is bold already.
        let styles = styles.iter().filter(|style| self.place != Place::Heading || **style != BOLD);
        out.extend(styles.clone().map(|style| style[0]));
        if first == '`' {
            out.push_str(inner);
        } else {
            let mut nested = Self { place: Place::Inside, ..Self::default() };
            nested.held.push_str(inner);
            out.push_str(&nested.finish());
        }
        out.extend(styles.rev().map(|style| style[1]));
        Some(2 * run + inner.len())
    }

    /// True if asterisks before `after` can open an emphasis: they begin a word.
    fn opens(&self, after: &str, run: usize) -> bool {
        let before = self.last.is_none_or(|c| !c.is_alphanumeric() && c != '*' && c != '\\');
        run <= 3 && before && after.chars().next().is_some_and(|c| !c.is_whitespace())
    }
}

/// The text before the next run that is exactly `mark`, if it is not empty.
fn inside<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    let c = mark.chars().next()?;
    let mut at = 0;
    while let Some(start) = text[at..].find(c).map(|start| at + start) {
        let run = text[start..].len() - text[start..].trim_start_matches(c).len();
        let ends_word = c == '`' || text[..start].chars().next_back().is_some_and(|c| !c.is_whitespace());
        // A run at the end may go on.
        if run == mark.len() && ends_word && start > 0 {
            return Some(&text[..start]);
        }
        at = start + run;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The styled text, with a letter in braces for each mark, as it arrives in chunks of `size` characters.
    fn styled(text: &str, size: usize) -> String {
        let mut markdown = Markdown::default();
        let chars: Vec<char> = text.chars().collect();
        let chunks = chars.chunks(size).map(|chunk| markdown.push(&chunk.iter().collect::<String>()));
        let out = chunks.collect::<String>() + &markdown.finish();
        let name = |c: char| ["b", "/b", "i", "/i", "c", "/c"].get((c as usize).wrapping_sub(1)).copied();
        out.chars().map(|c| name(c).map_or_else(|| c.to_string(), |name| format!("{{{name}}}"))).collect()
    }

    #[test]
    fn text_is_styled_however_it_arrives() {
        for (text, expected) in [
            ("plain text\nand more", "plain text\nand more"),
            ("a **bold** word", "a {b}bold{/b} word"),
            ("an *italic* and ***both***", "an {i}italic{/i} and {b}{i}both{/i}{/b}"),
            ("run `ls *.rs` now", "run {c}ls *.rs{/c} now"),
            ("``a ` b``", "{c}a ` b{/c}"),
            ("**a `b` c**", "{b}a {c}b{/c} c{/b}"),
            ("# Title\ntext", "{b}Title{/b}\ntext"),
            ("## A **B**\n", "{b}A B{/b}\n"),
            ("- one\n* two\n  + three", "• one\n• two\n  • three"),
            ("```rust\nlet a = *b;\n# no title\n```\nend", "{c}let a = *b;\n# no title\n{/c}end"),
        ] {
            for size in [1, 2, 3, 100] {
                assert_eq!(styled(text, size), expected, "{text:?} in chunks of {size}");
            }
        }
    }

    #[test]
    fn characters_that_are_no_markdown_stay() {
        for text in [
            "2 * 3 * 4 = 24",
            "5*3*2",
            "f(*args, **kwargs)",
            "a ** b",
            "#hashtag",
            "####### seven",
            "snake_case_name",
            "an open `code",
            "an open **bold\nnext line",
            "-1 is negative",
            "---",
            "****",
            "| a | b |\n|---|---|",
            "`",
            "``",
            "*",
        ] {
            for size in [1, 2, 100] {
                assert_eq!(styled(text, size), text, "in chunks of {size}");
            }
        }
    }

    #[test]
    fn text_is_not_held_for_long() {
        let mut markdown = Markdown::default();
        assert_eq!(markdown.push("a word "), "a word ");
        assert_eq!(markdown.push("**open"), "");
        assert_eq!(markdown.push(&"x".repeat(MAX_HELD)), format!("**open{}", "x".repeat(MAX_HELD)));
    }

    #[test]
    fn every_mark_has_a_sequence() {
        for mark in [BOLD, ITALIC, CODE].concat() {
            assert!(sequence(mark).is_some() && mark.is_control());
        }
        assert_eq!(sequence('a'), None);
    }
}
