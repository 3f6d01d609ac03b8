//! Parses string constants of a Python file, without Python.

/// Value of a constant.
#[derive(Debug, PartialEq)]
pub enum Constant {
    /// String literals in a row, which Python concatenates.
    Text(String),
    /// A dictionary of strings.
    Table(Vec<(String, String)>),
}

/// The constant `name`, assigned at the beginning of a line, with or without a type annotation; `None` if there is none.
///
/// # Errors
/// One sentence: the value is neither a string nor a dictionary of strings.
pub fn constant(source: &str, name: &str) -> Option<Result<Constant, String>> {
    let mut at = 0;
    for line in source.split_inclusive('\n') {
        let value = line.strip_prefix(name).and_then(|rest| {
            let sign = rest.find('=')?;
            let before = rest[..sign].trim();
            (before.is_empty() || before.starts_with(':')).then_some(at + name.len() + sign + 1)
        });
        if let Some(value) = value {
            let mut parser = LiteralParser { rest: &source[value..], depth: 0 };
            return Some(parser.value().map_err(|e| format!("{name} cannot be read: {e}")));
        }
        at += line.len();
    }
    None
}

struct LiteralParser<'a> {
    rest: &'a str,
    /// Number of open brackets: inside brackets, line breaks are white space.
    depth: usize,
}

