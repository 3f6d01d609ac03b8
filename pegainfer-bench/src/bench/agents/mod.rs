//! `pegainfer bench agents`: multi-turn sessions of coding agents against an OpenAI-compatible server.
//!
//! # Layout
//! - [`args`]: flags. [`script`]: messages, a pure function of the seed, from [`texts`] of these [`lengths`].
//! - [`session`]: requests and answers.
//! - [`turn`]: which prompt tokens were computed again. [`verify`]: the same answers without the prefix cache.
//! - [`report`]: table and JSON.
//!
//! A session is a system prompt with tool definitions, a task, tool results, and at the end the question for a code
//! word in the first tool result. Answers are sent back as they came. If the model calls no tool, the script adds a
//! call.

pub mod args;
pub mod lengths;
pub mod report;
pub mod script;
pub mod session;
pub mod texts;
pub mod turn;
pub mod verify;

use crate::bench::client::random_salt;
use crate::bench::http::Api;
use crate::bench::output::Output;
use crate::bench::target;
use crate::in_process::Servers;
use anyhow::{Context, Result, bail, ensure};
use args::AgentsArgs;
use pegainfer_models::model_path;
use report::{Report, Row, rows};
use script::Script;
use session::{Conversation, Run};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use turn::Turn;
use verify::Comparison;

/// Maximum time to stop this process's server.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the command.
pub fn run(args: &AgentsArgs, servers: &dyn Servers) -> Result<()> {
    let output = Output::open(args.json.as_deref())?;
    let report = measure(args, servers)?;
    output.show(&report, &report.table())?;
    let is_exact = report.exactness.as_ref().is_none_or(Comparison::is_exact);
    ensure!(is_exact || !args.verify_strict, "an answer differs without the prefix cache, or could not be compared");
    Ok(())
}

/// Runs the sessions.
pub fn measure(args: &AgentsArgs, servers: &dyn Servers) -> Result<Report> {
    Script::check(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    let api = open(args, (&runtime, servers))?;
    let report = runtime.block_on(run_sessions(api, args));
    // The process must not end while the engine still holds the device.
    runtime.shutdown_timeout(STOP_TIMEOUT);
    report
}

/// Connects to the server, or starts one.
fn open(args: &AgentsArgs, (runtime, servers): (&Runtime, &dyn Servers)) -> Result<Api> {
    let api = match &args.url {
        Some(url) => target::connect(url, (runtime, servers))?,
        None => {
            // The files of the model inside the executable exist as long as this.
            let model = model_path::resolve(&args.engine)?;
            let max_concurrency = args.sessions.get() * args.subagents.max(1);
            let engine = target::load(&model.dir, &args.engine, max_concurrency)?;
            target::serve(engine, &model.dir, (runtime, servers))?
        }
    };
    let needed = args.grow_to.get() + args.answer_tokens.get();
    if let Some(context) = api.max_model_len().filter(|&context| context < needed) {
        bail!("the server's context of {context} tokens is too short: --grow-to and --answer-tokens need {needed}");
    }
    Ok(api)
}

async fn run_sessions(api: Api, args: &AgentsArgs) -> Result<Report> {
    let run = Arc::new(Run::new(api, args, random_salt()?).await?);
    let (mut tasks, start) = (JoinSet::new(), Instant::now());
    for session in 0..args.sessions.get() {
        tasks.spawn(run.clone().session(session));
    }
    let mut conversations: Vec<Conversation> = tasks.join_all().await.into_iter().flatten().collect();
    let wall_s = start.elapsed().as_secs_f64();
    conversations.sort_by_key(|it| (it.agent.session, it.agent.subagent));
    let turns: Vec<Turn> = conversations.iter().flat_map(|it| it.turns.clone()).collect();
    let failed = failures(&mut conversations, turns.is_empty())?;
    let exactness = match args.verify {
        true => Some(Comparison::new(&run, &conversations, args.verify_every).await),
        false => None,
    };
    let sessions = conversations.iter().filter(|it| it.agent.subagent.is_none());
    let output_tokens: usize = turns.iter().map(|turn| turn.output_tokens).sum();
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        workload: "agents",
        model: run.api.model().to_owned(),
        target: args.url.clone().unwrap_or_else(|| "http inside the process".into()),
        seed: args.seed,
        sessions: args.sessions.get(),
        session_turns: run.script.turns(),
        subagents: args.subagents,
        tokens_per_word: run.tokens_per_word,
        failed,
        wall_s,
        output_tok_s: output_tokens as f64 / wall_s,
        rows: rows(&turns),
        total: Row::new("all".into(), &turns.iter().collect::<Vec<_>>()),
        needles_found: sessions.filter(|it| it.has_code_word(&run.script)).count(),
        exactness,
        turns,
    })
}

/// Number of conversations that failed; an error if no turn succeeded.
fn failures(conversations: &mut [Conversation], no_turn: bool) -> Result<usize> {
    let errors: Vec<_> = conversations.iter_mut().filter_map(|it| it.error.take()).collect();
    let (failed, all) = (errors.len(), conversations.len());
    match errors.into_iter().next() {
        Some(error) if no_turn => bail!(error.context(format!("all {failed} sessions failed"))),
        Some(error) => log::warn!("{failed} of {all} sessions and sub-agents failed, the first one: {error:#}"),
        None => {}
    }
    Ok(failed)
}
