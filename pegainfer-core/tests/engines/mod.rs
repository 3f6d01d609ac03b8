//! Shared by the tests of the engines, which include this folder: reference outputs, where an engine runs, a driver without
//! threads, and the tests that are the same for every model.
//!
//! `PEGAINFER_TEST_MODEL_PATH` points the tests of an engine at another checkpoint with a fixture.json beside its weights;
//! `PEGAINFER_TEST_DEVICE=cuda` runs them on the GPU, with `PEGAINFER_TEST_CUDA_GRAPH=false` launch by launch.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub mod distribution;
mod drive;
pub mod e2e;
mod fixture;
pub mod fp8;
pub mod graphs;
pub mod invariance;
pub mod mixes;
pub mod process;
pub mod samples;
pub mod speculation;
mod target;

pub use drive::*;
pub use fixture::*;
pub use target::*;
