//! The Qwen3.5 engine, any dense size of the family, text only: layers of the gated delta rule, and gated full attention in
//! every fourth.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`], `workspace`, [`state`]: what lives on the device.
//! - `model`: the forward pass, and what the runtime of pegainfer-kernels needs to load the model and run its steps.
//! - [`plan`]: one step's work, and which kernel runs it.

pub mod config;
mod model;
pub mod plan;
pub mod state;
pub mod weights;
mod workspace;

pub use model::{Engine, Qwen35};
