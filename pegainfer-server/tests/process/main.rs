//! The binary as a child process, and its commands.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod agents;
mod bench;
mod binary;
mod built_in_ledgers;
mod cells;
#[cfg(unix)]
mod chat;
mod command_line;
mod data_parallel;
mod downloads;
mod eval;
#[cfg(target_os = "linux")]
mod health;
mod kv_event_images;
mod kv_events;
mod kv_tiers;
mod ledger;
mod logs;
#[cfg(unix)]
mod models;
#[cfg(target_os = "linux")]
mod notify;
#[cfg(target_os = "linux")]
mod on_demand;
#[cfg(unix)]
mod rates;
mod recording;
mod restart;
#[cfg(unix)]
mod rights;
#[cfg(unix)]
mod rolling_update;
mod run_batch;
#[cfg(target_os = "linux")]
mod supervisors;
#[path = "../support/mod.rs"]
mod support;
#[cfg(unix)]
mod traces;
