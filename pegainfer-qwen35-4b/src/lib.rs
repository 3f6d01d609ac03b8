//! The Qwen3.5 engine, any dense size of the family: three layers of the gated delta rule, then one of gated
//! full attention, and so on.
//!
//! # Layout
//! - [`config`]: config.json; unsupported fields are refused.
//! - [`weights`], `workspace`, [`state`]: device memory.
//! - `mtp`: the layer that drafts (multi-token prediction); `pass`: its arguments.
//! - `model`: the forward pass, and the `Model` implementation for `pegainfer-runtime`.
//! - [`vision`]: the vision tower, which reads images.
//! - [`workspace`]: activations of a step.
//! - [`plan`]: the step type, and the choice of the delta rule's kernel.

pub mod config;
mod model;
mod mtp;
mod pass;
pub mod plan;
pub mod state;
pub mod vision;
pub mod weights;
pub mod workspace;

pub use model::Qwen35Engine;
pub use pass::Qwen35;
