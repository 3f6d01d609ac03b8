//! `pegainfer replay`: runs the requests of a recording again in this process's engine, or plans its schedule again.

mod file;
mod schedule;

use crate::recording::TokenHash;
use crate::recording::format::{Added, Ended, Header, Reason, RecordLine};
use anyhow::{Context, Result, ensure};
use clap::Args;
use file::open;
use futures_util::StreamExt;
use futures_util::stream;
use pegainfer_core::engine::{EngineHandle, FinishReason, GenerateRequest, TokenEvent};
use pegainfer_models::LoadedModel;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine_grammar::EngineGrammar;
use pegainfer_terminal::progress::{Progress, Unit};
use pegainfer_terminal::stdout::print;
use pegainfer_text::{GrammarCompiler, Tokenizer};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Maximum number of printed differences.
const PRINTED: usize = 10;

/// Flags of `replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// File that `serve --record FILE --record-prompts ids` has written
    pub file: PathBuf,
    /// Fail unless every request gives the recorded tokens. The same kind of CPU does; on a GPU the order of sums
    /// depends on the other requests of a step
    #[arg(long)]
    pub check: bool,
    /// Plan the steps of a `serve --record-steps` file again, without a model, and fail at the first difference
    #[arg(long, conflicts_with = "check")]
    pub schedule: bool,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// A request and its recorded end.
struct RecordedRequest {
    added: Added,
    ended: Ended,
}

/// Outcome of a replayed request.
struct Outcome {
    id: u64,
    recorded: Ended,
    tokens: usize,
    hash: TokenHash,
    reason: Reason,
    /// True if the request has images, whose pixels are not recorded: its tokens say nothing.
    has_images: bool,
}

/// Runs the command.
pub fn run(args: &ReplayArgs) -> Result<()> {
    if args.schedule {
        return schedule::run(&args.file);
    }
    let (header, requests, open) = read(&args.file)?;
    let LoadedModel { engine, text: tokenizer, .. } =
        pegainfer_models::load(&args.engine, |dir| Ok(Tokenizer::load(dir)?))?;
    let limits = engine.handle.limits().clone();
    let (vocab, eos) = (limits.vocab_size, limits.eos_token_ids.clone());
    tokenizer.check_vocab(vocab)?;
    let compiler = GrammarCompiler::new(Arc::new(tokenizer), vocab, eos);
    let mut prepared = Vec::with_capacity(requests.len());
    for RecordedRequest { added, ended } in requests {
        let request = prepare(&added, vocab, &compiler)
            .with_context(|| format!("request {} of {} does not fit this model", added.add, args.file.display()))?;
        prepared.push((added.add, request, ended));
    }
    let mut progress = Progress::start("replay", Unit::Requests, 0, prepared.len() as u64);
    let outcomes: Vec<Result<Outcome>> =
        Runtime::new().context("the async runtime cannot be started")?.block_on(async {
            let running = stream::iter(prepared).map(|(id, request, ended)| replay(&engine.handle, id, request, ended));
            let done = running.buffer_unordered(limits.max_num_seqs).inspect(|_| progress.add(1));
            done.collect().await
        });
    progress.finish();
    let outcomes = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
    report(&args.file, &header, &outcomes, open, args.check)
}

