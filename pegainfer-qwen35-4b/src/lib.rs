//! The Qwen3.5 engine, any dense size of the family, text only: layers of the gated delta rule, and gated full attention in
//! every fourth.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`], [`state`]: what lives on the device.
//! - [`plan`]: one step's work. The scheduler of pegainfer-core makes it, [`executor`] runs it.
//! - `engine`: loading.

pub mod config;
mod engine;
pub mod executor;
pub mod plan;
pub mod state;
pub mod weights;
mod workspace;

pub use engine::{Engine, LoadError, LoadOptions, Loaded, load, record, record_step};
