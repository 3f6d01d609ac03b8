//! Tests of the engine, except the comparison with reference outputs in `e2e`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod conversations;
mod failure;
mod faults;
#[path = "../../../pegainfer-runtime/tests/family/fp8.rs"]
mod fp8;
mod gguf;
#[path = "../../../pegainfer-runtime/tests/family/graphs.rs"]
mod graphs;
mod image_reference;
mod image_support;
mod images;
mod invariance;
mod kv_file;
#[path = "../../../pegainfer-runtime/tests/family/lora.rs"]
mod lora;
mod many_ranks;
#[path = "../../../pegainfer-runtime/tests/family/mixes.rs"]
mod mixes;
#[path = "../../../pegainfer-runtime/tests/family/moe.rs"]
mod moe;
mod mtp;
mod mtp_support;
mod plan;
#[path = "../../../pegainfer-runtime/tests/family/ranks.rs"]
mod ranks;
#[path = "../support/mod.rs"]
mod support;
#[path = "../../../pegainfer-runtime/tests/family/tiers.rs"]
mod tiers;
