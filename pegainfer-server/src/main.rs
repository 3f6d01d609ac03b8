//! The pegainfer command line.

use anyhow::Result;
use clap::Parser;
use pegainfer_server::cli::{Cli, Command};
use pegainfer_server::cli::{bench, doctor, generate, plan, serve};
use pegainfer_server::logging;
use pegainfer_server::text::trial;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    // SAFETY: no other thread runs yet.
    unsafe {
        pegainfer_core::cuda::use_one_queue();
        pegainfer_server::text::limit_encoder_threads();
    }
    let result = run(Cli::parse().into_command(), started);
    logging::flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If nobody can read it, the exit code still says that the command failed.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command, started: Instant) -> Result<()> {
    match command {
        Command::Serve(args) => {
            logging::init(&args.engine.log_level, args.engine.log_format)?;
            logging::log_panics();
            serve::run(&args, started)
        }
        Command::Generate(args) => {
            logging::init(&args.engine.log_level, args.engine.log_format)?;
            generate::run(&args)
        }
        Command::Bench(args) => {
            let engine = &args.workload.common().engine;
            logging::init(&engine.log_level, engine.log_format)?;
            bench::run(&args)
        }
        Command::CompileGrammar { memory, seconds } => Ok(trial::run(memory, seconds)?),
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(feature = "deepseek-v4")]
        Command::Inspect(args) => pegainfer_server::cli::inspect::run(&args),
    }
}