impl LiteralParser<'_> {
    fn value(&mut self) -> Result<Constant, String> {
        if !self.eat('{') {
            return self.text().map(Constant::Text);
        }
        self.depth += 1;
        let mut table = Vec::new();
        while !self.eat('}') {
            let key = self.text()?;
            if !self.eat(':') {
                return Err(self.unexpected("a colon"));
            }
            table.push((key, self.text()?));
            if !self.eat(',') && !self.rest.starts_with('}') {
                return Err(self.unexpected("a comma"));
            }
        }
        Ok(Constant::Table(table))
    }

    /// Parses string literals in a row, with or without brackets.
    fn text(&mut self) -> Result<String, String> {
        let bracket = self.eat('(');
        self.depth += usize::from(bracket);
        let mut text = self.literal()?.ok_or_else(|| self.unexpected("a text"))?;
        while let Some(more) = self.literal()? {
            text += &more;
        }
        if bracket {
            if !self.eat(')') {
                return Err(self.unexpected("a closing bracket"));
            }
            self.depth -= 1;
        }
        Ok(text)
    }

    /// Parses the next literal, if there is one.
    fn literal(&mut self) -> Result<Option<String>, String> {
        self.skip();
        let raw = self.rest.starts_with(['r', 'R']);
        let quoted = if raw { &self.rest[1..] } else { self.rest };
        let Some(quote) = quoted.chars().next().filter(|c| matches!(c, '"' | '\'')) else { return Ok(None) };
        let triple = quote.to_string().repeat(3);
        let long = quoted.starts_with(&triple);
        let end = if long { triple } else { quote.to_string() };
        self.rest = &quoted[end.len()..];
        let mut text = String::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix(&end) {
                self.rest = rest;
                return Ok(Some(text));
            }
            match self.next() {
                Some('\\') if raw => text.extend(['\\'].into_iter().chain(self.next())),
                Some('\\') => self.escape(&mut text)?,
                Some('\n') if !long => return Err("a text does not end".into()),
                Some(c) => text.push(c),
                None => return Err("a text does not end".into()),
            }
        }
    }

    /// Parses an escape, after its backslash.
    fn escape(&mut self, text: &mut String) -> Result<(), String> {
        let c = self.next().ok_or("a text does not end")?;
        match c {
            '\n' => {}
            'a' => text.push('\u{7}'),
            'b' => text.push('\u{8}'),
            'f' => text.push('\u{c}'),
            'n' => text.push('\n'),
            'r' => text.push('\r'),
            't' => text.push('\t'),
            'v' => text.push('\u{b}'),
            '\\' | '\'' | '"' => text.push(c),
            'x' => text.push(self.hex(2)?),
            'u' => text.push(self.hex(4)?),
            'U' => text.push(self.hex(8)?),
            'N' | '0'..='7' => return Err(format!("the escape \\{c} is not understood")),
            // Python keeps the backslash of an unknown escape.
            _ => text.extend(['\\', c]),
        }
        Ok(())
    }

    /// Parses a character given by this many hexadecimal digits.
    fn hex(&mut self, digits: usize) -> Result<char, String> {
        let (code, rest) = self.rest.split_at_checked(digits).unwrap_or_default();
        self.rest = rest;
        let hex = code.bytes().all(|b| b.is_ascii_hexdigit());
        let c = u32::from_str_radix(code, 16).ok().filter(|_| hex).and_then(char::from_u32);
        c.ok_or_else(|| format!("an escape is not followed by the {digits} digits of a character"))
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let c = chars.next()?;
        self.rest = chars.as_str();
        Some(c)
    }

    /// Skips white space, then consumes `sign` if it comes next.
    fn eat(&mut self, sign: char) -> bool {
        self.skip();
        self.rest.strip_prefix(sign).map(|rest| self.rest = rest).is_some()
    }

    /// Skips white space and comments; outside of brackets, a line break ends the value.
    fn skip(&mut self) {
        loop {
            self.rest = self.rest.trim_start_matches(|c: char| c.is_whitespace() && (c != '\n' || self.depth > 0));
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find('\n').map_or("", |end| &self.rest[end..]);
        }
    }

    fn unexpected(&self, expected: &str) -> String {
        let found: String = self.rest.chars().take_while(|c| *c != '\n').take(20).collect();
        format!("{expected} was expected at {found:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::{Rng, seed};

    fn text(source: &str) -> Result<String, String> {
        match constant(source, "A").unwrap()? {
            Constant::Text(text) => Ok(text),
            table => Err(format!("{table:?}")),
        }
    }

    #[test]
    fn texts() {
        for (source, expected) in [
            ("A = \"one\"\n'not this'", "one"),
            ("import x\nAB = 'b'\n  A = 'c'\nA: str = 'it\\'s' \"\\\"two\\\"\"  # not 'this'\n", "it's\"two\""),
            ("A = (\n    \"a\\n\"\n    # a comment, 'quoted'\n    'b'\n)\n\"c\"", "a\nb"),
            ("A = ('x')", "x"),
            ("A = '''it's\n\"long\"'''", "it's\n\"long\""),
            ("A = r'\\n\\'' '\\t'", "\\n\\'\t"),
            ("A = '\\x41\\u00e9\\U0001F600 — \\d \\\ntail'", "Aé😀 — \\d tail"),
            ("A='\\a\\b\\f\\r\\v\\\\'", "\u{7}\u{8}\u{c}\r\u{b}\\"),
        ] {
            assert_eq!(text(source).as_deref(), Ok(expected), "{source}");
        }
        assert_eq!(constant("AB = 'x'\nx = A = 'y'\ndef A(): pass\n", "A"), None);
    }

    #[test]
    fn tables() {
        let source = "T: Dict[str, str] = {\n    \"low\": \"\",  # none\n    'high': (\n        'a'\n        'b'\n    ),\n    \"max\": 'c' 'd'\n}\nD = 'low'\n";
        let pairs = [("low", ""), ("high", "ab"), ("max", "cd")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(constant(source, "T"), Some(Ok(Constant::Table(pairs.into()))));
        assert_eq!(constant("T = {}", "T"), Some(Ok(Constant::Table(vec![]))));
    }

    #[test]
    fn what_is_neither_is_refused() {
        for (source, expected) in [
            ("A = 5", "a text was expected at \"5\""),
            ("A = f'x{y}'", "a text was expected"),
            ("A = ('x'", "a closing bracket"),
            ("A = 'x", "does not end"),
            ("A = 'x\n'", "does not end"),
            ("A = 'x\\", "does not end"),
            ("A = '\\N{DASH}'", "\\N is not understood"),
            ("A = '\\x4'", "2 digits"),
            ("A = '\\ud800'", "4 digits"),
            ("A = {'a' 'b'}", "a colon"),
            ("A = {'a': 'b' 5}", "a comma"),
            ("A =", "a text"),
        ] {
            let error = constant(source, "A").unwrap().unwrap_err();
            assert!(error.starts_with("A cannot be read: ") && error.contains(expected), "{source}: {error}");
        }
    }

    #[test]
    fn any_text_after_the_name_is_read_or_refused() {
        let parts = ["'", "\"", "\\", "(", ")", "{", "}", ":", ",", "\n", "#", "r", "é", "x4", "''' ", " "];
        let mut rng = Rng(seed());
        let mut read = 0;
        for _ in 0..20_000 {
            let tail: String = (0..rng.below(12)).map(|_| parts[rng.below(parts.len())]).collect();
            read += usize::from(constant(&format!("A = {tail}"), "A").unwrap().is_ok());
        }
        assert!(read > 100, "{read} were read");
    }
}
