//! Field policy: no field of a request is dropped silently.
//!
//! Every field falls into one of three groups:
//!
//! - Implemented fields, which the structs of `schema` know.
//! - Unimplemented fields of the OpenAI and vLLM schemas (table below). They are refused by name unless their value
//!   changes nothing, or reported if an answer without them is still useful.
//! - Unknown fields, at every level. They are accepted, logged once per name and listed in the response header
//!   `x-ignored-fields`, or refused under `--strict`.

use super::schema::Body;
use crate::error::{ApiError, truncate_for_error};
use axum::http::HeaderValue;
use axum::response::Response;
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// The accepted values of an unimplemented field: those that change nothing.
enum NoOp {
    /// No value: the field is always refused.
    Never,
    /// Every value: the field has no effect on a single local model.
    Always,
    /// Only this boolean.
    Bool(bool),
    /// Only this number.
    Number(f64),
    /// Only an empty list, object or string.
    Empty,
    /// Only the list of this string.
    ListOf(&'static str),
    /// Only one of these strings.
    OneOf(&'static [&'static str]),
    /// Every value; reported unless it is one of these, which change nothing.
    Reported(&'static [&'static str]),
    /// No value: the field now has this name in `structured_outputs`. Older vLLM clients send it, and without it the
    /// text would be unconstrained.
    Renamed(&'static str),
}

use NoOp::{Always, Bool, Empty, ListOf, Never, Number, OneOf, Renamed, Reported};

/// Fields of the OpenAI and vLLM schemas that one or both endpoints do not implement.
const UNIMPLEMENTED: &[(&str, NoOp)] = &[
    ("add_generation_prompt", Bool(true)),
    ("audio", Never),
    ("chat_template", Never),
    ("chat_template_kwargs", Empty),
    ("continue_final_message", Bool(false)),
    ("detokenize", Always),
    ("documents", Empty),
    ("ec_transfer_params", Never),
    ("echo", Bool(false)),
    ("extra_args", Empty),
    ("function_call", OneOf(&["none", "auto"])),
    ("functions", Empty),
    ("guided_choice", Renamed("choice")),
    ("guided_grammar", Renamed("grammar")),
    ("guided_json", Renamed("json")),
    ("guided_regex", Renamed("regex")),
    ("include_reasoning", Bool(true)),
    ("kv_transfer_params", Never),
    ("length_penalty", Number(1.0)),
    ("logprob_token_ids", Empty),
    ("messages", Never),
    ("metadata", Always),
    ("mm_processor_kwargs", Empty),
    ("modalities", ListOf("text")),
    ("moderation", Never),
    ("output_kind", Always),
    ("parallel_tool_calls", Always),
    ("prediction", Reported(&[])),
    ("prompt", Never),
    ("prompt_cache_key", Always),
    ("prompt_cache_options", Always),
    ("prompt_cache_retention", Always),
    ("reasoning_effort", Never),
    ("repetition_detection", Never),
    ("return_prompt_text", Bool(false)),
    ("safety_identifier", Always),
    ("service_tier", Reported(&["auto", "default"])),
    ("session_id", Always),
    ("skip_clone", Always),
    ("skip_reading_prefix_cache", Bool(false)),
    ("spaces_between_special_tokens", Bool(true)),
    ("store", Reported(&["false"])),
    ("stream_interval", Number(1.0)),
    ("suffix", Empty),
    ("thinking_token_budget", Never),
    ("tool_choice", OneOf(&["none", "auto"])),
    ("tools", Empty),
    ("top_logprobs", Number(0.0)),
    ("use_beam_search", Bool(false)),
    ("user", Always),
    ("verbosity", Reported(&["medium"])),
    ("vllm_xargs", Empty),
    ("watermarking", Bool(false)),
    ("web_search_options", Reported(&[])),
];

impl NoOp {
    fn accepts(&self, value: &RawValue) -> bool {
        let text = value.get();
        match self {
            Never | Renamed(_) => false,
            Always | Reported(_) => true,
            ListOf(name) => serde_json::from_str::<Vec<String>>(text).is_ok_and(|list| list == [*name]),
            Bool(expected) => text == if *expected { "true" } else { "false" },
            Number(expected) => text.parse() == Ok(*expected),
            Empty => ["[]", "{}", "\"\""].contains(&text.split_ascii_whitespace().collect::<String>().as_str()),
            OneOf(names) => serde_json::from_str::<String>(text).is_ok_and(|text| names.contains(&text.as_str())),
        }
    }

    /// True if an accepted value asks for something that it does not get.
    fn is_reported(&self, value: &RawValue) -> bool {
        let text = value.get().trim_matches('"');
        matches!(self, Reported(nothing) if !nothing.contains(&text))
    }

