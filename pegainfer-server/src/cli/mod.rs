//! The command line: one module for each command, with its flags.

pub mod batch;
pub mod chat;
pub mod completions;
pub mod doctor;
pub mod generate;
pub mod health;
pub mod help;
mod http_args;
mod in_process;
#[cfg(feature = "deepseek-v4")]
pub mod inspect;
mod kv_events;
mod local_server;
mod lora;
pub mod man;
mod model_loader;
pub mod models;
mod models_file;
mod notify;
mod on_demand;
mod piped;
pub mod pull;
pub mod reference;
pub mod serve;
pub mod serve_args;
mod served;
mod served_models;
pub mod settings;
mod signals;
mod watch;

use crate::text_service::TRIAL_COMMAND;
use batch::BatchArgs;
use chat::ChatArgs;
use clap::{Arg, CommandFactory, Parser, Subcommand};
use completions::CompletionsArgs;
use doctor::DoctorArgs;
use generate::GenerateArgs;
use health::HealthArgs;
pub use in_process::InProcess;
#[cfg(feature = "deepseek-v4")]
use inspect::InspectArgs;
use man::ManArgs;
use models::ModelsArgs;
use pegainfer_bench::bench::command::BenchArgs;
use pegainfer_bench::eval::EvalArgs;
use pegainfer_bench::fit::FitArgs;
use pegainfer_bench::ledger::LedgerArgs;
use pegainfer_bench::plan::PlanArgs;
use pegainfer_bench::replay::ReplayArgs;
use pegainfer_bench::sim::args::SimArgs;
use pegainfer_models::bundled;
use pull::PullArgs;
use serve_args::ServeArgs;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Serves language models behind an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(name = "pegainfer", version, args_conflicts_with_subcommands = true)]
#[command(mut_args(help::in_group), mut_subcommands(help::in_groups))]
pub struct Cli {
    /// The command; `serve` if none is given.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// TOML file with the long names of flags as keys, as in `port = 8080`. Flags and variables such as PEGAINFER_PORT
    /// override it
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Flags of `serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (the default)
    Serve(Box<ServeArgs>),
    /// Print the completion of one prompt, without a server
    Generate(GenerateArgs),
    /// Chat with a model in the terminal, or answer what comes through a pipe
    #[command(mut_arg("log_level", quiet), after_help = chat::USE)]
    Chat(Box<ChatArgs>),
    /// Run a file of requests in OpenAI's batch format; a stopped run resumes where it stopped
    #[command(mut_arg("log_level", without_requests), after_help = batch::USE)]
    RunBatch(Box<BatchArgs>),
    /// Download a model into Hugging Face's cache without starting it, and print its path
    Pull(PullArgs),
    /// List, download, find and delete the models of Hugging Face's cache
    Models(ModelsArgs),
    /// Measure latency and throughput and compare them with the limits of the device
    Bench(BenchArgs),
    /// Measure the quality of a model: the perplexity of a text, or the accuracy on word problems
    Eval(Box<EvalArgs>),
    /// Run the requests of a recording again, and compare the tokens
    #[command(mut_arg("log_level", quiet))]
    Replay(Box<ReplayArgs>),
    /// Measure the time of steps on this device and write a ledger, for `sim`
    Ledger(Box<LedgerArgs>),
    /// Predict latency and throughput on the device of a ledger: the engine runs over a simulated device
    Sim(Box<SimArgs>),
    /// Print the ops of one step with their shapes, bytes and FLOPs, without loading weights
    Plan(PlanArgs),
    /// Say whether a model fits a card or this machine, with how much context, and how fast it is
    Fit(FitArgs),
    /// Report what this machine has, and check every op on its GPU against the CPU
    Doctor(DoctorArgs),
    /// Compare a DeepSeek-V4 checkpoint's headers with its config.json, and print the memory it takes per GPU
    #[cfg(feature = "deepseek-v4")]
    Inspect(InspectArgs),
    /// Ask a running server whether it is healthy, for the health check of a container
    Health(HealthArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Print the manual page, or write one page for each command into a directory
    Man(ManArgs),
    /// Print docs/reference/cli.md
    #[command(hide = true)]
    CliReference,
    /// Compile the grammar on standard input within limits (started by `serve`)
    #[command(name = TRIAL_COMMAND, hide = true)]
    CompileGrammar {
        /// Bytes of memory.
        memory: u64,
        /// Seconds of CPU time.
        seconds: u64,
    },
}

/// Default log level of a command that talks to its user.
fn quiet(log_level: Arg) -> Arg {
    log_level.default_value("warn")
}

/// Default log level of a command that sends thousands of requests.
fn without_requests(log_level: Arg) -> Arg {
    log_level.default_value("info,pegainfer_server::metrics=warn")
}

/// Names that other programs have for commands.
const USUAL_NAMES: [(&str, &str); 5] =
    [("run", "chat"), ("list", "models"), ("ls", "models"), ("ps", "health"), ("download", "pull")];

impl Cli {
    /// The command, with `serve` filled in.
    pub fn into_command(self) -> Command {
        match self.command {
            None => Command::Serve(Box::new(self.serve.with_model_path())),
            Some(Command::Serve(args)) => Command::Serve(Box::new(args.with_model_path())),
            Some(command) => command,
        }
    }

    /// One sentence if another program has a command of this name.
    pub fn other_command(word: &str) -> Option<String> {
        let (_, own) = USUAL_NAMES.iter().find(|(other, _)| *other == word)?;
        Some(format!("{word} is neither a command nor a model; did you mean pegainfer {own}?"))
    }

    /// One sentence if the only word before the flags is neither a command nor a model.
    pub fn unknown_command(&self) -> Option<String> {
        let word = self.serve.model.as_deref().filter(|_| self.command.is_none())?;
        if word.contains('/') || word == bundled::NAME || Path::new(word).exists() {
            return None;
        }
        let root = Self::command();
        let commands = root.get_subcommands().filter(|command| !command.is_hide_set());
        let names: BTreeSet<String> = commands.map(|command| command.get_name().to_owned()).collect();
        let other = Self::other_command(word);
        if other.is_some() {
            return other;
        }
        Some(match settings::nearest(word, &names) {
            Some(name) if name == word => format!("the command {word} comes before all flags"),
            Some(name) => format!("{word} is neither a command nor a model; did you mean pegainfer {name}?"),
            None => format!(
                "{word} is neither a command nor a model: a model is a directory, a .gguf file or a Hugging Face id such \
                 as Qwen/Qwen3-0.6B"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_bench::bench::args::Workload;
    use pegainfer_bench::bench::command::BenchCommand;
    use pegainfer_models::args::DeviceArg;

    fn parse(args: &[&str]) -> Result<Command, clap::Error> {
        Cli::try_parse_from(["pegainfer"].iter().chain(args)).map(Cli::into_command)
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_is_the_default_command() {
        for args in [&["--model-path", "x", "--port", "1"][..], &["serve", "--model-path", "x", "--port", "1"]] {
            let Command::Serve(serve) = parse(args).unwrap() else { panic!("{args:?} is not serve") };
            assert_eq!((serve.engine.model_path.as_deref(), serve.port), (Some("x"), 1));
        }
        assert!(matches!(parse(&[]).unwrap(), Command::Serve(_)));
        let Command::Generate(generate) = parse(&["generate", "hi", "--model-path", "x"]).unwrap() else { panic!() };
        assert_eq!(generate.prompt.as_deref(), Some("hi"));
    }

    #[test]
    fn a_model_may_come_without_a_flag_and_a_misspelt_command_is_none() {
        let model = "Qwen/Qwen3-0.6B";
        for args in [&[model, "--port", "1"][..], &["serve", "--port", "1", model], &["--port", "1", model]] {
            let Command::Serve(serve) = parse(args).unwrap() else { panic!("{args:?} is not serve") };
            assert_eq!((serve.engine.model_path.as_deref(), serve.port), (Some(model), 1), "{args:?}");
        }
        let unknown = |args: &[&str]| {
            let cli = Cli::try_parse_from(["pegainfer"].iter().chain(args));
            cli.unwrap().unknown_command().unwrap_or_default()
        };
        for (args, expected) in [
            (&["run"][..], "run is neither a command nor a model; did you mean pegainfer chat?"),
            (&["ps"], "ps is neither a command nor a model; did you mean pegainfer health?"),
            (&["severe"][..], "severe is neither a command nor a model; did you mean pegainfer serve?"),
            (&["chatt", "--port", "1"], "chatt is neither a command nor a model; did you mean pegainfer chat?"),
            (&["--port", "1", "chat"], "the command chat comes before all flags"),
            (
                &["qqq"],
                "qqq is neither a command nor a model: a model is a directory, a .gguf file or a Hugging Face id \
                such as Qwen/Qwen3-0.6B",
            ),
            (&[model], ""),
            (&[bundled::NAME], ""),
            (&["serve", "severe"], ""),
            (&[], ""),
        ] {
            assert_eq!(unknown(args), expected, "{args:?}");
        }
    }

    #[test]
    fn names_may_be_repeated() {
        let names = ["--served-model-name", "a", "--served-model-name", "b"];
        let Command::Serve(serve) = parse(&names).unwrap() else { panic!() };
        assert_eq!(serve.served_model_name, ["a", "b"]);
    }

    #[test]
    fn old_names_of_flags_are_hidden_aliases() {
        let old = ["--trace-share", "0.5", "--max-num-mixed-tokens", "7"];
        let new = ["--trace-sampling-ratio", "0.5", "--mixed-step-token-budget", "7"];
        for args in [old, new] {
            let Command::Serve(serve) = parse(&args).unwrap() else { panic!() };
            assert_eq!((serve.http.trace_sampling_ratio, serve.engine.max_num_mixed_tokens.get()), (0.5, 7));
        }
        for args in [["--streams", "3", "--rounds", "2"], ["--concurrency", "3", "--runs", "2"]] {
            let Command::Bench(bench) = parse(&[&["bench", "throughput"], &args[..]].concat()).unwrap() else {
                panic!()
            };
            let BenchCommand::Workload(Workload::Throughput(flags)) = bench.command else { panic!() };
            assert_eq!((flags.concurrency[0].get(), flags.common.runs.get()), (3, 2));
        }
        let mut command = Cli::command();
        command.build();
        for name in ["serve", "bench"] {
            let subcommand = command.find_subcommand_mut(name).unwrap();
            let help = subcommand.render_long_help().to_string();
            assert!(!["trace-share", "max-num-mixed-tokens"].iter().any(|old| help.contains(old)), "{help}");
        }
    }

    #[test]
    fn values_are_checked() {
        assert!(parse(&["--max-num-seqs", "0"]).is_err());
        let Command::Serve(serve) = parse(&["--state-cache-memory", "0", "--device", "cuda:1"]).unwrap() else {
            panic!()
        };
        assert_eq!((serve.engine.state_cache_memory, serve.engine.device), (Some(0), DeviceArg::Cuda(1)));
        let error = parse(&["--device", "tpu"]).unwrap_err().to_string();
        assert!(error.contains("expected auto, cpu, cuda, cuda:N or cuda:N,M"), "{error}");
        assert!(parse(&["--gpu-memory-utilization", "1.01"]).is_err());
    }
}
