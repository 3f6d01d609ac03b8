//! serde's errors as one sentence for the client, such as `n must be an integer from 1 to 128, got "x"`.

use crate::error::{ApiError, truncate_for_error};
use axum::http::StatusCode;
use serde_path_to_error::{Path, Segment};

/// Marks an expectation that is about the whole list or object, although one of its values violates it.
pub const OF_PARENT: char = '^';
/// Marks an error that is a whole sentence, so that the path is not put before it.
pub const SENTENCE: char = '=';

/// The error about the value at `path` in the field `within`, or in the body if that is empty.
pub fn explain(within: &str, path: &Path, error: &serde_json::Error) -> ApiError {
    let within = (!within.is_empty()).then(|| Segment::Map { key: within.to_owned() });
    let steps: Vec<&Segment> = within.iter().chain(path).collect();
    if error.is_syntax() {
        return invalid_json(&name(&steps), error);
    }
    let field = steps.iter().find_map(|step| if let Segment::Map { key } = step { Some(key.as_str()) } else { None });
    ApiError::invalid(field.unwrap_or("body"), sentence(&steps, &without_position(error)))
}

/// The error about a value that is not valid JSON.
pub fn invalid_json(name: &str, error: &serde_json::Error) -> ApiError {
    let message = format!("the request body is not valid JSON: {} in {name}", without_position(error));
    ApiError::new(StatusCode::BAD_REQUEST, message)
}

/// The error without its line and column, which are those of the value, not of the body.
fn without_position(error: &serde_json::Error) -> String {
    let mut text = error.to_string();
    if error.line() > 0
        && let Some(at) = text.rfind(" at line ")
    {
        text.truncate(at);
    }
    text
}

fn sentence(steps: &[&Segment], text: &str) -> String {
    let types = ["invalid type: ", "invalid value: "];
    let wrong = types.iter().find_map(|kind| text.strip_prefix(kind)?.rsplit_once(", expected "));
    let Some((got, expected)) = wrong else {
        return match text.strip_prefix(SENTENCE) {
            Some(sentence) => sentence.to_owned(),
            None => format!("{} {text}", name(steps)),
        };
    };
    let (steps, expected) = match expected.strip_prefix(OF_PARENT) {
        Some(expected) => (&steps[..steps.len().saturating_sub(1)], expected),
        None => (steps, expected),
    };
    let be = if expected.starts_with("hold ") { "" } else { "be " };
    format!("{} must {be}{}, got {}", name(steps), plain_type(expected), plain_value(got))
}

/// `messages[0].content`.
fn name(steps: &[&Segment]) -> String {
    let mut name = String::new();
    for step in steps {
        match step {
            Segment::Seq { index } => name += &format!("[{index}]"),
            Segment::Map { key } if name.is_empty() => name += key,
            Segment::Map { key } => name = name + "." + key,
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    truncate_for_error(&name)
}

/// serde's name of a type, in the words of JSON.
fn plain_type(expected: &str) -> &str {
    match expected {
        "a boolean" => "true or false",
        "f32" | "f64" => "a number",
        "i64" | "u64" | "i32" | "u32" | "usize" => "an integer",
        "a sequence" => "a list",
        "a map" => "an object",
        other => other,
    }
}

/// serde's description of a value, as JSON if it is a scalar.
fn plain_value(got: &str) -> String {
    for kind in ["boolean `", "integer `", "floating point `"] {
        if let Some(value) = got.strip_prefix(kind) {
            return truncate_for_error(value.trim_end_matches('`'));
        }
    }
    match got {
        "sequence" => "a list".into(),
        "map" => "an object".into(),
        _ => match got.strip_prefix("string \"").and_then(|text| text.strip_suffix('"')) {
            Some(text) => format!("\"{}\"", truncate_for_error(text)),
            None => truncate_for_error(got),
        },
    }
}