    /// Why a value is refused.
    fn refusal(&self, name: &str, value: &RawValue) -> String {
        if let Renamed(new) = self {
            return format!("{name} has a new name: send {new} in structured_outputs");
        }
        let hint = self.hint();
        let got = if hint.is_empty() { String::new() } else { format!(", got {}", describe(value)) };
        format!("{name} is not implemented by this endpoint{hint}{got}")
    }

    /// The accepted values, as the end of a sentence.
    fn hint(&self) -> String {
        match self {
            Never | Always | Reported(_) | Renamed(_) => String::new(),
            ListOf(name) => format!(": only [{name:?}] is accepted"),
            Bool(value) => format!(": only {value} is accepted"),
            Number(value) => format!(": only {value} is accepted"),
            Empty => ": only an empty value is accepted".into(),
            OneOf(names) => format!(": only {} is accepted", names.join(" or ")),
        }
    }
}

/// Applies the policy, and remembers which unknown names were logged.
#[derive(Default)]
pub struct FieldPolicy {
    strict: bool,
    logged: Mutex<HashSet<String>>,
}

/// Maximum number of logged names that are remembered, so that a client cannot fill the memory with them.
const MAX_LOGGED: usize = 1000;
/// Maximum number of names in the response header.
const MAX_LISTED: usize = 32;

impl FieldPolicy {
    /// `strict` refuses unknown fields.
    pub fn new(strict: bool) -> Self {
        Self { strict, logged: Mutex::default() }
    }

    /// Checks the fields that no part of the request knows. Returns the value of `x-ignored-fields`, if there are any.
    pub fn check(&self, body: &Body<'_>) -> Result<Option<HeaderValue>, ApiError> {
        self.check_all(&[body])
    }

