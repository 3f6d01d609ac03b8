//! `pegainfer generate`: one completion on standard output, without a server.

use crate::cli::local_server::LoadedModel;
use crate::cli::piped::standard_input;
use crate::text_service::{Checkpoint, Task};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pegainfer_core::engine::{GenerateRequest, TokenEvent};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::stdout::print_exact;
use pegainfer_text::Detokenizer;
use std::num::NonZeroUsize;
use std::time::Instant;

/// Flags of `generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// The text to continue [default: standard input]
    pub prompt: Option<String>,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Maximum number of tokens to generate
    #[arg(long, default_value = "128")]
    pub max_tokens: NonZeroUsize,
    /// Sampling temperature; 0 always takes the most likely token [default: the checkpoint's]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most likely tokens up to this probability mass [default: the checkpoint's]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: the checkpoint's]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// The same seed gives the same text [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
}

/// Runs the command.
pub fn run(args: &GenerateArgs) -> Result<()> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => standard_input("give the text to continue, or pipe it into this command")?,
    };
    let LoadedModel { engine, checkpoint, .. } = LoadedModel::load(&args.engine)?;
    ensure!(
        matches!(checkpoint.task, Task::Generate),
        "{} is a model with --task {}: generate needs one that generates text",
        checkpoint.name,
        checkpoint.task.name()
    );
    let prompt = checkpoint.tokenizer.encode(&prompt, true)?;
    let sampling = sampling(args, &checkpoint)?;
    let limits = engine.handle.limits();
    let capacity = limits.max_model_len.saturating_sub(prompt.len()).max(1);
    let request = GenerateRequest {
        sampling,
        logits_processors: checkpoint.defaults.logits_processors(limits.vocab_size)?,
        ..GenerateRequest::greedy(prompt, args.max_tokens.get().min(capacity))
    };
    let started = Instant::now();
    let mut stream = engine.handle.submit(request)?;
    let (mut detokenizer, mut first) = (Detokenizer::new(false), None);
    loop {
        let mut text = String::new();
        match stream.blocking_recv() {
            Some(TokenEvent::Admitted { .. } | TokenEvent::Prompt(_) | TokenEvent::Vector(_)) => {}
            Some(TokenEvent::Token(token)) => {
                first.get_or_insert_with(|| started.elapsed());
                if !token.is_stop {
                    detokenizer.push(&checkpoint.tokenizer, token.id, &mut text);
                }
            }
            Some(TokenEvent::Finished { usage, .. }) => {
                detokenizer.finish(&mut text);
                text.push('\n');
                print_exact(&text)?;
                let (first, total) = (first.unwrap_or_default().as_secs_f64(), started.elapsed().as_secs_f64());
                let rate = (usage.completion_tokens.saturating_sub(1)) as f64 / (total - first).max(1e-9);
                log::info!(
                    "{} prompt tokens, {} generated; first token after {:.1} ms, then {rate:.1} tokens/s",
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    first * 1e3
                );
                return Ok(());
            }
            Some(TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error }) => bail!(error),
            None => bail!("the engine stopped before the completion was done"),
        }
        print_exact(&text)?;
    }
}

fn sampling(args: &GenerateArgs, checkpoint: &Checkpoint) -> Result<SamplingParams> {
    let defaults = checkpoint.defaults;
    let seed = match args.seed {
        Some(seed) => seed,
        None => getrandom::u64().context("the operating system gives no random numbers")?,
    };
    Ok(SamplingParams::new(
        args.temperature.unwrap_or(defaults.temperature),
        args.top_k.unwrap_or(defaults.top_k),
        args.top_p.unwrap_or(defaults.top_p),
        defaults.min_p,
        seed,
    )?)
}
