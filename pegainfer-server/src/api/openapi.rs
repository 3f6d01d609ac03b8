//! `GET /openapi.json`: the OpenAPI document, generated from the structs of requests and responses.
//!
//! Tests send every documented field with a legal value and an undocumented field in every documented object, and
//! compare responses with their schemas.

use super::anthropic::wire::{Message, StreamEvent as MessageStreamEvent, TokenCount};
use super::info::{LoadResponse, ModelCard, Models, Version};
use super::responses::events::StreamEvent as ResponseStreamEvent;
use super::responses::wire::ResponseObject;
use super::schema::anthropic::{AnswerFields, MessagesFields};
use super::schema::chat::ChatFields;
use super::schema::completions::CompletionFields;
use super::schema::conversation::ConversationFields;
use super::schema::generation::GenerationFields;
use super::schema::responses::ResponsesFields;
use super::schema::sampling::SamplingFields;
use super::schema::structure::StructureFields;
use super::schema::tokenize::{DetokenizeFields, TokenizeFields};
use super::tokenize::{Detokenized, Tokenized};
use super::wire::{ChatChoice, ChatChunkChoice, Chunk, CompletionChoice, Envelope};
use crate::error::{AnthropicError, OpenAiError};
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

/// A schema of a body or part of it: an object with properties.
type ObjectSchema = fn(&mut SchemaGenerator) -> schemars::Schema;

/// An endpoint that takes a body.
struct Endpoint {
    path: &'static str,
    summary: &'static str,
    parts: &'static [ObjectSchema],
    /// Required fields, in addition to those of the schemas.
    required: &'static [&'static str],
    /// A request body whose response has status 200.
    example: Value,
    response: ObjectSchema,
    /// Schema of an event, if the response may be a stream.
    event: Option<ObjectSchema>,
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
            response: SchemaGenerator::subschema_for::<Envelope<CompletionChoice>>,
            event: Some(SchemaGenerator::subschema_for::<Chunk<CompletionChoice>>),
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
            response: SchemaGenerator::subschema_for::<Envelope<ChatChoice>>,
            event: Some(SchemaGenerator::subschema_for::<Chunk<ChatChunkChoice>>),
        },
        Endpoint {
            path: "/v1/responses",
            summary: "Answer a list of items",
            parts: &[ResponsesFields::json_schema, SamplingFields::json_schema],
            required: &[],
            example: json!({"input": "Hello!", "max_output_tokens": 8}),
            response: SchemaGenerator::subschema_for::<ResponseObject>,
            event: Some(SchemaGenerator::subschema_for::<ResponseStreamEvent>),
        },
        Endpoint {
            path: "/v1/messages",
            summary: "Answer messages, as Anthropic's API",
            parts: &[MessagesFields::json_schema, AnswerFields::json_schema, SamplingFields::json_schema],
            required: &[],
            example: json!({"messages": hello(), "max_tokens": 8}),
            response: SchemaGenerator::subschema_for::<Message>,
            event: Some(SchemaGenerator::subschema_for::<MessageStreamEvent>),
        },
        Endpoint {
            path: "/v1/messages/count_tokens",
            summary: "Count the tokens of a prompt",
            parts: &[MessagesFields::json_schema, SamplingFields::json_schema],
            required: &[],
            example: json!({"messages": hello()}),
            response: SchemaGenerator::subschema_for::<TokenCount>,
            event: None,
        },
        Endpoint {
            path: "/tokenize",
            summary: "Token ids of a text or of messages",
            parts: &[TokenizeFields::json_schema, ConversationFields::json_schema, StructureFields::json_schema],
            required: &[],
            example: json!({"prompt": "Once upon a time"}),
            response: SchemaGenerator::subschema_for::<Tokenized>,
            event: None,
        },
        Endpoint {
            path: "/detokenize",
            summary: "The text of token ids",
            parts: &[DetokenizeFields::json_schema],
            required: &[],
            example: json!({"tokens": [1, 2, 3]}),
            response: SchemaGenerator::subschema_for::<Detokenized>,
            event: None,
        },
    ]
}

