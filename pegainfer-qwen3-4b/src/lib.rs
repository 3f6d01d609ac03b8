//! The Qwen3 dense engine, any size of the family.

pub mod plan;
pub mod scheduler;
mod sequence;
