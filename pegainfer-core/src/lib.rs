//! What every engine shares. This crate knows no model, no HTTP and no kernel.
//!
//! # Layout
//! - [`engine`]: the contract between the server and an engine, and the engine thread.
//! - [`kv`]: block pool, block tables, prefix index.
//! - [`sampling`]: sampling parameters, valid by construction.

pub mod engine;
pub mod kv;
pub mod sampling;
