//! `GET /openapi.json`: the OpenAPI document of the API.
//!
//! Written by hand from tables, because requests are parsed field by field, without structs that a generator could read. A
//! test sends every field listed here to a strict server.

use super::fields_listed::{CHAT, COMPLETIONS, Field, GENERATION, MESSAGES, RESPONSES, TOKENIZE};
use axum::Json;
use serde_json::{Map, Value, json};

/// Error statuses of every endpoint that takes a body.
const REFUSALS: [(&str, &str); 8] = [
    ("400", "A field cannot be used; the error names it."),
    ("401", "An API key is missing or wrong."),
    ("404", "There is no such model."),
    ("408", "The body did not arrive in time."),
    ("413", "The body is too large."),
    ("415", "The body is not application/json."),
    ("503", "The server is busy or stopping; try again after Retry-After."),
    ("504", "The request exceeded its time limit."),
];

/// Fields of `/v1/messages` that `count_tokens` reads, because they shape the prompt.
const COUNTED: [&str; 7] = ["model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"];

/// Handles `GET /openapi.json`.
pub async fn openapi() -> Json<Value> {
    Json(document())
}

/// An endpoint that takes a body.
struct Endpoint {
    path: &'static str,
    summary: &'static str,
    required: &'static [&'static str],
    fields: Vec<Field>,
    /// A request body whose response has status 200.
    example: Value,
    /// Fields that every response has.
    response: &'static [&'static str],
}

fn endpoints() -> [Endpoint; 7] {
    let hello = || json!([{"role": "user", "content": "Hello!"}]);
    let counted = MESSAGES.iter().filter(|field| COUNTED.contains(&field.0)).copied().collect();
    [
        Endpoint {
            path: "/v1/completions",
            summary: "Continue a text",
            required: &["prompt"],
            fields: [GENERATION, COMPLETIONS].concat(),
            example: json!({"prompt": "Once upon a time", "max_tokens": 8}),
            response: &["id", "object", "created", "model", "choices", "usage"],
        },
        Endpoint {
            path: "/v1/chat/completions",
            summary: "Answer messages",
            required: &["messages"],
            fields: [GENERATION, CHAT].concat(),
            example: json!({"messages": hello(), "max_tokens": 8}),
            response: &["id", "object", "created", "model", "choices", "usage"],
        },
        Endpoint {
            path: "/v1/responses",
            summary: "Answer a list of items",
            required: &["input"],
            fields: RESPONSES.to_vec(),
            example: json!({"input": "Hello!", "max_output_tokens": 8}),
            response: &["id", "object", "created_at", "model", "status", "output", "usage"],
        },
        Endpoint {
            path: "/v1/messages",
            summary: "Answer messages, as Anthropic's API",
            required: &["messages", "max_tokens"],
            fields: MESSAGES.to_vec(),
            example: json!({"messages": hello(), "max_tokens": 8}),
            response: &["id", "type", "role", "content", "model", "stop_reason", "usage"],
        },
        Endpoint {
            path: "/v1/messages/count_tokens",
            summary: "Count the tokens of a prompt",
            required: &["messages"],
            fields: counted,
            example: json!({"messages": hello()}),
            response: &["input_tokens"],
        },
        Endpoint {
            path: "/tokenize",
            summary: "Token ids of a text or of messages",
            required: &[],
            fields: TOKENIZE.to_vec(),
            example: json!({"prompt": "Once upon a time"}),
            response: &["count", "max_model_len", "tokens"],
        },
        Endpoint {
            path: "/detokenize",
            summary: "The text of token ids",
            required: &["tokens"],
            fields: vec![("model", "string", ""), ("tokens", "array", "Token ids.")],
            example: json!({"tokens": [1, 2, 3]}),
            response: &["prompt"],
        },
    ]
}

fn document() -> Value {
    let mut paths = Map::new();
    for endpoint in endpoints() {
        paths.insert(endpoint.path.into(), json!({"post": with_body(&endpoint)}));
    }
    for (path, method, summary) in [
        ("/v1/models", "get", "Names of the served model"),
        ("/health", "get", "200 while the engine makes progress and accepts requests"),
        ("/live", "get", "200 while the process can answer"),
        ("/load", "get", "Numbers of running and waiting requests"),
        ("/version", "get", "Version of the server"),
        ("/metrics", "get", "Metrics, in Prometheus' format"),
        ("/reset_prefix_cache", "post", "Drop all cached prefixes"),
        ("/openapi.json", "get", "This document"),
    ] {
        let responses = json!({"200": {"description": "OK"}, "401": {"description": "An API key is missing or wrong."},
            "403": {"description": "Only an admin may do this."}, "503": {"description": "The server is not ready."}});
        paths.insert(path.into(), json!({method: {"summary": summary, "responses": responses}}));
    }
    let mut ping = paths["/health"].clone();
    ping["post"] = ping["get"].clone();
    paths.insert("/ping".into(), ping);
    json!({
        "openapi": "3.1.0",
        "info": {"title": "PegaInfer", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    })
}

fn with_body(endpoint: &Endpoint) -> Value {
    let Endpoint { path, summary, required, fields, example, response } = endpoint;
    let schema = json!({"type": "object", "required": required, "properties": properties(fields)});
    let mut content = json!({"application/json": {"schema": {"type": "object", "required": response}}});
    if path.starts_with("/v1/") && !path.ends_with("count_tokens") {
        content["text/event-stream"] = json!({});
    }
    let mut responses = json!({"200": {"description": "OK", "content": content}});
    let error =
        json!({"type": "object", "required": ["message", "type"], "properties": {"message": {"type": "string"}}});
    let error = json!({"type": "object", "required": ["error"], "properties": {"error": error}});
    for (status, description) in REFUSALS {
        responses[status] = json!({"description": description, "content": {"application/json": {"schema": error}}});
    }
    json!({"summary": summary, "responses": responses,
        "requestBody": {"required": true, "content": {"application/json": {"schema": schema, "example": example}}}})
}

/// Schema properties of the fields. Each field may also be null, which means absent.
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
