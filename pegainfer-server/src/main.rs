//! The pegainfer command line.

use anyhow::Result;
use clap::CommandFactory;
use pegainfer_bench::{bench, eval, fit, ledger, plan, replay, sim};
use pegainfer_models::args::EngineArgs;
use pegainfer_server::cli::settings::{self, ParseError};
use pegainfer_server::cli::{Cli, Command};
use pegainfer_server::cli::{
    InProcess, batch, chat, completions, doctor, generate, health, help, man, models, pull, reference, serve,
};
use pegainfer_server::logging;
use pegainfer_server::text_service;
use pegainfer_terminal::printable::is_control;
use pegainfer_terminal::stderr;
use std::process::ExitCode;
use std::time::Instant;

/// Exit code of an unusable command line or setting, as in clap.
const INVALID_USE: u8 = 2;

fn main() -> ExitCode {
    let started = Instant::now();
    // SAFETY: no other thread runs yet.
    unsafe { text_service::limit_encoder_threads() };
    let command = match settings::parse::<Cli>(std::env::args_os().collect(), |name| std::env::var_os(name)) {
        Ok(cli) => match cli.unknown_command() {
            None => cli.into_command(),
            Some(sentence) => {
                stderr::error(&sentence);
                return ExitCode::from(INVALID_USE);
            }
        },
        Err(ParseError::CommandLine(error)) => {
            let word = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
            let Some(sentence) = word.filter(|_| error.use_stderr()).and_then(|word| Cli::other_command(&word)) else {
                exit(&error)
            };
            stderr::error(&sentence);
            return ExitCode::from(INVALID_USE);
        }
        Err(ParseError::Setting(sentence)) => {
            stderr::error(&sentence);
            return ExitCode::from(INVALID_USE);
        }
    };
    if !matches!(&command, Command::Serve(args) if args.has_kv_copies()) {
        // SAFETY: no other thread runs yet.
        unsafe { pegainfer_core::cuda::use_one_queue() };
    }
    let result = run(command, started);
    logging::flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            stderr::error(&format!("{error:#}"));
            if error.is::<sim::fit::UnfitError>() { ExitCode::from(INVALID_USE) } else { ExitCode::FAILURE }
        }
    }
}

fn run(command: Command, started: Instant) -> Result<()> {
    match command {
        Command::Serve(args) => {
            start_logging(&args.engine)?;
            logging::log_panics();
            serve::run(&args, started)
        }
        Command::Generate(args) => {
            start_logging(&args.engine)?;
            generate::run(&args)
        }
        Command::Chat(args) => {
            start_logging(&args.engine)?;
            chat::run(&args)
        }
        Command::RunBatch(args) => {
            start_logging(&args.engine)?;
            batch::run(&args)
        }
        Command::Pull(args) => pull::run(&args),
        Command::Models(args) => models::run(&args),
        Command::Bench(args) => {
            start_logging(args.command.engine())?;
            bench::run(&args, &InProcess)
        }
        Command::Eval(args) => {
            start_logging(args.task.engine())?;
            eval::run(&args, &InProcess)
        }
        Command::Replay(args) => {
            start_logging(&args.engine)?;
            replay::run(&args)
        }
        Command::Ledger(args) => {
            start_logging(&args.engine)?;
            ledger::run(&args)
        }
        Command::Sim(args) => sim::run(&args),
        Command::CompileGrammar { memory, seconds } => Ok(text_service::run_trial(memory, seconds)?),
        Command::Plan(args) => plan::run(&args),
        Command::Fit(args) => fit::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Health(args) => health::run(&args),
        #[cfg(feature = "deepseek-v4")]
        Command::Inspect(args) => pegainfer_server::cli::inspect::run(&args),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Man(args) => man::run(&args, Cli::command()),
        Command::CliReference => reference::run(),
    }
}

fn start_logging(engine: &EngineArgs) -> Result<()> {
    logging::init(&engine.log_level, engine.log_format)?;
    let names = std::env::vars_os().map(|(name, _)| name);
    settings::unknown_variables(&Cli::command(), names).iter().for_each(|sentence| log::warn!("{sentence}"));
    Ok(())
}

/// Prints the help, the version or a usage error, and exits.
fn exit(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    let in_words = help::in_words(&text);
    let is_clap = in_words.is_none();
    let text = in_words.unwrap_or(text);
    // The text repeats arguments. clap's colours are used only if the arguments contain no control characters.
    if is_clap && !text.contains(|c| is_control(c) && c != '\n' && c != '\t') {
        error.exit();
    }
    stderr::print(text.trim_end());
    std::process::exit(error.exit_code())
}
