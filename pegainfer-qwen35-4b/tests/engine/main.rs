//! Tests of the engine, except the comparison with reference outputs in `e2e`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod failure;
mod fp8;
mod graphs;
mod invariance;
mod mixes;
mod mtp;
mod mtp_support;
mod plan;
#[path = "../support/mod.rs"]
mod support;
