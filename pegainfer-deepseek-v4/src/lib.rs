//! The DeepSeek-V4-Flash engine.
//!
//! # Layout
//! - `model`: the implementation of the runtime's `Model`. [`RankConfig`]: the numbers of a rank.
//! - [`config`]: config.json; unsupported fields are refused. [`numerics`]: the roundings of a run.
//! - [`inventory`]: all tensors of a checkpoint. [`shard`]: the part of them that a rank holds.
//! - [`inspect`]: describes a checkpoint without loading it.
//! - [`weights`], [`state`]: device memory. `forward`: the layers.
//! - [`plan`]: one step's work, planned by the scheduler of pegainfer-core.
#![cfg(feature = "deepseek-v4")]

pub mod config;
mod draft_method;
mod draft_workspace;
mod dspark_workspace;
mod forward;
mod inputs;
pub mod inspect;
pub mod inventory;
mod model;
mod normed;
pub mod numerics;
pub mod plan;
mod rank_config;
mod rotations;
pub mod shard;
pub mod sharing;
pub mod state;
#[cfg(test)]
mod testing;
pub mod weights;
mod workspace;

pub use model::DeepSeekEngine;
pub use plan::{record, record_blocks};
pub use rank_config::{DeepSeekV4, Options, RankConfig};
