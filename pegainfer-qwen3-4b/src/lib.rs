//! The Qwen3 dense engine, any size of the family.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`], `workspace`: what lives on the device.
//! - `model`: the forward pass, and what the runtime of pegainfer-kernels needs to load the model and run its steps.
//! - `decode`: all layers of a small step as one op.

pub mod config;
mod decode;
mod model;
pub mod weights;
mod workspace;

pub use model::{Engine, Qwen3, Step};
