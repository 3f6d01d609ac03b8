//! Core of all engines. This crate knows no model, no HTTP and no kernel.
//!
//! # Layout
//! - [`adapter`]: adapters (LoRA) that requests name.
//! - [`engine`]: the contract between the server and an engine, and the engine thread.
//! - [`sampling`], [`logits_processors`], [`grammar`]: parameters of drawing a token, valid by construction.
//! - [`kv`]: block pool, block tables, prefix index.
//! - [`schedule`]: continuous batching, and the steps that an executor runs.
//! - [`exec`], [`tensor`], [`scratch`], [`isa`]: execution context and memory of ops.
//! - [`team`]: threads that run the loops of CPU kernels.
//! - [`parallel`]: ranks that compute one model together.
//! - [`readback`]: asynchronous copies of results to the host.
//! - [`cuda`]: the GPU.
//! - [`record`]: the record of each op call. [`ledger`]: measured step times, and the law that predicts step times from
//!   them.
//! - `sync`: atomics, locks and channels of the engine's threads, which a model checker can replace.
//! - [`rng`]: random numbers as a function of seed and position.
//! - [`weights`]: safetensors, quantised formats and dummy weights. [`small_floats`]: values of 8-bit and 4-bit floats.

pub mod adapter;
pub mod cuda;
pub mod engine;
pub mod exec;
pub mod grammar;
pub mod host_memory;
pub mod images;
pub mod isa;
pub mod kv;
pub mod ledger;
pub mod logits_processors;
pub mod parallel;
pub mod readback;
pub mod record;
pub mod rng;
pub mod sampling;
pub mod schedule;
pub mod scratch;
pub mod small_floats;
mod sync;
pub mod team;
pub mod tensor;
pub mod weights;
