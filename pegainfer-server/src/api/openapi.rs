//! `GET /openapi.json`: the OpenAPI document, generated from the structs of requests and responses.
//!
//! Tests send every documented field with a legal value and an undocumented field in every documented object, and
//! compare responses with their schemas.

use super::anthropic::wire::{Message, StreamEvent as MessageStreamEvent, TokenCount};
use super::info::{LoadResponse, Version};
use super::loads::Loads;
use super::model_control::ModelSwitched;
use super::model_list::{ModelCard, Models};
use super::rendered::RenderedRequest;
use super::responses::events::StreamEvent as ResponseStreamEvent;
use super::responses::wire::ResponseObject;
use super::schema::adapters::{LoadAdapterFields, UnloadAdapterFields};
use super::schema::anthropic::{AnswerFields, MessagesFields};
use super::schema::chat::ChatFields;
use super::schema::completions::CompletionFields;
use super::schema::conversation::ConversationFields;
use super::schema::generation::GenerationFields;
use super::schema::responses::ResponsesFields;
use super::schema::sampling::SamplingFields;
use super::schema::structure::StructureFields;
use super::schema::token_in_out::{TokenInOutFields, sampling_params_schema};
use super::schema::tokenize::{DetokenizeFields, TokenizeFields};
use super::schema::vectors::{EmbeddingFields, RerankFields, ScoreFields, VectorFields};
use super::token_in_out::{TokenChunk, TokenResponse};
use super::tokenize::{Detokenized, Tokenized};
use super::vectors::{Embeddings, Ranking, Scores};
use super::wire::{ChatChoice, ChatChunkChoice, Chunk, CompletionChoice, Envelope};
use crate::error::{AnthropicError, OpenAiError};
use crate::kv_events::KvEventSource;
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

/// The body of a completion.
const COMPLETION: &[ObjectSchema] = &[
    CompletionFields::json_schema,
    GenerationFields::json_schema,
    SamplingFields::json_schema,
    StructureFields::json_schema,
];
/// The body of a chat.
const CHAT: &[ObjectSchema] = &[
    ConversationFields::json_schema,
    ChatFields::json_schema,
    GenerationFields::json_schema,
    SamplingFields::json_schema,
    StructureFields::json_schema,
];

