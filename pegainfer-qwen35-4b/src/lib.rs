//! The Qwen3.5 engine, any dense size of the family, text only: layers of the gated delta rule, and gated full attention in
//! every fourth.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`], `workspace`, [`state`]: what lives on the device.
//! - `mtp`: the layer that drafts (multi-token prediction); `pass`: what it takes.
//! - `model`: the forward pass, and what `pegainfer-runtime` needs to load the model and run its steps.
//! - [`plan`]: one step's work, and which kernel runs it.

pub mod config;
mod model;
mod mtp;
mod pass;
pub mod plan;
pub mod state;
pub mod weights;
mod workspace;

pub use model::Qwen35Engine;
pub use pass::Qwen35;
