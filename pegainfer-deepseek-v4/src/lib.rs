//! The DeepSeek-V4-Flash engine.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else. [`numerics`]: which roundings a run has.
//! - [`inventory`]: every tensor of a checkpoint. [`shard`]: which part of it a rank holds.
//! - [`inspect`]: what a checkpoint holds, without loading it.
//! - [`weights`], [`state`]: what lives on the device.
//! - [`plan`]: one step's work. The scheduler of pegainfer-core makes it, [`executor`] runs it. [`graph_shape`]: which steps run as CUDA
//!   graphs.
//! - `engine`: loading.
#![cfg(feature = "deepseek-v4")]

pub mod bounds;
mod capacity;
pub mod config;
mod draft_method;
mod draft_workspace;
mod dspark_workspace;
mod engine;
pub mod executor;
mod forward;
pub mod graph_shape;
mod inputs;
pub mod inspect;
pub mod inventory;
mod load_error;
mod load_options;
mod normed;
pub mod numerics;
pub mod plan;
mod rotations;
pub mod shard;
pub mod state;
#[cfg(test)]
mod testing;
pub mod weights;
mod workspace;

pub use engine::{DeepSeekEngine, Loaded, load, rank_bytes, record, record_blocks};
pub use load_error::LoadError;
pub use load_options::{DEFAULT_KV_BYTES, LoadOptions};
