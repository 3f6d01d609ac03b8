//! The DeepSeek-V4-Flash engine.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else. [`numerics`]: which roundings a run has.
//! - [`inventory`]: every tensor of a checkpoint. [`shard`]: which part of it a rank holds.
//! - [`inspect`]: what a checkpoint holds, without loading it.
//! - [`weights`], [`state`]: what lives on the device. [`communicator`]: how ranks exchange what they computed.
//! - [`plan`]: one step's work. [`scheduler`] makes it, with the prefix cache; [`executor`] runs it.
//! - `engine`: loading, and the glue that makes scheduler and executor one engine.
#![cfg(feature = "deepseek-v4")]

pub mod communicator;
pub mod config;
mod engine;
pub mod executor;
mod forward;
mod inputs;
pub mod inspect;
pub mod inventory;
pub mod numerics;
pub mod plan;
mod prefix;
pub mod scheduler;
mod sequence;
pub mod shard;
pub mod state;
#[cfg(test)]
mod testing;
pub mod weights;
mod workspace;

pub use engine::{DEFAULT_KV_BYTES, Engine, LoadError, LoadOptions, Loaded, load, record};