/// An endpoint without a body: path, methods, summary, and the schema of its response if that is JSON.
type BodylessEndpoint = (&'static str, &'static [&'static str], &'static str, Option<ObjectSchema>);

/// Endpoints without a body.
const BODYLESS: [BodylessEndpoint; 11] = [
    ("/v1/models", &["get"], "Names of the served model", Some(SchemaGenerator::subschema_for::<Models>)),
    ("/v1/models/{name}", &["get"], "The served model", Some(SchemaGenerator::subschema_for::<ModelCard>)),
    ("/health", &["get"], "200 while the engine makes progress and accepts requests", None),
    ("/live", &["get"], "200 while the process can answer", None),
    ("/ping", &["get", "post"], "The same as /health", None),
    (
        "/load",
        &["get"],
        "Numbers of running and waiting requests",
        Some(SchemaGenerator::subschema_for::<LoadResponse>),
    ),
    ("/version", &["get"], "Version of the server", Some(SchemaGenerator::subschema_for::<Version>)),
    ("/metrics", &["get"], "Metrics, in Prometheus' format", None),
    ("/reset_prefix_cache", &["post"], "Drop all cached prefixes", None),
    ("/debug/steps", &["get"], "Times of the newest steps of the engine, in JSON Lines", None),
    ("/openapi.json", &["get"], "This document", None),
];

/// Schemas of all bodies. Requests and responses have separate generators, because only request fields are optional.
struct Generators {
    requests: SchemaGenerator,
    responses: SchemaGenerator,
}

impl Generators {
    fn new() -> Self {
        let settings = || SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
        Self { requests: settings().into_generator(), responses: settings().for_serialize().into_generator() }
    }

    /// An error response. Anthropic's routes (`path`) have their own errors.
    fn error(&mut self, path: &str, description: &str) -> Value {
        let schema = match path.starts_with("/v1/messages") {
            true => self.responses.subschema_for::<AnthropicError>(),
            false => self.responses.subschema_for::<OpenAiError>(),
        };
        json!({"description": description, "content": {"application/json": {"schema": schema}}})
    }

    /// The components of the document. A test checks that no name is repeated.
    fn schemas(mut self) -> Map<String, Value> {
        let mut schemas = self.requests.take_definitions(true);
        schemas.extend(self.responses.take_definitions(true));
        schemas
    }
}

/// The document.
pub fn document() -> Value {
    let mut generators = Generators::new();
    let paths = paths(&mut generators);
    json!({
        "openapi": "3.1.0",
        "info": {"title": "PegaInfer", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "schemas": generators.schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

fn paths(generators: &mut Generators) -> Map<String, Value> {
    let mut paths = Map::new();
    for endpoint in endpoints() {
        paths.insert(endpoint.path.into(), json!({"post": with_body(&endpoint, generators)}));
    }
    for plain in BODYLESS {
        let methods = plain.1.iter().map(|method| (method.to_string(), without_body(plain, generators)));
        paths.insert(plain.0.into(), Value::Object(methods.collect()));
    }
    paths
}

fn without_body((path, _, summary, response): BodylessEndpoint, generators: &mut Generators) -> Value {
    let mut responses = json!({"200": {"description": "OK"}});
    if let Some(response) = response {
        responses["200"]["content"] = json!({"application/json": {"schema": response(&mut generators.responses)}});
    }
    for (status, description) in ERRORS {
        responses[status] = json!({"description": description});
    }
    let mut operation = json!({"summary": summary});
    if path.contains("{name}") {
        responses["400"] = generators.error(path, "The name is not valid UTF-8.");
        responses["404"] = generators.error(path, "There is no such model.");
        let schema = json!({"type": "string", "minLength": 1});
        operation["parameters"] = json!([{"name": "name", "in": "path", "required": true, "schema": schema}]);
    }
    operation["responses"] = responses;
    operation
}

fn with_body(endpoint: &Endpoint, generators: &mut Generators) -> Value {
    let Endpoint { path, summary, parts, required, example, response, event } = endpoint;
    let mut content = json!({"application/json": {"schema": response(&mut generators.responses)}});
    if let Some(event) = event {
        // OpenAPI 3.1 cannot describe the data of one event; 3.2 calls it itemSchema.
        content["text/event-stream"] = json!({"x-itemSchema": event(&mut generators.responses)});
    }
    let mut responses = json!({"200": {"description": "OK", "content": content}});
    for (status, description) in ERRORS.into_iter().chain(BODY_ERRORS) {
        responses[status] = generators.error(path, description);
    }
    let schema = merge(parts, required, &mut generators.requests);
    json!({"summary": summary, "responses": responses,
        "requestBody": {"required": true, "content": {"application/json": {"schema": schema, "example": example}}}})
}

/// One object with the properties of all parts.
fn merge(parts: &[ObjectSchema], required: &[&str], generator: &mut SchemaGenerator) -> Value {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_of_requests_and_responses_have_different_names() {
        let mut generators = Generators::new();
        paths(&mut generators);
        let (requests, responses) = (generators.requests.definitions(), generators.responses.definitions());
        let twice: Vec<&String> = requests.keys().filter(|name| responses.contains_key(*name)).collect();
        assert!(twice.is_empty() && responses.len() > 20, "{twice:?}");
        // A schema gets a number if its name was taken.
        let numbered = |name: &&String| name.ends_with(|c: char| c.is_ascii_digit());
        assert_eq!(responses.keys().find(numbered), None);
    }
}
