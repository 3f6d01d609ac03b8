//! The OpenAI-compatible server and command line, as a library, so that tests can start the real router.
//!
//! # Layout
//! - [`cli`]: flags. [`serve`], [`generate`], [`mod@bench`], [`plan`], [`doctor`] and `inspect` are the commands.
//! - [`model_path`], [`hub`]: from `--model-path` to a directory. [`detect`], [`mod@engine`]: from a directory to an engine.
//! - [`checkpoint`]: the text side of a checkpoint directory. [`text`]: tokenizer, detokenizer, stop strings, template, parsers.
//! - [`openai`]: the HTTP API: requests in, JSON and server-sent events out. [`http`]: the HTTP server around it.
//! - [`ui`]: the web UI at `/`.
//! - [`metrics`], [`logging`], [`trace`]: observability.

mod allocator;
pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod detect;
pub mod doctor;
pub mod engine;
pub mod generate;
pub mod http;
pub mod hub;
#[cfg(feature = "deepseek-v4")]
pub mod inspect;
pub mod logging;
pub mod metrics;
pub mod model_path;
pub mod openai;
pub mod plan;
pub mod serve;
#[cfg(test)]
mod testing;
pub mod text;
pub mod trace;
pub mod ui;
