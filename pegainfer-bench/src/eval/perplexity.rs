//! Perplexity of a text, from the engine's log-probabilities of its tokens in overlapping windows.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pegainfer_core::engine::{EngineHandle, GenerateRequest, TokenEvent, TokenStream};
use pegainfer_models::LoadedModel;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::progress::{Progress, Unit};
use pegainfer_text::Tokenizer;
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

/// Number of windows in the engine at the same time.
const IN_FLIGHT: usize = 4;

/// Flags of `eval perplexity`.
#[derive(Debug, Clone, Args)]
pub struct PerplexityArgs {
    /// Text file, UTF-8
    pub file: PathBuf,
    /// Tokens of a window: a token is predicted from at most this many minus one before it [default: 1024, or less with
    /// a smaller context]
    #[arg(long, value_name = "TOKENS")]
    pub window: Option<NonZeroUsize>,
    /// Tokens between the starts of two windows; each token counts once, with at least window minus stride tokens
    /// before it [default: half of the window]
    #[arg(long, value_name = "TOKENS")]
    pub stride: Option<NonZeroUsize>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// The measured perplexity.
#[derive(Debug, Clone, Serialize)]
pub struct Perplexity {
    model: String,
    file: String,
    window: usize,
    stride: usize,
    /// Number of tokens of the text; the first one is not predicted.
    tokens: usize,
    /// Number of bytes of the predicted tokens.
    bytes: usize,
    /// Sum of `-ln p` of the predicted tokens.
    nats: f64,
    /// `exp(nats / predicted tokens)`.
    pub perplexity: f64,
    /// `nats / ln 2 / bytes`, which is comparable between tokenizers.
    pub bits_per_byte: f64,
    seconds: f64,
}

impl fmt::Display for Perplexity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, file, window, stride, tokens, bytes, perplexity, bits_per_byte, seconds, .. } = self;
        writeln!(f, "model          {model}")?;
        writeln!(f, "text           {file}: {tokens} tokens, {bytes} bytes after the first token")?;
        writeln!(f, "window         {window} tokens, stride {stride}")?;
        writeln!(f, "perplexity     {perplexity:.4}")?;
        writeln!(f, "bits per byte  {bits_per_byte:.4}")?;
        writeln!(f, "time           {seconds:.1} s")
    }
}

/// Loads the model and measures the perplexity.
pub fn measure(args: &PerplexityArgs) -> Result<Perplexity> {
    let name = args.file.display().to_string();
    let text = std::fs::read_to_string(&args.file).with_context(|| format!("{name} cannot be read"))?;
    let LoadedModel { engine, text: tokenizer, dir } =
        pegainfer_models::load(&args.engine, |dir| Ok(Tokenizer::load(dir)?))?;
    tokenizer.check_vocab(engine.handle.limits().vocab_size)?;
    let ids = tokenizer.encode(&text, true)?;
    ensure!(ids.len() >= 2, "{name} has {} tokens; at least 2 are needed", ids.len());
    let (window, stride) = sizes(args, engine.handle.limits().max_model_len)?;
    let started = Instant::now();
    let nats = sum(&engine.handle, &ids, window, stride)?;
    let (predicted, bytes) = (ids.len() - 1, ids[1..].iter().map(|id| tokenizer.token_bytes(*id).len()).sum());
    Ok(Perplexity {
        model: dir.to_string(),
        file: name,
        window,
        stride,
        tokens: ids.len(),
        bytes,
        nats,
        perplexity: (nats / predicted as f64).exp(),
        bits_per_byte: nats / std::f64::consts::LN_2 / bytes as f64,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Window and stride. The engine generates one token after each window.
fn sizes(args: &PerplexityArgs, max_model_len: usize) -> Result<(usize, usize)> {
    let max_window = max_model_len - 1;
    let window = args.window.map_or(max_window.min(1024), Into::into);
    ensure!(
        (2..=max_window).contains(&window),
        "--window {window}: expected 2 to {max_window}, one less than the context"
    );
    let stride = args.stride.map_or(window / 2, Into::into);
    ensure!(stride < window, "--stride {stride}: it must be below the window of {window} tokens");
    Ok((window, stride))
}

/// `-Σ ln p` of all tokens except the first, added in the order of the text.
fn sum(engine: &EngineHandle, ids: &[u32], window: usize, stride: usize) -> Result<f64> {
    let windows = windows(ids.len(), window, stride);
    let mut progress = Progress::start("perplexity", Unit::Requests, 0, windows.len() as u64);
    let (mut running, mut nats) = (VecDeque::<(TokenStream, usize)>::new(), 0.0);
    let mut windows = windows.into_iter();
    loop {
        while running.len() < IN_FLIGHT
            && let Some((tokens, new)) = windows.next()
        {
            let request =
                GenerateRequest { prompt_logprobs: Some(0), ..GenerateRequest::greedy(ids[tokens].to_vec(), 1) };
            running.push_back((engine.submit(request)?, new));
        }
        let Some((stream, new)) = running.pop_front() else { break };
        nats += last(stream, new)?;
        progress.add(1);
    }
    progress.finish();
    Ok(nats)
}

/// Windows over `len` tokens: the range of each, and the number of counted tokens at its end.
fn windows(len: usize, window: usize, stride: usize) -> Vec<(Range<usize>, usize)> {
    let (mut windows, mut counted) = (Vec::new(), 1);
    for first in (0..len).step_by(stride) {
        let end = (first + window).min(len);
        windows.push((first..end, end - counted));
        counted = end;
        if end == len {
            break;
        }
    }
    windows
}

/// `-Σ ln p` of the last `count` tokens of a request's prompt.
fn last(mut stream: TokenStream, count: usize) -> Result<f64> {
    let mut nats = None;
    loop {
        match stream.blocking_recv() {
            Some(TokenEvent::Prompt(tokens)) => {
                let counted = &tokens[tokens.len() - count..];
                nats = Some(counted.iter().map(|token| -f64::from(token.logprob)).sum());
            }
            Some(TokenEvent::Finished { .. }) => return nats.context("the engine gave no log-probabilities"),
            Some(TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error }) => bail!(error),
            Some(TokenEvent::Admitted { .. } | TokenEvent::Vector(_) | TokenEvent::Token(_)) => {}
            None => bail!("the engine stopped before the text was done"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_but_the_first_is_counted_once_with_enough_context() {
        for (len, window, stride) in [(2, 8, 4), (8, 8, 4), (9, 8, 4), (100, 8, 1), (100, 8, 7), (101, 10, 5)] {
            let mut next = 1;
            for (tokens, count) in windows(len, window, stride) {
                assert!(tokens.len() <= window && tokens.end - count == next, "{len} {window} {stride}");
                let min_before = if tokens.start == 0 { 1 } else { window - stride };
                assert!(count > 0 && next - tokens.start >= min_before, "{len} {window} {stride}");
                next = tokens.end;
            }
            assert_eq!(next, len);
        }
    }
}
