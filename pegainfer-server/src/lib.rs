//! The OpenAI-compatible server and command line, as a library, so that tests can start the real router.
//!
//! # Layout
//! Imports go downwards only, which `tools/check-imports` checks:
//! - [`cli`]: the commands and their flags.
//! - [`app`]: the API behind the HTTP server's middleware.
//! - [`api`]: requests in, JSON and server-sent events out. [`http`]: the HTTP server, which knows nothing of the API.
//! - [`models`]: the models that requests may name.
//! - [`text_service`]: threads that tokenize, and grammars compiled within limits. [`ui`]: the web UI at `/`.
//!   [`metrics`], [`trace`]: observability.
//! - [`adapters`], [`allowed`], [`api_style`], [`budget`], [`error`], [`fair_queue`], [`flush`], [`grpc_status`],
//!   [`ids`], [`image_hosts`], [`keyed_hash`], [`kv_events`], [`lifecycle`], [`limits`], [`logging`], [`network`],
//!   [`output`], [`rates`], [`record`], [`tenant`], [`zmtp`]: code that all of them share.

#![warn(clippy::print_stdout, clippy::print_stderr, reason = "pegainfer-terminal escapes control characters")]

pub mod adapters;
mod allocator;
pub mod allowed;
pub mod api;
mod api_style;
pub mod app;
pub mod budget;
pub mod cli;
pub mod error;
pub mod fair_queue;
pub mod flush;
mod grpc_status;
pub mod http;
pub mod ids;
pub mod image_hosts;
pub mod keyed_hash;
pub mod kv_events;
pub mod lifecycle;
pub mod limits;
pub mod logging;
pub mod metrics;
pub mod models;
pub mod network;
pub mod output;
pub mod rates;
pub mod record;
mod rejection;
pub mod tenant;
#[cfg(test)]
mod testing;
pub mod text_service;
pub mod trace;
pub mod ui;
pub mod zmtp;
