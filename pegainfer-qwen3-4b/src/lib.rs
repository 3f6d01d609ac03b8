//! The Qwen3 dense engine.
