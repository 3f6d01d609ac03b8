//! The OpenAI-compatible server and command line, as a library, so that tests can start the real router.
//!
//! # Layout
//! - [`openai`]: the HTTP API: requests in, JSON and server-sent events out.
//! - [`text`]: tokenizer, incremental detokenizer, stop strings, chat template.
//! - [`checkpoint`]: the text side of a checkpoint directory.
//! - [`metrics`]: Prometheus.

pub mod checkpoint;
pub mod metrics;
pub mod openai;
#[cfg(test)]
mod testing;
pub mod text;
