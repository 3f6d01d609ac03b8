//! `GET /openapi.json`: the OpenAPI document, generated from the structs that requests are parsed into.
//!
//! A test sends every documented field with a legal value, and one undocumented field into every documented object.

use super::schema::anthropic::{AnswerFields, MessagesFields};
use super::schema::chat::ChatFields;
use super::schema::completions::CompletionFields;
use super::schema::conversation::ConversationFields;
use super::schema::generation::GenerationFields;
use super::schema::responses::ResponsesFields;
use super::schema::sampling::SamplingFields;
use super::schema::structure::StructureFields;
use super::schema::tokenize::{DetokenizeFields, TokenizeFields};
use axum::Json;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// Error statuses of every endpoint, and their meanings.
const ERRORS: [(&str, &str); 5] = [
    ("401", "An API key is missing or wrong."),
    ("403", "The key, the host or the origin may not do this."),
    ("429", "The client has too many requests; try again after Retry-After."),
    ("500", "The server failed; its log has the details."),
    ("503", "The server is busy or stopping; try again after Retry-After."),
];
/// Further error statuses of endpoints that take a body.
const BODY_ERRORS: [(&str, &str); 6] = [
    ("400", "A field cannot be used; the error names it."),
    ("404", "There is no such model."),
    ("408", "The body did not arrive in time."),
    ("413", "The body is too large."),
    ("415", "The body is not application/json."),
    ("504", "The request exceeded its time limit."),
];

/// Handles `GET /openapi.json`.
pub async fn openapi() -> Json<Value> {
    Json(document())
}

/// A part of a body: its schema, an object with properties.
type Part = fn(&mut SchemaGenerator) -> schemars::Schema;

/// An endpoint that takes a body.
struct Endpoint {
    path: &'static str,
    summary: &'static str,
    parts: &'static [Part],
    /// Fields that have to be given, besides those of the schemas.
    required: &'static [&'static str],
    /// A request body whose response has status 200.
    example: Value,
    /// Whether the response may be a stream of events.
    streams: bool,
    /// Fields that every response has.
    response: &'static [&'static str],
}

fn endpoints() -> Vec<Endpoint> {
    let hello = || json!([{"role": "user", "content": "Hello!"}]);
    vec![
        Endpoint {
            path: "/v1/completions",
            summary: "Continue a text",
            parts: &[
                CompletionFields::json_schema,
                GenerationFields::json_schema,
                SamplingFields::json_schema,
                StructureFields::json_schema,
            ],
            required: &[],
            example: json!({"prompt": "Once upon a time", "max_tokens": 8}),
            streams: true,
            response: &["id", "object", "created", "model", "choices", "usage"],
        },
        Endpoint {
            path: "/v1/chat/completions",
            summary: "Answer messages",
            parts: &[
                ConversationFields::json_schema,
                ChatFields::json_schema,
                GenerationFields::json_schema,
                SamplingFields::json_schema,
                StructureFields::json_schema,
            ],
            required: &["messages"],
            example: json!({"messages": hello(), "max_tokens": 8}),
            streams: true,
            response: &["id", "object", "created", "model", "choices", "usage"],
        },
        Endpoint {
            path: "/v1/responses",
            summary: "Answer a list of items",
            parts: &[ResponsesFields::json_schema, SamplingFields::json_schema],
            required: &[],
            example: json!({"input": "Hello!", "max_output_tokens": 8}),
            streams: true,
            response: &["id", "object", "created_at", "model", "status", "output", "usage"],
        },
        Endpoint {
            path: "/v1/messages",
            summary: "Answer messages, as Anthropic's API",
            parts: &[MessagesFields::json_schema, AnswerFields::json_schema, SamplingFields::json_schema],
            required: &[],
            example: json!({"messages": hello(), "max_tokens": 8}),
            streams: true,
            response: &["id", "type", "role", "content", "model", "stop_reason", "usage"],
        },
        Endpoint {
            path: "/v1/messages/count_tokens",
            summary: "Count the tokens of a prompt",
            parts: &[MessagesFields::json_schema, SamplingFields::json_schema],
            required: &[],
            example: json!({"messages": hello()}),
            streams: false,
            response: &["input_tokens"],
        },
        Endpoint {
            path: "/tokenize",
            summary: "Token ids of a text or of messages",
            parts: &[TokenizeFields::json_schema, ConversationFields::json_schema, StructureFields::json_schema],
            required: &[],
            example: json!({"prompt": "Once upon a time"}),
            streams: false,
            response: &["count", "max_model_len", "tokens"],
        },
        Endpoint {
            path: "/detokenize",
            summary: "The text of token ids",
            parts: &[DetokenizeFields::json_schema],
            required: &[],
            example: json!({"tokens": [1, 2, 3]}),
            streams: false,
            response: &["prompt"],
        },
    ]
}

