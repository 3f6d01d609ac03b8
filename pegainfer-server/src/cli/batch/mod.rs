//! `pegainfer run-batch`: a file of requests in OpenAI's batch format, without a server.
//!
//! # Layout
//! - [`input`]: reads and checks the file of requests. [`output`]: the file of results, from which a stopped run
//!   continues.
//! - [`request`]: sends one request and turns its response into a result line.
//!
//! Each result is appended with one write when it is complete, in the order of completion. A killed run leaves at most
//! one incomplete line, which the next run removes. Requests with a result in the file are not sent again.

mod input;
mod output;
mod request;

use crate::app::Options;
use crate::cli::local_server::{LoadedModel, LocalServer, async_runtime};
use crate::cli::signals;
use crate::text_service::{GrammarLimits, GrammarTrial};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use input::{Request, RequestsFile};
use output::ResultsFile;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::progress::{Progress, Unit};
use pegainfer_terminal::values::{parse_bytes, parse_name};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
use tokio::task::JoinSet;

/// Maximum number of choices of a request. All of them wait in the engine's queue.
const MAX_CHOICES: usize = 128;
/// Limits on the grammar of one request, equal to the defaults of `serve`.
const GRAMMAR_LIMITS: GrammarLimits = GrammarLimits { memory: 256 << 20, time: Duration::from_secs(1) };

/// Examples for the help text.
pub const USE: &str = "\
A request is one line, such as {\"custom_id\": \"1\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"prompt\": \"Once\"}}; its \
result is one line with id, custom_id, response (status_code, request_id, body) and error. Results are appended as they come. \
Start the same command again to continue a stopped run.";

/// Flags of `run-batch`.
#[derive(Debug, Clone, Args)]
pub struct BatchArgs {
    /// File with one request on each line: custom_id, method, url (/v1/chat/completions, /v1/completions or
    /// /v1/responses) and body
    #[arg(short, long, value_name = "FILE")]
    pub input_file: PathBuf,
    /// File to append results to, one on each line. Requests with a result in it are skipped
    #[arg(short, long, value_name = "FILE")]
    pub output_file: PathBuf,
    /// Maximum number of requests that run at the same time [default: as many as --max-num-seqs]
    #[arg(long, value_name = "N")]
    pub concurrency: Option<NonZeroUsize>,
    /// Name that requests use for the model; repeatable [default: the name of the directory or id]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub served_model_name: Vec<String>,
    /// Maximum size of a request's body, such as 512K or 8M
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = parse_bytes)]
    pub max_body_size: u64,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &BatchArgs) -> Result<()> {
    let mut output = ResultsFile::open(&args.output_file)?;
    // The whole file is checked before the model is loaded.
    let mut input = RequestsFile::open(&args.input_file, args.max_body_size)?;
    let total = input.check(&output)?;
    output.repair()?;
    if output.done() == total {
        log::info!("all {total} results are in {}", args.output_file.display());
        return Ok(());
    }
    let server = start(args)?;
    let concurrency = args.concurrency.map_or(server.limits.max_num_seqs, Into::into);
    let runtime = async_runtime()?;
    let mut progress = Progress::start("run-batch", Unit::Requests, output.done() as u64, total as u64);
    let stopped = runtime.block_on(process(&server, &mut input, &mut output, concurrency, &mut progress))?;
    runtime.shutdown_background();
    progress.finish();
    let (done, failed) = (output.done(), output.failed());
    if stopped {
        bail!("stopped with {done} of {total} results; the same command continues with the others");
    }
    ensure!(
        done == total,
        "{} has changed since it was checked: {done} results for {total} requests; start the same command again",
        args.input_file.display()
    );
    output.verify()?;
    log::info!(
        "{total} results are in {}, {failed} of this run with a status other than 200",
        args.output_file.display()
    );
    Ok(())
}

fn start(args: &BatchArgs) -> Result<LocalServer> {
    let mut engine = args.engine.clone();
    let concurrency = args.concurrency.or(engine.max_num_seqs).map_or(256, Into::into);
    let queued = engine.max_queued_requests.get().max(concurrency.saturating_mul(MAX_CHOICES));
    engine.max_queued_requests = NonZeroUsize::new(queued).unwrap_or(engine.max_queued_requests);
    let trial = GrammarTrial::this_program(GRAMMAR_LIMITS).context("the path of this program is unknown")?;
    let max_body = Some(usize::try_from(args.max_body_size)?);
    let options = Options { grammar_trial: Some(trial), max_body, ..Options::default() };
    Ok(LocalServer::new(LoadedModel::load(&engine)?, args.served_model_name.clone(), options))
}

/// Runs the requests that have no result yet, at most `concurrency` at a time. Returns true if a signal stopped it.
async fn process(
    server: &LocalServer,
    input: &mut RequestsFile,
    output: &mut ResultsFile,
    concurrency: usize,
    progress: &mut Progress,
) -> Result<bool> {
    let stop = signals::stop();
    tokio::pin!(stop);
    let mut running = JoinSet::new();
    loop {
        while running.len() < concurrency
            && let Some(Request { custom_id, url, body }) = input.next_without(output)?
        {
            running.spawn(request::run(server.clone(), custom_id, url, body));
        }
        tokio::select! {
            () = &mut stop => return Ok(true),
            done = running.join_next() => match done {
                None => return Ok(false),
                Some(result) => output.append(&result.context("a request panicked")??)?,
            }
        }
        progress.add(1);
    }
}