    /// The same for a body and objects in it that were parsed in parts.
    pub fn check_all(&self, bodies: &[&Body<'_>]) -> Result<Option<HeaderValue>, ApiError> {
        let mut ignored = Vec::new();
        for body in bodies {
            self.check_one(body, &mut ignored)?;
        }
        let ignored: Vec<&str> = ignored.iter().map(String::as_str).collect();
        self.check_ignored(&ignored)
    }

    /// Checks the fields of one object, and appends the names of those without effect.
    fn check_one(&self, body: &Body<'_>, ignored: &mut Vec<String>) -> Result<(), ApiError> {
        let (rest, nested) = body.rest();
        for (name, value) in rest {
            match UNIMPLEMENTED.iter().find(|(known, _)| *known == name) {
                Some((_, no_op)) if no_op.is_reported(value) => ignored.push(body.full_name(name)),
                Some((_, no_op)) if no_op.accepts(value) => {}
                Some((_, no_op)) => {
                    let name = body.full_name(name);
                    let error = ApiError::invalid(&name, no_op.refusal(&name, value));
                    return Err(error.with_code("unsupported_parameter"));
                }
                None => ignored.push(body.full_name(name)),
            }
        }
        ignored.extend(nested.iter().cloned());
        Ok(())
    }

    /// Checks fields that have no effect: refuses them under `--strict`, otherwise returns the value of
    /// `x-ignored-fields`.
    pub fn check_ignored(&self, ignored: &[&str]) -> Result<Option<HeaderValue>, ApiError> {
        if let Some(name) = ignored.first().filter(|_| self.strict) {
            let message = format!("unknown field {}: the server runs with --strict", truncate_for_error(name));
            return Err(ApiError::invalid(name, message).with_code("unknown_parameter"));
        }
        self.log_once(ignored);
        Ok(header_value(ignored))
    }

    /// Adds fields without effect to the header.
    pub fn check_more(
        &self,
        header: Option<HeaderValue>,
        names: &[impl AsRef<str>],
    ) -> Result<Option<HeaderValue>, ApiError> {
        let more = self.check_ignored(&names.iter().map(AsRef::as_ref).collect::<Vec<_>>())?;
        let texts = [&header, &more].into_iter().flatten().filter_map(|value| value.to_str().ok());
        let joined = texts.collect::<Vec<_>>().join(", ");
        Ok(if joined.is_empty() { None } else { HeaderValue::try_from(joined).ok() })
    }

    fn log_once(&self, names: &[&str]) {
        if names.is_empty() {
            return;
        }
        // A panic elsewhere cannot leave a set of names half-written.
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        for &name in names {
            let short = truncate_for_error(name);
            if logged.len() < MAX_LOGGED && !logged.contains(&short) {
                log::warn!("requests carry the unknown field {short:?}; it is ignored");
                logged.insert(short);
            }
        }
    }
}

/// A short description of a value for error messages: scalars are shown, lists and objects are named.
fn describe(value: &RawValue) -> String {
    match value.get().as_bytes().first() {
        Some(b'[') => "a list".into(),
        Some(b'{') => "an object".into(),
        _ => truncate_for_error(value.get()),
    }
}

/// The names as a comma-separated list; characters that a header cannot carry become `?`.
fn header_value(names: &[&str]) -> Option<HeaderValue> {
    if names.is_empty() {
        return None;
    }
    let printable = |name: &&str| -> String {
        truncate_for_error(name).chars().map(|c| if c.is_ascii_graphic() && c != ',' { c } else { '?' }).collect()
    };
    let mut listed: Vec<String> = names.iter().take(MAX_LISTED).map(printable).collect();
    if names.len() > MAX_LISTED {
        listed.push("...".into());
    }
    HeaderValue::try_from(listed.join(", ")).ok()
}

/// Adds the header `x-ignored-fields` with the accepted unknown fields.
pub fn with_ignored(mut response: Response, ignored: Option<HeaderValue>) -> Response {
    if let Some(names) = ignored {
        response.headers_mut().insert("x-ignored-fields", names);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value, json};

    fn check(strict: bool, body: Value) -> Result<Option<HeaderValue>, ApiError> {
        FieldPolicy::new(strict).check(&Body::parse(body.to_string().as_bytes())?)
    }

    #[test]
    fn unimplemented_fields_are_refused_by_name_unless_they_ask_for_nothing() {
        for (field, refused, no_op) in [
            ("stream_interval", json!(2), json!(1)),
            ("echo", json!(true), json!(false)),
            ("length_penalty", json!(1.1), json!(1.0)),
            ("documents", json!([{"text": "x"}]), json!([])),
            ("tools", json!([{"type": "function"}]), json!([])),
            ("tool_choice", json!("required"), json!("auto")),
            ("user", json!(null), json!("someone")),
        ] {
            assert_eq!(check(true, json!({ field: no_op })).unwrap(), None, "{field}");
            if field != "user" {
                let body = check(false, json!({ field: refused })).unwrap_err().body();
                assert!(body.contains(&format!("{field} is not implemented")), "{body}");
                assert!(body.contains(&format!("\"param\":\"{field}\"")), "{body}");
            }
        }
    }

    #[test]
    fn dispensable_fields_are_reported() {
        for (field, reported, no_op) in [
            ("store", json!(true), json!(false)),
            ("service_tier", json!("priority"), json!("auto")),
            ("verbosity", json!("low"), json!("medium")),
            ("prediction", json!({"type": "content", "content": "x"}), json!(null)),
            ("web_search_options", json!({}), json!(null)),
        ] {
            assert_eq!(check(false, json!({ field: reported })).unwrap().unwrap(), field);
            assert_eq!(check(true, json!({ field: no_op })).unwrap(), None, "{field}");
        }
        assert_eq!(check(true, json!({"modalities": ["text"]})).unwrap(), None);
        assert!(
            check(false, json!({"modalities": ["text", "audio"]})).unwrap_err().body().contains("only [\\\"text\\\"]")
        );
    }

    #[test]
    fn older_names_are_refused_with_the_new_ones() {
        let body = check(false, json!({"guided_json": {}})).unwrap_err().body();
        assert!(body.contains("guided_json has a new name: send json in structured_outputs"), "{body}");
    }

    #[test]
    fn unknown_fields_are_listed_and_refused_under_strict() {
        let header = check(false, json!({"foo": 1, "b a,r": 2, "日": 3})).unwrap().unwrap();
        assert_eq!(header.to_str().unwrap(), "foo, b?a?r, ?");
        assert!(check(true, json!({"foo": 1})).unwrap_err().body().contains("unknown field foo"));
    }

    #[test]
    fn a_flood_of_unknown_fields_gives_a_bounded_header_and_log() {
        let policy = FieldPolicy::new(false);
        let body: Map<String, Value> = (0..5000).map(|i| (format!("f{i}"), json!(i))).collect();
        let text = Value::from(body).to_string();
        let header = policy.check(&Body::parse(text.as_bytes()).unwrap()).unwrap().unwrap();
        assert!(header.to_str().unwrap().ends_with("f31, ..."), "{header:?}");
        assert_eq!(policy.logged.lock().unwrap().len(), MAX_LOGGED);
    }

    #[test]
    fn the_table_is_sorted_and_has_no_field_twice() {
        assert!(UNIMPLEMENTED.is_sorted_by(|a, b| a.0 < b.0));
    }
}
