//! JSON objects without their end, because the output was cut off.

use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};
use std::collections::VecDeque;

/// Maximum number of places where an end is tried. Only text that is not JSON at all needs more than one.
const MAX_TRIES: usize = 8;

/// Treatment of an incomplete string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutString {
    /// It ends where the text ends.
    Keep,
    /// The member that contains it is left out.
    Drop,
}

/// True if the text is one JSON object.
pub fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// The text's object without white space between its values; numbers are not reformatted. An object that was cut off
/// keeps its complete members.
pub fn exact_object(text: &str) -> Box<RawValue> {
    let exact = is_object(text).then(|| RawValue::from_string(compact(text)).ok()).flatten();
    let complete = || to_raw_value(&complete_object(text, CutString::Drop)).unwrap_or_default();
    exact.unwrap_or_else(complete)
}

/// JSON without the white space between its values.
fn compact(json: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    let is_kept = |c: &char| {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ => return in_string || !c.is_ascii_whitespace(),
        }
        true
    };
    json.chars().filter(is_kept).collect()
}

/// The complete members of an object from the beginning of its JSON text. Empty if the text is not JSON.
pub fn complete_object(text: &str, cut_string: CutString) -> Map<String, Value> {
    if let Ok(object) = serde_json::from_str(text) {
        return object;
    }
    let Scan { ends, in_string } = scan(text);
    if in_string && cut_string == CutString::Keep {
        // A truncated escape has at most five characters.
        for cut in (0..=5.min(text.len())).filter(|cut| text.is_char_boundary(text.len() - cut)) {
            if let Some(object) = parse(format!("{}\"", &text[..text.len() - cut])) {
                return object;
            }
        }
    }
    ends.into_iter().rev().find_map(|at| parse(text[..at].to_owned())).unwrap_or_default()
}

/// Closes the brackets that are open at the end of the text.
fn parse(mut text: String) -> Option<Map<String, Value>> {
    let mut open = Vec::new();
    brackets(&text, |_, c| match c {
        '{' => open.push('}'),
        '[' => open.push(']'),
        '}' | ']' => _ = open.pop(),
        _ => {}
    });
    text.extend(open.into_iter().rev());
    serde_json::from_str(&text).ok()
}

struct Scan {
    /// The last places at which every value is complete.
    ends: VecDeque<usize>,
    /// True if the text ends inside a string.
    in_string: bool,
}

fn scan(text: &str) -> Scan {
    let mut ends = VecDeque::new();
    let in_string = brackets(text, |at, c| {
        ends.push_back(if c == ',' { at } else { at + 1 });
        if ends.len() > MAX_TRIES {
            ends.pop_front();
        }
    });
    Scan { ends, in_string }
}

/// Visits the brackets and commas outside strings; true if the text ends inside a string.
fn brackets(text: &str, mut visit: impl FnMut(usize, char)) -> bool {
    let (mut in_string, mut escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            ',' | '{' | '[' | '}' | ']' if !in_string => visit(at, c),
            _ => {}
        }
    }
    in_string
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn complete_members_are_kept() {
        for (text, dropped, kept) in [
            ("{\"a\": 1}", json!({"a": 1}), json!({"a": 1})),
            ("{\"a\": 1, \"b\": \"x, {", json!({"a": 1}), json!({"a": 1, "b": "x, {"})),
            ("{\"a\": [1, {\"c\": \"d\\u00", json!({"a": [1, {}]}), json!({"a": [1, {"c": "d"}]})),
            ("{\"a\": [1, 2", json!({"a": [1]}), json!({"a": [1]})),
            ("{\"a\": {\"b\": 1}, \"c", json!({"a": {"b": 1}}), json!({"a": {"b": 1}})),
            ("{\"a\": \"x\\", json!({}), json!({"a": "x"})),
            ("{\"a\": ", json!({}), json!({})),
            ("", json!({}), json!({})),
            ("no JSON, {at} all", json!({}), json!({})),
            ("[1, 2]", json!({}), json!({})),
        ] {
            assert_eq!(Value::Object(complete_object(text, CutString::Drop)), dropped, "{text}");
            assert_eq!(Value::Object(complete_object(text, CutString::Keep)), kept, "{text}");
        }
    }

    #[test]
    fn an_object_keeps_its_numbers_and_loses_its_white_space() {
        for (text, exact) in [
            ("{ \"a b\" : [ 1,\n 2 ] }\n", "{\"a b\":[1,2]}"),
            (
                "{\"n\": 123456789012345678901234567890, \"m\": 1e400}",
                "{\"n\":123456789012345678901234567890,\"m\":1e400}",
            ),
            ("{\"a\": \"\\\\\", \"b\": \"\\\" x\"}", "{\"a\":\"\\\\\",\"b\":\"\\\" x\"}"),
            ("{\"a\": 1, \"b\": \"x", "{\"a\":1}"),
            ("[1]", "{}"),
            ("", "{}"),
        ] {
            assert_eq!(exact_object(text).get(), exact, "{text}");
        }
        assert!(is_object(" {} ") && !is_object("{") && !is_object("[]") && !is_object("{} {}"));
    }

    #[test]
    fn deep_nesting_takes_no_time() {
        assert!(complete_object(&"{\"a\":".repeat(100_000), CutString::Keep).is_empty());
    }
}
