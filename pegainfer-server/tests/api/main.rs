//! The API over real connections: a server in this process, with a scripted engine or with the bundled checkpoint.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod agents;
mod anthropic;
mod bad_input;
mod conservation;
mod data_parallel;
mod deadlines;
#[cfg(target_os = "linux")]
mod grammars;
mod grpc;
mod http;
mod keep_alive;
mod lifecycle;
mod logits_processors;
mod logprobs;
mod metric_documents;
mod metrics;
mod on_demand;
mod openapi;
mod operations;
mod prompts;
mod proxies;
mod responses;
mod routers;
mod secure;
mod slow_clients;
mod structured;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod tools;
mod web_ui;
