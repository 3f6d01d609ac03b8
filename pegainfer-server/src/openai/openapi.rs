//! `GET /openapi.json`: what the API takes and gives.
//!
//! Written by hand from tables: requests are parsed field by field, without the structs that a generator would read, and a
//! second list of those would only be one that nothing checks. A test sends every field listed here to a strict server.

use super::fields_listed::{CHAT, COMPLETIONS, Field, GENERATION, MESSAGES, RESPONSES, TOKENIZE};
use axum::Json;
use serde_json::{Map, Value, json};

/// Statuses of refusals, for every endpoint that takes a body.
const REFUSALS: [(&str, &str); 8] = [
    ("400", "A field cannot be used; the error names it."),
    ("401", "The server needs an API key."),
    ("404", "There is no such model."),
    ("408", "The body did not come in time."),
    ("413", "The body is too large."),
    ("415", "The body is not application/json."),
    ("503", "The server is busy or stopping; try again after Retry-After."),
    ("504", "The request took longer than it may."),
];

/// Fields of `/v1/messages` that make its prompt.
const COUNTED: [&str; 7] = ["model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"];

/// The handler.
pub async fn openapi() -> Json<Value> {
    Json(document())
}

fn document() -> Value {
    let mut paths = Map::new();
    let counted = MESSAGES.iter().filter(|field| COUNTED.contains(&field.0)).copied().collect();
    for (path, summary, required, fields) in [
        ("/v1/completions", "Continue a text", &["prompt"][..], [GENERATION, COMPLETIONS].concat()),
        ("/v1/chat/completions", "Answer messages", &["messages"], [GENERATION, CHAT].concat()),
        ("/v1/responses", "Answer items", &["input"], RESPONSES.to_vec()),
        ("/v1/messages", "Answer messages, as Anthropic's API", &["messages", "max_tokens"], MESSAGES.to_vec()),
        ("/v1/messages/count_tokens", "Tokens of such a prompt", &["messages"], counted),
        ("/tokenize", "Token ids of a text or of messages", &[], TOKENIZE.to_vec()),
        (
            "/detokenize",
            "The text of token ids",
            &["tokens"],
            vec![("model", "string", ""), ("tokens", "array", "Token ids.")],
        ),
    ] {
        paths.insert(path.into(), json!({"post": with_body(path, summary, required, &fields)}));
    }
    for (path, method, summary) in [
        ("/v1/models", "get", "The served names"),
        ("/health", "get", "200 while the engine makes progress and takes requests"),
        ("/ping", "get", "As /health"),
        ("/load", "get", "Requests that run and wait"),
        ("/version", "get", "Version of the server"),
        ("/metrics", "get", "Metrics, in Prometheus' format"),
        ("/reset_prefix_cache", "post", "Forget cached prefixes"),
        ("/openapi.json", "get", "This document"),
    ] {
        let answers = json!({"200": {"description": "OK"}, "401": {"description": "The server needs an API key."},
            "503": {"description": "The server is not ready."}});
        paths.insert(path.into(), json!({method: {"summary": summary, "responses": answers}}));
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "PegaInfer", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    })
}

fn with_body(path: &str, summary: &str, required: &[&str], fields: &[Field]) -> Value {
    let schema = json!({"type": "object", "required": required, "properties": properties(fields)});
    let any = json!({"type": "object"});
    let mut content = json!({"application/json": {"schema": any}});
    if path.starts_with("/v1/") && !path.ends_with("count_tokens") {
        content["text/event-stream"] = json!({"schema": {"type": "string"}});
    }
    let mut responses = json!({"200": {"description": "OK", "content": content}});
    for (status, description) in REFUSALS {
        responses[status] = json!({"description": description, "content": {"application/json": {"schema": any}}});
    }
    json!({"summary": summary, "responses": responses,
        "requestBody": {"required": true, "content": {"application/json": {"schema": schema}}}})
}

/// Each field may also be null, which means absent.
fn properties(fields: &[Field]) -> Map<String, Value> {
    let property = |(name, kinds, description): &Field| {
        let kinds: Vec<&str> = kinds.split('|').chain(["null"]).collect();
        (name.to_string(), json!({"type": kinds, "description": description}))
    };
    fields.iter().map(property).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_field_is_listed_twice() {
        for fields in [&[GENERATION, COMPLETIONS].concat()[..], &[GENERATION, CHAT].concat(), RESPONSES, MESSAGES] {
            let names: HashSet<&str> = fields.iter().map(|field| field.0).collect();
            assert_eq!(names.len(), fields.len());
        }
    }
}
