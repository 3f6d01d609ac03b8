//! `pegainfer sim`: predicts a workload's metrics on the device of a ledger, without the device.
//!
//! The engine is the real one, with scheduler, KV pool, prefix index and batching delay. Its executor takes the time of
//! each step from the ledger's law, on a simulated clock.
//!
//! # Layout
//! - [`args`]: flags. [`mod@workload`]: the workloads of `bench`, and traces. [`fit`]: requests that are too long.
//!   [`search`]: rates within limits, and flags. [`users`]: GPUs for a number of users.
//! - [`device`]: the executor. [`world`]: clients and engines. [`routing`]: which engine a request goes to.
//!   [`simulation`], [`setup`]: both from a ledger. [`host`]: the engine thread's own time. [`tiers`]: copies of KV
//!   blocks beyond the device.
//! - [`report`]: tables and JSON. [`timeline`]: steps for a trace viewer.

pub mod args;
pub mod device;
pub mod fit;
pub mod host;
pub mod report;
pub mod routing;
pub mod search;
pub mod setup;
pub mod simulation;
pub mod tiers;
pub mod timeline;
pub mod users;
pub mod workload;
pub mod world;

use crate::bench::output::create;
use crate::bench::stats::Figures;
use crate::roofline;
use crate::shipped;
use crate::stale;
use anyhow::{Context, Result, ensure};
use args::SimArgs;
use pegainfer_core::rng;
use pegainfer_terminal::stderr;
use pegainfer_terminal::stdout::{print, print_exact};
use report::{ANOTHER_CARD, EngineUse, Row, SimReport, figures};
use search::{Lengths, Slo};
use simulation::Simulation;
use std::io::{BufWriter, Write as _};
use std::num::NonZeroUsize;
use tiers::TierSizes;

/// Runs the command.
pub fn run(args: &SimArgs) -> Result<()> {
    let ledger = match args.roofline {
        true => roofline::ledger(&args.shipped)?,
        false => shipped::read(args.ledger.as_deref(), &args.shipped)?,
    };
    let warning = match args.roofline {
        true => Some(roofline::warning(&ledger.header)),
        false => stale::warning(&ledger.header),
    };
    let mut simulation = Simulation::new(&ledger)?;
    resize(&mut simulation, args);
    if let Some(sizes) = &mut simulation.tiers {
        sizes.state_tokens = setup::state_tokens(&ledger)?;
    }
    simulation.check()?;
    if let Some(warning) = &warning {
        stderr::print(warning);
    }
    ensure!(!args.strict || warning.is_none(), "--strict: measure the ledger again with pegainfer ledger");
    if args.slo_ttft.is_some() || args.slo_tpot.is_some() {
        fit::check_search(args, &simulation.header)?;
        let quantile = args.quantile.parse().context("--quantile")?;
        let slo = Slo { ttft: args.slo_ttft, tpot: args.slo_tpot, quantile };
        let lengths = Lengths { prompt: args.prompt_len, output: args.output_len, requests: args.requests };
        let highest = search::highest_rate(&simulation, slo, lengths, (args.seed, args.runs.get()))?;
        print(&highest.to_string())?;
        return match args.users {
            Some(users) => print(&users::gpus(&simulation, &highest, users.get(), args.user_interval)?),
            None => Ok(()),
        };
    }
    ensure!(args.users.is_none(), "--users: give the limits that the users accept, --slo-ttft or --slo-tpot or both");
    let workloads = workload::workloads(args)?;
    for workload in &workloads {
        fit::check_workload(workload, &simulation.header)?;
    }
    if args.tune {
        for (i, workload) in workloads.iter().enumerate() {
            let seed = rng::bits(rng::bits(args.seed, i as u64), 0);
            print(&search::tune(&simulation, workload, seed)?.to_string())?;
        }
        return Ok(());
    }
    report(args, &simulation, &workloads, warning.is_some())
}

/// Applies the flags for engine sizes.
fn resize(simulation: &mut Simulation, args: &SimArgs) {
    (simulation.engines, simulation.round_robin) = (args.data_parallel_size.get(), args.round_robin);
    simulation.tiers = args.kv_offloading_tokens.map(|host| TierSizes {
        host_tokens: host.get(),
        host_rate: args.kv_offloading_rate,
        disk_tokens: args.kv_disk_tokens.map_or(0, NonZeroUsize::get),
        disk_rate: args.kv_disk_rate,
        state_tokens: 0,
    });
    let header = &mut simulation.header;
    header.max_num_seqs = args.max_num_seqs.map_or(header.max_num_seqs, usize::from);
    header.max_num_batched_tokens = args.max_num_batched_tokens.map_or(header.max_num_batched_tokens, usize::from);
    header.max_num_mixed_tokens = args.mixed_step_token_budget.map_or(header.max_num_mixed_tokens, usize::from);
    header.kv_blocks = args.kv_cache_tokens.map_or(header.kv_blocks, |tokens| tokens.get() / header.block_size);
}

/// Runs each workload with each seed and prints the report.
fn report(args: &SimArgs, simulation: &Simulation, workloads: &[workload::Workload], warned: bool) -> Result<()> {
    // A path that cannot be written is reported before the simulation.
    let svg = args.svg.as_deref().map(create).transpose()?;
    let mut slower = simulation.clone();
    slower.pace = ANOTHER_CARD;
    let mut report = SimReport::new(simulation, (warned && !args.roofline, args.roofline));
    let mut steps = Vec::new();
    for (i, workload) in workloads.iter().enumerate() {
        // Same seeds as `bench`.
        let seed = rng::bits(args.seed, i as u64);
        let mut runs = Vec::new();
        let mut longer = Vec::new();
        let mut engine = None;
        for r in 0..args.runs.get() as u64 {
            if workload.is_poisson() && !args.roofline {
                longer.push(figures(&workload.run(&slower, rng::bits(seed, r), false)?));
            }
            let run = workload.run(simulation, rng::bits(seed, r), args.timeline.is_some())?;
            runs.push(figures(&run));
            engine = Some(EngineUse::new(&run, simulation.ops()));
            steps = run.timeline;
        }
        let engine = engine.context("no run")?;
        let uncovered = engine.uncovered_steps;
        ensure!(!args.strict || uncovered == 0, "--strict: the ledger does not cover {uncovered} steps");
        let (prompt_len, output_len) = workload.mean_lengths();
        let ((name, line, x), median) = (workload.place(), Figures::median(&runs));
        let longer_steps = (!longer.is_empty()).then(|| Figures::median(&longer));
        report.rows.push(Row { name, line, x, prompt_len, output_len, median, engine, runs, longer_steps });
    }
    if let Some(path) = &args.timeline {
        timeline::write(&steps, &mut BufWriter::new(create(path)?)).context("the timeline cannot be written")?;
    }
    if let Some(mut file) = svg {
        file.write_all(report.svg()?.as_bytes()).context("the plot cannot be written")?;
    }
    let text = serde_json::to_string_pretty(&report)? + "\n";
    let to_stdout = args.json.as_deref().is_some_and(|path| path == "-");
    if let Some(path) = args.json.as_deref().filter(|_| !to_stdout) {
        std::fs::write(path, &text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    if to_stdout { print_exact(&text) } else { print(&report.table()) }
}

#[cfg(test)]
mod sessions_test;
#[cfg(test)]
mod tests;
