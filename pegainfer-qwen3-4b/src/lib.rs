//! The Qwen3 dense engine, any size of the family.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else.
//! - [`weights`], [`state`]: what lives on the device.
//! - [`plan`]: one step's work. [`scheduler`] makes it, [`executor`] runs it.
//! - `engine`: loading, and the glue that makes scheduler and executor one engine.

mod adjustments;
pub mod config;
mod engine;
pub mod executor;
mod graphs;
mod inputs;
pub mod plan;
mod results;
pub mod scheduler;
mod sequence;
pub mod state;
pub mod weights;
mod workspace;

pub use engine::{Engine, LoadError, LoadOptions, Loaded, load, record, record_step};
