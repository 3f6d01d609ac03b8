//! The DeepSeek-V4-Flash engine.
//!
//! # Layout
//! - [`config`]: config.json; unsupported fields are refused. [`numerics`]: the roundings of a run.
//! - [`inventory`]: all tensors of a checkpoint. [`shard`]: the part of them that a rank holds.
//! - [`inspect`]: describes a checkpoint without loading it.
//! - [`weights`], [`state`]: device memory.
//! - [`plan`]: one step's work, planned by the scheduler of pegainfer-core; [`executor`] runs it. [`graph_shape`]:
//!   steps that run as CUDA graphs.
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
