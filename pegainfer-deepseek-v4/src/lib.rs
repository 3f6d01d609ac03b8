//! The DeepSeek-V4-Flash engine.
//!
//! # Layout
//! - [`config`]: config.json, refused where it asks for something else. [`numerics`]: which roundings a run has.
#![cfg(feature = "deepseek-v4")]

pub mod config;
pub mod numerics;
