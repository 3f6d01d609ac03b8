//! The binary as a child process, and its commands.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bench;
mod binary;
mod built_in_ledgers;
#[cfg(unix)]
mod chat;
mod command_line;
mod data_parallel;
mod downloads;
mod eval;
mod ledger;
mod logs;
#[cfg(unix)]
mod models;
#[cfg(target_os = "linux")]
mod notify;
#[cfg(unix)]
mod rates;
mod recording;
mod restart;
#[cfg(unix)]
mod rights;
mod run_batch;
#[path = "../support/mod.rs"]
mod support;
#[cfg(unix)]
mod traces;
