//! The Qwen3 engine, any size of the family, dense or with experts.
//!
//! # Layout
//! - [`config`]: config.json; unsupported fields are refused.
//! - [`weights`]: loaded tensors of a checkpoint.
//! - `model`: the forward pass, and the `Model` implementation for `pegainfer-runtime`.
//! - `decode`: all layers of a small step as one op.

pub mod config;
mod decode;
mod model;
pub mod weights;

pub use model::{Qwen3, Qwen3Engine, Step};
