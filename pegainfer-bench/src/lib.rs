//! Tools that measure, predict and replay an engine's work. No request needs them.
//!
//! # Commands
//! - [`mod@bench`]: latency and throughput, with the roofline limit of each metric. [`eval`]: the quality of a model.
//! - [`ledger`]: measures step times. [`sim`]: predicts latency and throughput from a ledger. [`plan`]: the ops of a
//!   step. [`mod@fit`]: whether a model fits a card, and how fast it is.
//! - [`replay`]: runs the requests of a recording again.
//!
//! # Shared modules
//! - [`anchor`], [`shipped`], [`ledger_origin`], [`stale`]: measuring a ledger again, built-in ledgers, a ledger's model
//!   and age.
//! - [`cards`]: memory and rates of cards. [`roofline`]: estimates from these rates.
//! - [`traces`]: load traces of other servers. [`recording`]: the lines of a recording.
//! - [`in_process`]: servers that the calling program provides to these commands.
//!
//! # Example
//! ```
//! use clap::Parser;
//! use pegainfer_bench::sim::{self, args::SimArgs};
//!
//! #[derive(Parser)]
//! struct Flags {
//!     #[command(flatten)]
//!     sim: SimArgs,
//! }
//!
//! // Predicts from a ledger inside the executable, and prints a table; no GPU is needed.
//! let flags = Flags::parse_from(["sim", "--gpu", "h200", "--model", "qwen3-4b", "--requests", "20"]);
//! sim::run(&flags.sim)?;
//! # Ok::<(), anyhow::Error>(())
//! ```

#![warn(clippy::print_stdout, clippy::print_stderr, reason = "pegainfer-terminal escapes control characters")]

pub mod anchor;
pub mod bench;
pub mod cards;
mod defaults;
pub mod eval;
pub mod fit;
pub mod in_process;
pub mod ledger;
pub mod ledger_origin;
pub mod plan;
pub mod recording;
pub mod replay;
pub mod roofline;
pub mod shipped;
pub mod sim;
pub mod stale;
#[cfg(test)]
mod testing;
pub mod traces;
