//! The HTTP API, compatible with OpenAI's and Anthropic's.
//!
//! # Layout
//! - [`chat`], [`completions`]: OpenAI's endpoints, on which the others are built. [`responses`], [`anthropic`]:
//!   translate their requests into chat requests, and the output into their own responses. [`token_in_out`],
//!   [`render_routes`], [`loads`]: vLLM's and SGLang's endpoints for routers.
//! - [`grpc`]: vLLM's gRPC services, on a port of their own. [`aborts`]: cancels their calls by name.
//! - [`body`], [`json_size`]: read a body within the memory budget. [`hold`]: resources until the engine has a request.
//!   [`schema`]: the bodies as structs. [`policy`]: decides about fields that they do not know.
//! - [`completion`]: a completion of texts or ids. [`chat_request`]: one chat request, into which all chats are
//!   converted: a [`conversation`] of [`message`]s, [`tools`] and what is [`structured`]. [`render`] makes a prompt of
//!   it, [`plain_text`] without control tokens from messages.
//! - [`model_state`]: the model that a request names.
//! - [`params`], [`sampling`], [`logits_processors`], [`stop`], [`stream_options`], [`truncation`], [`response_size`]:
//!   how to generate.
//! - [`prefer`]: whether to serve a request. [`quota`], [`submitted_chat`], [`generation`]: run it and give its output
//!   as [`delta`]s. [`assistant_message`], [`blocks`], [`wire`], [`logprobs`], [`timings`], [`sse`],
//!   [`large_response`]: write the response. [`early_head`], [`stream_head`]: begin a stream before its request is
//!   prepared.
//! - [`rendered`]: a request as it would run. [`panics`]: responses after a panic. [`info`], [`tokenize`]: the small
//!   endpoints. [`model_list`], [`model_control`]: the models and their states. [`adapters`]: loads and unloads
//!   adapters. [`openapi`]: the OpenAPI document.

mod aborts;
pub mod adapters;
mod agents;
mod anthropic;
mod assistant_message;
mod blocks;
mod body;
mod chat;
mod chat_request;
mod completion;
mod completions;
mod content_encoding;
mod conversation;
mod delta;
mod early_head;
mod generation;
mod grpc;
mod hold;
mod images;
mod info;
mod json_size;
mod large_response;
mod loads;
mod logits_processors;
mod logprobs;
mod message;
mod model_control;
mod model_list;
mod model_state;
mod openapi;
mod panics;
mod params;
mod plain_text;
mod policy;
mod prefer;
mod quota;
mod render;
mod render_routes;
mod rendered;
mod response_size;
mod responses;
mod sampling;
pub mod schema;
mod sse;
mod state;
mod steps;
mod stop;
mod stream_head;
mod stream_options;
mod structured;
mod submitted_chat;
mod system;
mod timings;
mod token_in_out;
mod token_rate;
mod tokenize;
mod tools;
mod truncation;
mod vectors;
mod wire;

pub use grpc::router as grpc_router;
pub use images::ImageFetcher;
pub use panics::catch_panic;
pub use state::{ApiOptions, AppState};

use crate::api_style::ApiStyle;
use crate::error::{ApiError, truncate_for_error};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{any, get, post};
use early_head::EarlyHead;
use std::sync::Arc;

/// The routers of all endpoints and of the web UI, by the API of their routes. Their paths do not overlap.
pub fn routers(state: &Arc<AppState>) -> [(ApiStyle, Router); 3] {
    let early = EarlyHead { interval: state.options.keep_alive_interval, lifecycle: state.lifecycle.clone() };
    let openai = Router::new()
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/inference/v1/generate", post(token_in_out::generate))
        .layer(from_fn_with_state(early.clone(), early_head::send_early))
        .layer(from_fn(prefer::report))
        .route("/v1/completions/render", post(render_routes::completion))
        .route("/v1/chat/completions/render", post(render_routes::chat))
        .route("/v1/models", get(model_list::models))
        // A name may contain slashes, as in `Qwen/Qwen3-4B`.
        .route("/v1/models/{*name}", get(model_list::model).post(model_control::switch))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/health", get(info::health))
        .route("/live", get(info::live))
        .route("/ping", get(info::health).post(info::health))
        .route("/load", get(info::load))
        .route("/kv_event_sources", get(info::kv_event_sources))
        .route("/loads", get(loads::loads))
        .route("/v1/loads", get(loads::loads))
        .route("/reset_prefix_cache", post(info::reset_prefix_cache))
        .route("/debug/steps", get(steps::steps))
        .route("/v1/embeddings", post(vectors::embeddings))
        .route("/embeddings", post(vectors::embeddings))
        .route("/v1/rerank", post(vectors::rerank))
        .route("/rerank", post(vectors::rerank))
        .route("/v2/rerank", post(vectors::rerank_v2))
        .route("/v1/score", post(vectors::score))
        .route("/score", post(vectors::score))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/openapi.json", get(openapi::openapi))
        .route("/version", get(info::version))
        .route("/metrics", get(info::metrics))
        .merge(crate::ui::router())
        .fallback(unknown_path);
    let responses = Router::new()
        .route("/v1/responses", post(responses::responses))
        .layer(from_fn_with_state(early.clone(), early_head::send_early))
        .layer(from_fn(prefer::report));
    let anthropic = Router::new()
        .route("/v1/messages", post(anthropic::messages))
        .layer(from_fn_with_state(early, early_head::send_early))
        .layer(from_fn(prefer::report))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        // Unknown paths get an error in this API's shape.
        .route("/v1/messages/", any(unknown_path))
        .route("/v1/messages/{*rest}", any(unknown_path));
    let styled = [(ApiStyle::OpenAi, openai), (ApiStyle::Responses, responses), (ApiStyle::Anthropic, anthropic)];
    styled.map(|(style, routes)| (style, routes.method_not_allowed_fallback(wrong_method).with_state(state.clone())))
}

async fn unknown_path(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", truncate_for_error(uri.path())))
        .with_code("unknown_url")
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let (path, method) = (truncate_for_error(uri.path()), truncate_for_error(method.as_str()));
    let message = format!("{path} does not take {method} requests");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}
