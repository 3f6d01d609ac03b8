//! Models: the small checkpoints behind the API, a model of one file, and downloads.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[cfg(feature = "deepseek-v4")]
mod deepseek_v4_tiny;
mod hub;
mod hub_segments;
#[cfg(feature = "qwen35")]
mod images;
mod lora;
mod minimal_model;
mod moe_tiny;
#[cfg(feature = "qwen35")]
mod qwen35_tiny;
mod qwen3_tiny;
#[path = "../support/mod.rs"]
mod support;
mod vectors;