fn endpoints() -> Vec<Endpoint> {
    let hello = || json!([{"role": "user", "content": "Hello!"}]);
    vec![
        Endpoint {
            path: "/v1/completions",
            summary: "Continue a text",
            parts: COMPLETION,
            required: &[],
            example: json!({"prompt": "Once upon a time", "max_tokens": 8}),
            response: SchemaGenerator::subschema_for::<Envelope<CompletionChoice>>,
            event: Some(SchemaGenerator::subschema_for::<Chunk<CompletionChoice>>),
        },
        Endpoint {
            path: "/v1/chat/completions",
            summary: "Answer messages",
            parts: CHAT,
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

/// Endpoints for routers that choose a server by the tokens of the prompt.
fn token_endpoints() -> Vec<Endpoint> {
    let hello = json!([{"role": "user", "content": "Hello!"}]);
    vec![
        Endpoint {
            path: "/v1/completions/render",
            summary: "Token ids of prompts, and the sampling parameters that they would run with",
            parts: COMPLETION,
            required: &[],
            example: json!({"prompt": "Once upon a time", "max_tokens": 8}),
            response: SchemaGenerator::subschema_for::<Vec<RenderedRequest>>,
            event: None,
        },
        Endpoint {
            path: "/v1/chat/completions/render",
            summary: "Token ids of rendered messages, and the sampling parameters that they would run with",
            parts: CHAT,
            required: &["messages"],
            example: json!({"messages": hello, "max_tokens": 8}),
            response: SchemaGenerator::subschema_for::<RenderedRequest>,
            event: None,
        },
        Endpoint {
            path: "/inference/v1/generate",
            summary: "Continue token ids with token ids",
            parts: &[TokenInOutFields::json_schema, sampling_params_schema],
            required: &[],
            example: json!({"token_ids": [921, 870, 256, 529], "sampling_params": {"max_tokens": 8}}),
            response: SchemaGenerator::subschema_for::<TokenResponse>,
            event: Some(SchemaGenerator::subschema_for::<TokenChunk>),
        },
    ]
}

/// Endpoints of vectors and scores.
fn vector_endpoints() -> Vec<Endpoint> {
    vec![
        Endpoint {
            path: "/v1/embeddings",
            summary: "Vectors of texts",
            parts: &[EmbeddingFields::json_schema, VectorFields::json_schema],
            required: &[],
            example: json!({"input": "Once upon a time"}),
            response: SchemaGenerator::subschema_for::<Embeddings>,
            event: None,
        },
        Endpoint {
            path: "/v1/rerank",
            summary: "Order documents by how well they answer a query",
            parts: &[RerankFields::json_schema, VectorFields::json_schema],
            required: &[],
            example: json!({"query": "What is the capital of France?", "documents": ["Paris", "Lyon"]}),
            response: SchemaGenerator::subschema_for::<Ranking>,
            event: None,
        },
        Endpoint {
            path: "/v1/score",
            summary: "Scores of pairs of texts",
            parts: &[ScoreFields::json_schema, VectorFields::json_schema],
            required: &[],
            example: json!({"text_1": "What is the capital of France?", "text_2": ["Paris", "Lyon"]}),
            response: SchemaGenerator::subschema_for::<Scores>,
            event: None,
        },
    ]
}

/// An endpoint without a body: path, methods, summary, and the schema of its response if that is JSON.
type BodylessEndpoint = (&'static str, &'static [&'static str], &'static str, Option<ObjectSchema>);

/// Endpoints without a body.
const BODYLESS: [BodylessEndpoint; 17] = [
    (
        "/v1/models",
        &["get"],
        "The models and adapters, and their states",
        Some(SchemaGenerator::subschema_for::<Models>),
    ),
    ("/v1/models/{name}", &["get"], "A model or adapter", Some(SchemaGenerator::subschema_for::<ModelCard>)),
    (
        "/v1/models/{name}/load",
        &["post"],
        "Load a model (admins)",
        Some(SchemaGenerator::subschema_for::<ModelSwitched>),
    ),
    (
        "/v1/models/{name}/unload",
        &["post"],
        "Unload a model when its requests have ended (admins)",
        Some(SchemaGenerator::subschema_for::<ModelSwitched>),
    ),
    (
        "/v1/models/{name}/sleep",
        &["post"],
        "Unload a model and keep what it can in host memory, or with ?level=2 nothing (admins)",
        Some(SchemaGenerator::subschema_for::<ModelSwitched>),
    ),
    ("/health", &["get"], "200 while models make progress and the server accepts requests", None),
    ("/live", &["get"], "200 unless no engine makes progress, so that a restart is needed", None),
    ("/ping", &["get", "post"], "The same as /health", None),
    (
        "/load",
        &["get"],
        "Numbers of running and waiting requests",
        Some(SchemaGenerator::subschema_for::<LoadResponse>),
    ),
    (
        "/kv_event_sources",
        &["get"],
        "Where KV events are published",
        Some(SchemaGenerator::subschema_for::<Vec<KvEventSource>>),
    ),
    ("/loads", &["get"], "Load of each engine", Some(SchemaGenerator::subschema_for::<Loads>)),
    ("/v1/loads", &["get"], "The same as /loads", Some(SchemaGenerator::subschema_for::<Loads>)),
    ("/version", &["get"], "Version of the server", Some(SchemaGenerator::subschema_for::<Version>)),
    ("/metrics", &["get"], "Metrics, in Prometheus' format", None),
    ("/reset_prefix_cache", &["post"], "Drop all cached prefixes", None),
    ("/debug/steps", &["get"], "Times of the newest steps of the engine, in JSON Lines", None),
    ("/openapi.json", &["get"], "This document", None),
];

/// An endpoint of adapters, which answers with a sentence.
struct AdapterEndpoint {
    path: &'static str,
    summary: &'static str,
    fields: ObjectSchema,
    example: Value,
}

fn adapter_endpoints() -> [AdapterEndpoint; 2] {
    [
        AdapterEndpoint {
            path: "/v1/load_lora_adapter",
            summary: "Load a LoRA adapter from the folder of --lora-root (admins)",
            fields: LoadAdapterFields::json_schema,
            example: json!({"lora_name": "sql", "lora_path": "sql"}),
        },
        AdapterEndpoint {
            path: "/v1/unload_lora_adapter",
            summary: "Take the name of a LoRA adapter away (admins)",
            fields: UnloadAdapterFields::json_schema,
            example: json!({"lora_name": "sql"}),
        },
    ]
}

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
    for endpoint in endpoints().into_iter().chain(token_endpoints()).chain(vector_endpoints()) {
        paths.insert(endpoint.path.into(), json!({"post": with_body(&endpoint, generators)}));
    }
    for endpoint in adapter_endpoints() {
        paths.insert(endpoint.path.into(), json!({"post": of_adapters(&endpoint, generators)}));
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
        if path.ends_with("load") || path.ends_with("sleep") {
            responses["409"] = generators.error(path, "The model is pinned.");
        }
        let schema = json!({"type": "string", "minLength": 1});
        let mut parameters = vec![json!({"name": "name", "in": "path", "required": true, "schema": schema})];
        if path.ends_with("sleep") {
            parameters.push(json!({"name": "level", "in": "query", "schema": {"type": "integer", "enum": [1, 2]}}));
        }
        operation["parameters"] = parameters.into();
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
    if event.is_some() {
        responses["412"] = generators.error(path, "Prefer: if-available was sent, and the prompt is not cached.");
    }
    let schema = merge(parts, required, &mut generators.requests);
    json!({"summary": summary, "responses": responses,
        "requestBody": {"required": true, "content": {"application/json": {"schema": schema, "example": example}}}})
}

fn of_adapters(endpoint: &AdapterEndpoint, generators: &mut Generators) -> Value {
    let AdapterEndpoint { path, summary, fields, example } = endpoint;
    let schema = merge(&[*fields], &[], &mut generators.requests);
    let mut responses =
        json!({"200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}});
    for (status, description) in ERRORS.into_iter().chain(BODY_ERRORS) {
        responses[status] = generators.error(path, description);
    }
    json!({"tags": ["adapters"], "summary": summary, "responses": responses,
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
