//! The Qwen3 dense engine, any size of the family.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`], [`state`]: what lives on the device.
//! - [`plan`]: one step's work. The scheduler of pegainfer-core makes it, [`executor`] runs it.
//! - `engine`: loading. `decode`: all layers of a small step as one op.

pub mod config;
mod decode;
mod engine;
pub mod executor;
pub mod plan;
pub mod state;
pub mod weights;
mod workspace;

pub use engine::{Engine, LoadError, LoadOptions, Loaded, load, record, record_step};
