//! The Qwen3 dense engine, any size of the family.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`]: what is loaded of a checkpoint.
//! - `model`: the forward pass, and what `pegainfer-runtime` needs to load the model and run its steps.
//! - `decode`: all layers of a small step as one op.

pub mod config;
mod decode;
mod model;
pub mod weights;

pub use model::{Qwen3, Qwen3Engine, Step};
