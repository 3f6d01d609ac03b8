//! Text of models, files and clients, made safe for a terminal and for a log.
//!
//! Control characters can move the cursor, change the title or the keyboard, and forge log lines. Bidirectional
//! controls can show a text in another order. Both are escaped as in Rust, such as `\u{1b}`.

use std::borrow::Cow;

/// Maximum number of characters of client input in an error message: a small request must not cause a large response.
const MAX_QUOTED: usize = 120;

/// The text for a terminal. Line breaks and tabs stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_control(c) && c != '\n' && c != '\t')
}

/// The text for a single line. Line breaks are also escaped.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_control)
}

/// A line of JSON with these characters escaped. Valid JSON contains them only in strings.
pub fn json_line(json: &str) -> Cow<'_, str> {
    if !json.contains(is_control) {
        return Cow::Borrowed(json);
    }
    let mut line = String::with_capacity(json.len() + 64);
    for c in json.chars() {
        match is_control(c) {
            // All of them are in the basic plane.
            true => line.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => line.push(c),
        }
    }
    Cow::Owned(line)
}

/// True for a control character (C0, DEL, C1), a bidirectional control, or a Unicode line break.
pub fn is_control(c: char) -> bool {
    let is_direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || is_direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Client input, truncated for an error message.
pub fn truncate_for_error(input: &str) -> String {
    match input.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{}…", &input[..end]),
        None => input.to_string(),
    }
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        match is_escaped(c) {
            true => safe.extend(c.escape_default()),
            false => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The characters are those of the Unicode properties `Cc`, `Bidi_Control`, `Zl` and `Zp`.
    #[test]
    fn nothing_that_steers_a_terminal_is_left() {
        let controls = (0..0x20).chain(0x7f..0xa0).chain([0x61c, 0x200e, 0x200f, 0x2028, 0x2029]);
        for code in controls.chain(0x202a..=0x202e).chain(0x2066..=0x2069) {
            let c = char::from_u32(code).unwrap();
            let text = format!("ä{c}文");
            let is_kept = c == '\n' || c == '\t';
            assert_eq!(printable(&text) == text, is_kept, "{code:x}");
            assert_eq!(printable(&text).contains(is_control), is_kept, "{code:x}");
            assert!(!one_line(&text).contains(is_control), "{code:x}");
        }
        assert_eq!(printable("a\x1b[2Jb\r\u{9b}\u{202e}"), "a\\u{1b}[2Jb\\r\\u{9b}\\u{202e}");
        assert_eq!(one_line("a\n\tb"), "a\\n\\tb");
        assert!(matches!(printable("plain text, 文字, é\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_line_of_json_says_the_same() {
        let value = serde_json::json!({"\u{9b}a": "\x1b \u{7f} \u{202e} \n ok"});
        let json = value.to_string();
        let line = json_line(&json);
        assert!(!line.contains(is_control), "{line}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).unwrap(), value);
    }

    #[test]
    fn long_input_is_truncated() {
        assert_eq!(truncate_for_error("short"), "short");
        assert_eq!(truncate_for_error(&"é".repeat(500)).chars().count(), MAX_QUOTED + 1);
    }
}