/// Prints a summary. Fails if there are differences and `check` is set.
fn report(file: &Path, header: &Header, outcomes: &[Outcome], open: usize, check: bool) -> Result<()> {
    let tokens: usize = outcomes.iter().map(|outcome| outcome.tokens).sum();
    let (with_images, compared): (Vec<_>, Vec<_>) = outcomes.iter().partition(|outcome| outcome.has_images);
    let differ: Vec<_> = compared.iter().filter(|outcome| !outcome.is_same()).collect();
    let same = compared.len() - differ.len();
    print(&format!(
        "{}: {} requests, recorded with {} {}\n",
        file.display(),
        outcomes.len() + open,
        header.model,
        header.version
    ))?;
    print(&format!(
        "{tokens} tokens; {same} of {} requests gave the recorded ones, {open} had not ended\n",
        compared.len()
    ))?;
    if !with_images.is_empty() {
        let count = with_images.len();
        print(&format!("{count} requests ran with other images and are not compared: pixels are not recorded\n"))?;
    }
    for Outcome { id, recorded, tokens, reason, .. } in differ.iter().take(PRINTED) {
        print(&format!(
            "request {id}: {tokens} tokens ({reason:?}), recorded {} ({:?})\n",
            recorded.tokens, recorded.reason
        ))?;
    }
    ensure!(!check || differ.is_empty(), "{} of {} requests gave different tokens", differ.len(), compared.len());
    Ok(())
}

impl Outcome {
    fn is_same(&self) -> bool {
        let Ended { tokens, reason, ref hash, .. } = self.recorded;
        (self.tokens, self.reason, self.hash.to_string()) == (tokens, reason, hash.clone())
    }
}

/// The header, the requests that ended, and the number of those that did not.
fn read(file: &Path) -> Result<(Header, Vec<RecordedRequest>, usize)> {
    let name = file.display();
    let (header, lines) = open(file)?;
    let (mut added, mut requests) = (HashMap::new(), Vec::new());
    for line in lines {
        match line? {
            RecordLine::Added(line) => {
                let id = line.add;
                let line = match line.choice_of {
                    Some(first) => {
                        let missing =
                            || format!("{name}: the line of request {first}, which has the prompt of {id}, is missing");
                        line.complete(added.get(&first).with_context(missing)?)
                    }
                    None => *line,
                };
                added.insert(id, line);
            }
            RecordLine::Ended(ended) => {
                requests.extend(added.remove(&ended.end).map(|added| RecordedRequest { added, ended }));
            }
            RecordLine::Gap { gap } => log::warn!("{name}: {gap} lines were not recorded, the disk was too slow"),
            RecordLine::Schedule(_) => {}
        }
    }
    requests.sort_by_key(|recorded| recorded.added.add);
    Ok((header, requests, added.len()))
}

/// The request in the engine's form.
fn prepare(added: &Added, vocab_size: usize, compiler: &GrammarCompiler) -> Result<GenerateRequest> {
    let mut request = added.request(vocab_size)?.context("its line has no ids")?;
    if let Some(source) = added.parameters.as_ref().and_then(|parameters| parameters.grammar.as_ref()) {
        request.grammar = Some(Arc::new(EngineGrammar::new(compiler.recorded(source)?)));
    }
    Ok(request)
}

/// Runs a request up to its recorded end.
async fn replay(engine: &EngineHandle, id: u64, request: GenerateRequest, recorded: Ended) -> Result<Outcome> {
    let (mut tokens, mut hash, has_images) = (0, TokenHash::default(), !request.images.is_empty());
    let cancelled = recorded.reason == Reason::Cancelled;
    let mut reason = Reason::Cancelled;
    if !cancelled || recorded.tokens > 0 {
        let mut stream = engine.submit(request).with_context(|| format!("request {id} was refused"))?;
        while let Some(event) = stream.recv().await {
            match event {
                TokenEvent::Admitted { .. } | TokenEvent::Prompt(_) | TokenEvent::Vector(_) => {}
                TokenEvent::Token(token) => {
                    tokens += 1;
                    hash.push(token.id);
                    if cancelled && tokens == recorded.tokens {
                        break;
                    }
                }
                TokenEvent::Finished { reason: FinishReason::Stop(_), .. } => reason = Reason::Stop,
                TokenEvent::Finished { reason: FinishReason::Length, .. } => reason = Reason::Length,
                TokenEvent::Failed { .. } | TokenEvent::GrammarFailed { .. } => reason = Reason::Failed,
            }
        }
    }
    Ok(Outcome { id, recorded, tokens, hash, reason, has_images })
}
