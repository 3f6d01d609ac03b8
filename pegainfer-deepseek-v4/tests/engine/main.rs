//! Tests of the engine, except the comparison with reference outputs in `e2e`.

#![cfg(feature = "deepseek-v4")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod drafts;
mod dspark;
mod dspark_checkpoint;
mod faults;
mod features;
mod invariance;
mod mtp_checkpoint;
mod oracle;
mod plan;
mod reference;
mod soak;
mod stored;
#[path = "../support/mod.rs"]
mod support;
mod tiers;
mod verify_steps;
