//! The pegainfer command line.

use anyhow::Result;
use clap::Parser;
use pegainfer_server::cli::{Cli, Command};
use pegainfer_server::cli::{bench, doctor, generate, plan, serve};
use pegainfer_server::logging;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    // SAFETY: no other thread runs yet.
    unsafe { pegainfer_core::cuda::use_one_queue() };
    match run(Cli::parse().into_command(), started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command, started: Instant) -> Result<()> {
    match command {
        Command::Serve(args) => {
            logging::init(&args.engine.log_level)?;
            serve::run(&args, started)
        }
        Command::Generate(args) => {
            logging::init(&args.engine.log_level)?;
            generate::run(&args)
        }
        Command::Bench(args) => {
            logging::init(&args.workload.common().engine.log_level)?;
            bench::run(&args)
        }
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(feature = "deepseek-v4")]
        Command::Inspect(args) => pegainfer_server::cli::inspect::run(&args),
    }
}
