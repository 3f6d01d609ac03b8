//! Models: from `--model-path` to a running engine.
//!
//! # Layout
//! - [`args`]: the flags. [`model_path`], [`hub`], [`bundled`]: from `--model-path` to a directory.
//! - [`detect`]: the registry of model families, and which one a directory holds. [`mod@engine`]: starts its engine.
//! - [`speculative`]: what `--speculative-config` says.

pub mod args;
pub mod bundled;
pub mod detect;
pub mod engine;
pub mod hub;
pub mod model_path;
pub mod speculative;
