//! What every engine shares. This crate knows no model, no HTTP and no kernel.
//!
//! # Layout
//! - [`engine`]: the contract between the server and an engine, and the engine thread.
//! - [`sampling`], [`rules`], [`grammar`]: how tokens are drawn, valid by construction.
//! - [`kv`]: block pool, block tables, prefix index.
//! - [`schedule`]: continuous batching, and the step that it hands to an executor.
//! - [`exec`], [`tensor`], [`scratch`], [`isa`]: where ops run and what they run on.
//! - [`readback`]: results on their way to the host.
//! - [`cuda`]: the GPU behind them.
//! - [`record`]: what each op reports.
//! - [`rng`]: random numbers as a function of seed and position.
//! - [`weights`]: safetensors and dummy weights.

pub mod cuda;
pub mod engine;
pub mod exec;
pub mod grammar;
pub mod isa;
pub mod kv;
pub mod readback;
pub mod record;
pub mod rng;
pub mod rules;
pub mod sampling;
pub mod schedule;
pub mod scratch;
pub mod tensor;
pub mod weights;