/// The document.
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for endpoint in endpoints() {
        paths.insert(endpoint.path.into(), json!({"post": with_body(&endpoint, &mut generator)}));
    }
    for (path, methods, summary) in [
        ("/v1/models", &["get"][..], "Names of the served model"),
        ("/v1/models/{name}", &["get"], "The served model"),
        ("/health", &["get"], "200 while the engine makes progress and accepts requests"),
        ("/live", &["get"], "200 while the process can answer"),
        ("/ping", &["get", "post"], "The same as /health"),
        ("/load", &["get"], "Numbers of running and waiting requests"),
        ("/version", &["get"], "Version of the server"),
        ("/metrics", &["get"], "Metrics, in Prometheus' format"),
        ("/reset_prefix_cache", &["post"], "Drop all cached prefixes"),
        ("/debug/steps", &["get"], "Times of the newest steps of the engine, in JSON Lines"),
        ("/openapi.json", &["get"], "This document"),
    ] {
        let methods = methods.iter().map(|method| (method.to_string(), without_body(path, summary)));
        paths.insert(path.into(), Value::Object(methods.collect()));
    }
    let mut schemas = generator.take_definitions(true);
    schemas.insert("Error".into(), error_schema());
    json!({
        "openapi": "3.1.0",
        "info": {"title": "PegaInfer", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

fn error_schema() -> Value {
    json!({
        "type": "object",
        "required": ["error"],
        "properties": {"error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }},
    })
}

fn error(description: &str) -> Value {
    let schema = json!({"$ref": "#/components/schemas/Error"});
    json!({"description": description, "content": {"application/json": {"schema": schema}}})
}

fn without_body(path: &str, summary: &str) -> Value {
    let mut responses = json!({"200": {"description": "OK"}});
    for (status, description) in ERRORS {
        responses[status] = json!({"description": description});
    }
    let mut operation = json!({"summary": summary});
    if path.contains("{name}") {
        responses["400"] = error("The name is not valid UTF-8.");
        responses["404"] = error("There is no such model.");
        let schema = json!({"type": "string", "minLength": 1});
        operation["parameters"] = json!([{"name": "name", "in": "path", "required": true, "schema": schema}]);
    }
    operation["responses"] = responses;
    operation
}

fn with_body(endpoint: &Endpoint, generator: &mut SchemaGenerator) -> Value {
    let Endpoint { summary, parts, required, example, streams, response, .. } = endpoint;
    let mut content = json!({"application/json": {"schema": {"type": "object", "required": response}}});
    if *streams {
        content["text/event-stream"] = json!({});
    }
    let mut responses = json!({"200": {"description": "OK", "content": content}});
    for (status, description) in ERRORS.into_iter().chain(BODY_ERRORS) {
        responses[status] = error(description);
    }
    let schema = merge(parts, required, generator);
    json!({"summary": summary, "responses": responses,
        "requestBody": {"required": true, "content": {"application/json": {"schema": schema, "example": example}}}})
}

/// One object that has the properties of all parts.
fn merge(parts: &[Part], required: &[&str], generator: &mut SchemaGenerator) -> Value {
    let mut properties = Map::new();
    let mut all_required: Vec<Value> = required.iter().map(|&name| name.into()).collect();
    for part in parts {
        let mut schema = part(generator).to_value();
        if let Some(Value::Object(fields)) = schema.get_mut("properties").map(Value::take) {
            properties.extend(fields);
        }
        if let Some(Value::Array(names)) = schema.get_mut("required").map(Value::take) {
            all_required.extend(names);
        }
    }
    json!({"type": "object", "required": all_required, "properties": properties})
}
