//! Tests that measure time or memory, one after the other: a server under attack, the cost of a start, and a kernel
//! that becomes slow.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[cfg(target_os = "linux")]
mod attacks;
#[cfg(target_os = "linux")]
mod footprint;
mod slow_steps;
#[path = "../support/mod.rs"]
mod support;
