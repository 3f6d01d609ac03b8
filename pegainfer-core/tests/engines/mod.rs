//! Code shared by the engine tests, which include this folder: reference outputs, target devices, a driver without
//! threads, and tests that are the same for every model.
//!
//! `PEGAINFER_TEST_MODEL_PATH` selects another checkpoint with a fixture.json next to its weights.
//! `PEGAINFER_TEST_DEVICE=cuda` runs the tests on the GPU, with `PEGAINFER_TEST_CUDA_GRAPH=false` launch by launch.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub mod adapters;
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
