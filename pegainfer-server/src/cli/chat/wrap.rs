//! Breaks streamed text at words, before the terminal breaks it inside of them.

use unicode_width::UnicodeWidthChar;

/// Joins two emoji into one.
const JOINER: char = '\u{200d}';
/// Columns between tab stops.
const TAB: usize = 8;

/// Text of a line that is still open. The last word is held back until it is complete.
#[derive(Debug, Default)]
pub(super) struct Wrap {
    /// Column after the last returned character.
    column: usize,
    /// Spaces before the word, and their columns.
    spaces: String,
    spaces_width: usize,
    /// The word so far, and its columns.
    word: String,
    word_width: usize,
}

impl Wrap {
    /// Takes printable text and returns what can be shown on a terminal of `width` columns.
    pub(super) fn push(&mut self, text: &str, width: usize) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        for c in text.chars() {
            match c {
                '\n' => {
                    self.flush(&mut out, width);
                    out.push('\n');
                    *self = Self::default();
                }
                ' ' | '\t' => {
                    self.end_word(&mut out, width);
                    let column = self.column + self.spaces_width;
                    self.spaces_width += if c == '\t' { TAB - column % TAB } else { 1 };
                    self.spaces.push(c);
                }
                _ => self.push_char(c, &mut out, width),
            }
        }
        out
    }

    /// Returns what was held back.
    pub(super) fn finish(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.flush(&mut out, width);
        out
    }

    fn push_char(&mut self, c: char, out: &mut String, width: usize) {
        let columns = if self.word.ends_with(JOINER) { 0 } else { c.width().unwrap_or(0) };
        // A line may end before and after each wide character, and inside of a word that no line can hold.
        if columns > 1 || self.word_width + columns > width {
            self.end_word(out, width);
        }
        self.word.push(c);
        self.word_width += columns;
        if columns > 1 {
            self.end_word(out, width);
        }
    }

    /// Places the word on this line, or on the next one if it does not fit.
    fn end_word(&mut self, out: &mut String, width: usize) {
        if self.word.is_empty() {
            return;
        }
        if self.column + self.spaces_width + self.word_width > width && self.column > 0 {
            out.push('\n');
            (self.column, self.spaces_width) = (0, 0);
            self.spaces.clear();
        }
        out.push_str(&self.spaces);
        out.push_str(&self.word);
        *self = Self { column: self.column + self.spaces_width + self.word_width, ..Self::default() };
    }

    fn flush(&mut self, out: &mut String, width: usize) {
        self.end_word(out, width);
        // Spaces at the end of a full line would begin the next one.
        if self.column + self.spaces_width <= width {
            out.push_str(&self.spaces);
            self.column += self.spaces_width;
        }
        self.spaces.clear();
        self.spaces_width = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text on a terminal of `width` columns, as it arrives in chunks of `size` characters.
    fn wrapped(text: &str, width: usize, size: usize) -> String {
        let mut wrap = Wrap::default();
        let chars: Vec<char> = text.chars().collect();
        let chunks = chars.chunks(size).map(|chunk| wrap.push(&chunk.iter().collect::<String>(), width));
        chunks.collect::<String>() + &wrap.finish(width)
    }

    #[test]
    fn lines_break_between_words_however_the_text_arrives() {
        for (text, width, expected) in [
            ("the wooden house", 10, "the wooden\nhouse"),
            ("the wooden house", 9, "the\nwooden\nhouse"),
            // A full line takes no space with it.
            ("1234 6789  next line", 9, "1234 6789\nnext line"),
            ("a\n\n    code stays\n", 20, "a\n\n    code stays\n"),
            ("a\tb c", 10, "a\tb\nc"),
            // A word longer than the line is cut, and begins on a line of its own.
            ("so extraordinarily", 6, "so\nextrao\nrdinar\nily"),
            ("trailing ", 20, "trailing "),
        ] {
            for size in [1, 2, 3, 100] {
                assert_eq!(wrapped(text, width, size), expected, "{text:?} in chunks of {size}");
            }
        }
    }

    #[test]
    fn wide_characters_take_two_columns() {
        for size in [1, 2, 100] {
            assert_eq!(wrapped("你好世界", 6, size), "你好世\n界");
            assert_eq!(wrapped("ab 你好", 6, size), "ab 你\n好");
            assert_eq!(wrapped("abc你", 4, size), "abc\n你");
            // Accents take no column, and an emoji of several characters is not broken.
            assert_eq!(wrapped("cafe\u{301} cafe\u{301}", 4, size), "cafe\u{301}\ncafe\u{301}");
            assert_eq!(wrapped("ab 👩\u{200d}🔬 c", 5, size), "ab 👩\u{200d}🔬\nc");
        }
    }
}
