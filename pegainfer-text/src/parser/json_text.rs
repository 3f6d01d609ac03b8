//! JSON strings and words as models write them.

use super::cursor::{Cursor, Next, WHITESPACE, any};
use serde_json::Value;

/// Length in bytes at which an unquoted word is divided, to bound the time per token.
const MAX_WORD: usize = 1024;

/// The next segment of a string.
#[derive(Debug, PartialEq, Eq)]
pub enum Segment {
    /// Text with JSON's escapes.
    Text(String),
    /// A quote that the model did not escape.
    Repaired(String),
    /// More text is needed.
    More,
    /// The position is after the closing quote.
    Closed,
    /// The position is at a line break inside the string, followed by the tag that ends the call.
    CutShort,
}

/// Reads the next segment of a string with this quote. The string must be followed by one of `ends` or of the tags
/// `closers`. `ends` is empty for a value that may be followed by anything.
pub fn next_segment(cursor: &mut Cursor, quote: char, ends: &str, closers: &[&str]) -> Segment {
    let rest = cursor.rest();
    let special = |c: char| c == quote || c == '"' || c == '\\' || c < ' ';
    let plain = rest.find(special).unwrap_or(rest.len());
    if plain > 0 {
        let text = rest[..plain].to_owned();
        cursor.at += plain;
        return Segment::Text(text);
    }
    match rest.chars().next() {
        None => Segment::More,
        Some('\\') => escape(cursor, quote),
        Some(c) if c == quote => closing_quote(cursor, quote, ends, closers),
        Some('\n') => match any(closers.iter().map(|tag| cursor.begins(cursor.at + 1, tag))) {
            Next::Yes => Segment::CutShort,
            Next::Maybe => Segment::More,
            Next::No if is_cut_off(cursor, closers) => {
                cursor.at = cursor.text.len();
                Segment::More
            }
            Next::No => control(cursor, '\n'),
        },
        Some(c) => control(cursor, c),
    }
}

/// True if the output ends inside a tag of `closers` that begins after the line break at the position.
fn is_cut_off(cursor: &Cursor, closers: &[&str]) -> bool {
    let line = &cursor.rest()[1..];
    cursor.ended && !line.is_empty() && closers.iter().any(|tag| tag.starts_with(line))
}

/// A character that needs an escape in JSON.
fn control(cursor: &mut Cursor, c: char) -> Segment {
    cursor.at += 1;
    Segment::Text(escaped(c.encode_utf8(&mut [0; 4])))
}

/// Contents of a JSON string: `text` with JSON's escapes.
pub fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Reads an escape. A backslash without an escape stands for itself.
fn escape(cursor: &mut Cursor, quote: char) -> Segment {
    let rest = cursor.rest();
    let Some(next) = rest[1..].chars().next() else {
        // At the end of the output, half an escape is left.
        cursor.at += usize::from(cursor.ended);
        return Segment::More;
    };
    match next {
        '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => {
            cursor.at += 2;
            Segment::Text(format!("\\{next}"))
        }
        c if c == quote => {
            cursor.at += 2;
            Segment::Text(c.to_string())
        }
        'u' => unicode(cursor),
        _ => {
            cursor.at += 1;
            Segment::Text("\\\\".into())
        }
    }
}

/// Code unit of the escape `\uXXXX` at this byte.
enum Unit {
    Is(u16),
    Incomplete,
    None,
}

fn unit(text: &str) -> Unit {
    let (head, digits) = text.as_bytes().split_at(text.len().min(2));
    let digits = &digits[..digits.len().min(4)];
    if !b"\\u".starts_with(head) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Unit::None;
    }
    let hex = std::str::from_utf8(digits).ok().filter(|hex| hex.len() == 4);
    hex.and_then(|hex| u16::from_str_radix(hex, 16).ok()).map_or(Unit::Incomplete, Unit::Is)
}

/// Reads `\uXXXX`. The halves of a surrogate pair must be adjacent.
fn unicode(cursor: &mut Cursor) -> Segment {
    let rest = cursor.rest();
    let (length, text) = match unit(rest) {
        Unit::None => (1, "\\\\".to_owned()),
        Unit::Incomplete if cursor.ended => (rest.len(), String::new()),
        Unit::Incomplete => return Segment::More,
        Unit::Is(0xd800..0xdc00) => match unit(&rest[6..]) {
            Unit::Incomplete if !cursor.ended => return Segment::More,
            Unit::Is(0xdc00..0xe000) => (12, rest[..12].to_owned()),
            Unit::Is(_) | Unit::Incomplete | Unit::None => (6, "\\ufffd".into()),
        },
        Unit::Is(0xdc00..0xe000) => (6, "\\ufffd".into()),
        Unit::Is(_) => (6, rest[..6].to_owned()),
    };
    cursor.at += length;
    Segment::Text(text)
}

/// Decides whether a quote closes the string: only the end of a member can follow.
fn closing_quote(cursor: &mut Cursor, quote: char, ends: &str, closers: &[&str]) -> Segment {
    let after = cursor.at + 1;
    let rest = cursor.text[after..].trim_start_matches(WHITESPACE);
    let next = cursor.text.len() - rest.len();
    let space = &cursor.text[after..next];
    let closes = match rest.chars().next() {
        _ if ends.is_empty() => Next::Yes,
        None if cursor.ended => Next::Yes,
        None => Next::Maybe,
        Some(c) if ends.contains(c) => Next::Yes,
        // The comma is missing.
        Some('"' | '\'') if space.contains('\n') => Next::Yes,
        Some(_) => any(closers.iter().map(|tag| cursor.begins(next, tag))),
    };
    match closes {
        Next::Maybe => Segment::More,
        Next::Yes => {
            cursor.at = after;
            Segment::Closed
        }
        Next::No => {
            cursor.at = after;
            Segment::Repaired(escaped(quote.encode_utf8(&mut [0; 4])))
        }
    }
}

/// Reads a key or value without quotes. `None` if more text is needed, or if the output ends inside it. `alone` is true
/// for a value that may be followed by anything.
pub fn word(cursor: &mut Cursor, is_key: bool, alone: bool, closers: &[&str]) -> Option<String> {
    let rest = cursor.rest();
    let mut end = None;
    for (at, c) in rest.char_indices() {
        // A quote after a blank begins the next member: the comma is missing.
        let next_member = c == '"' && rest[..at].ends_with(' ');
        if at >= MAX_WORD || next_member || ",}])\n\r".contains(c) || (is_key && c == ':') {
            end = Some(at);
            break;
        }
        match any(closers.iter().map(|tag| cursor.begins(cursor.at + at, tag))) {
            Next::Yes => {
                end = Some(at);
                break;
            }
            Next::Maybe => return None,
            Next::No => {}
        }
    }
    let end = end.or((alone && cursor.ended).then_some(rest.len()))?;
    let word = rest[..end].trim_end_matches(WHITESPACE).to_owned();
    cursor.at += word.len();
    Some(word)
}

/// JSON of a value without quotes; true if it is a JSON or Python literal. Other words become strings.
pub fn word_value(word: &str) -> (String, bool) {
    let literal = match word {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        word if serde_json::from_str::<Value>(word).is_ok() => word,
        word => return (Value::from(word).to_string(), false),
    };
    (literal.to_owned(), true)
}
