//! Regular expressions for string values without quotes, as in the tag format.

use llguidance::regex_to_lark;
use serde_json::Value;

/// Maximum size of an enforced pattern, in bytes.
const MAX_PATTERN: usize = 4 << 10;
/// Keywords that do not restrict the strings.
const ANNOTATIONS: [&str; 14] = [
    "type",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$defs",
    "definitions",
    "$schema",
    "contentMediaType",
];
/// Patterns of the well-known formats, as in OpenAI's structured output.
const FORMATS: [(&str, &str); 8] = [
    ("date", "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"),
    ("time", "^([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$"),
    (
        "date-time",
        "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])[tT]([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]+)?\
         ([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$",
    ),
    ("duration", "^P([0-9]+W|([0-9]+[YMD])+(T([0-9]+[HMS])+)?|T([0-9]+[HMS])+)$"),
    ("email", "^[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(\\.[A-Za-z0-9-]+)*$"),
    ("hostname", "^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$"),
    ("ipv4", "^((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])$"),
    ("uuid", "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"),
];

/// Regular expressions, all of which a string value has to match. `lenient` leaves out keywords that cannot be
/// enforced.
///
/// # Errors
/// The keyword that cannot be enforced.
pub fn patterns(schema: &Value, lenient: bool) -> Result<Vec<String>, String> {
    let mut patterns = Vec::new();
    for (name, value) in schema.as_object().into_iter().flatten() {
        let found = match (name.as_str(), value) {
            ("pattern", Value::String(pattern)) => search(pattern),
            ("format", Value::String(format)) => {
                FORMATS.iter().find(|(name, _)| name == format).and_then(|(_, pattern)| search(pattern))
            }
            ("minLength", length) => length.as_u64().map(|n| format!("(?s:.{{{n},}})")),
            ("maxLength", length) => length.as_u64().map(|n| format!("(?s:.{{0,{n}}})")),
            (name, _) if ANNOTATIONS.contains(&name) => continue,
            _ => None,
        };
        match found {
            Some(pattern) => patterns.push(pattern),
            None if lenient => {}
            None => return Err(name.clone()),
        }
    }
    Ok(patterns)
}

/// Turns a pattern that may match anywhere into one that matches the whole text. `None` if it has lookarounds, anchors
/// in its middle, or is too large.
fn search(pattern: &str) -> Option<String> {
    if pattern.len() > MAX_PATTERN {
        return None;
    }
    let whole: Option<Vec<String>> = branches(pattern).into_iter().map(whole).collect();
    Some(whole?.join("|"))
}

fn whole(branch: &str) -> Option<String> {
    let (start, branch) = match branch.strip_prefix('^') {
        Some(rest) => ("", rest),
        None => ("(?s:.*)", branch),
    };
    let escaped = |text: &str| (text.len() - text.trim_end_matches('\\').len()) % 2 == 1;
    let (branch, end) = match branch.strip_suffix('$').filter(|rest| !escaped(rest)) {
        Some(rest) => (rest, ""),
        None => (branch, "(?s:.*)"),
    };
    // Classes are ASCII, as in ECMAScript.
    let branch = regex_to_lark(branch, "dw");
    let parsed = regex_syntax::parse(&branch.replace("\\/", "/")).ok()?;
    parsed.properties().look_set().is_empty().then(|| format!("{start}(?:{branch}){end}"))
}

/// The alternatives at the top of a pattern.
fn branches(pattern: &str) -> Vec<&str> {
    let (mut branches, mut start, mut depth, mut class, mut escaped) = (Vec::new(), 0, 0usize, false, false);
    for (at, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => class = false,
            _ if class => {}
            '[' => class = true,
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                branches.push(&pattern[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    branches.push(&pattern[start..]);
    branches
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patterns_match_the_whole_text() {
        for (schema, expected) in [
            (json!({"type": "string", "title": "T"}), vec![]),
            (json!({"pattern": "^ab+$"}), vec!["(?:ab+)"]),
            (json!({"pattern": "a/b"}), vec!["(?s:.*)(?:a\\/b)(?s:.*)"]),
            (json!({"pattern": "^(a|b)|c\\|$"}), vec!["(?:(a|b))(?s:.*)|(?s:.*)(?:c\\|)"]),
            (json!({"pattern": "^\\d\\$"}), vec!["(?:[0-9]\\$)(?s:.*)"]),
            (json!({"minLength": 2, "maxLength": 4}), vec!["(?s:.{2,})", "(?s:.{0,4})"]),
        ] {
            assert_eq!(patterns(&schema, false).unwrap(), expected, "{schema}");
        }
    }

    #[test]
    fn unenforceable_keywords_are_errors_or_left_out() {
        for (schema, name) in [
            (json!({"pattern": "(?=a)b"}), "pattern"),
            (json!({"pattern": "a(^b|c)"}), "pattern"),
            (json!({"pattern": "a".repeat(5000)}), "pattern"),
            (json!({"format": "rocket"}), "format"),
            (json!({"not": {"const": "x"}}), "not"),
        ] {
            assert_eq!(patterns(&schema, false).unwrap_err(), name);
            assert!(patterns(&schema, true).unwrap().is_empty());
        }
    }
}
