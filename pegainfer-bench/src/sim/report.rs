//! Results of a simulation, as tables and as JSON.

use super::simulation::Simulation;
use super::world::Run;
use crate::bench::report::{Figure, number, panel, times};
use crate::bench::stats::Figures;
use crate::bench::svg::{Ink, Mark, render};
use anyhow::Result;
use pegainfer_core::ledger::{Header, StepKind};
use serde::Serialize;
use std::fmt::Write;

/// Metrics of a workload.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Name of the workload.
    pub name: String,
    /// Line of the plot to which the row belongs.
    #[serde(skip)]
    pub line: &'static str,
    /// x value on that line.
    #[serde(skip)]
    pub x: f64,
    /// Mean prompt length in tokens.
    pub prompt_len: f64,
    /// Mean output length in tokens.
    pub output_len: f64,
    /// Median of each metric over the runs.
    pub median: Figures,
    /// Work of the engine and the device in the last run.
    pub engine: EngineUse,
    /// Metrics of each run.
    pub runs: Vec<Figures>,
    /// Poisson arrivals only: the median over the runs if every step takes [`ANOTHER_CARD`] times as long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longer_steps: Option<Figures>,
}

/// Factor between the times of steps on cards of the same kind, of which H200s were seen to differ by 2 to 4 %.
pub const ANOTHER_CARD: f64 = 1.04;

/// Work of the engine and the device in one run.
#[derive(Debug, Clone, Serialize)]
pub struct EngineUse {
    /// Number of steps by kind.
    pub steps: Vec<(&'static str, u64)>,
    /// Device time by kind of step, as a fraction of the run; the mean of several engines.
    pub busy: Vec<(&'static str, f64)>,
    /// Fractions of the device time by op, largest first; empty if the ledger has no op times.
    pub ops: Vec<(String, f64)>,
    /// Peak of KV blocks held by requests, as a fraction of the pool.
    pub kv_peak: f64,
    /// Fraction of the looked-up prompt tokens found in the prefix cache.
    pub hit_rate: f64,
    /// Part of the prompt tokens that was loaded from host memory or the file, of an engine that keeps copies there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaded: Option<f64>,
    /// Number of requests that lost their blocks to older ones and were recomputed.
    pub preemptions: u64,
    /// Fraction of the device time in steps that the ledger does not cover.
    pub uncovered: f64,
    /// Number of steps that the ledger does not cover.
    pub uncovered_steps: u64,
}

impl EngineUse {
    /// The work of a run. `ops` names the ops with known times.
    pub fn new(run: &Run, ops: &[String]) -> Self {
        let (tally, wall) = (&run.tally, run.wall.as_secs_f64() * run.engines as f64);
        let busy = tally.busy();
        let part = |seconds: f64, whole: f64| if whole > 0.0 { seconds / whole } else { 0.0 };
        let kinds = || StepKind::ALL.iter().map(|kind| kind.name());
        let in_ops: f64 = tally.ops.iter().sum();
        let mut ops: Vec<(String, f64)> =
            ops.iter().zip(&tally.ops).map(|(op, seconds)| (op.clone(), part(*seconds, in_ops))).collect();
        ops.sort_by(|a, b| b.1.total_cmp(&a.1));
        Self {
            steps: kinds().zip(tally.steps).collect(),
            busy: kinds().zip(tally.seconds.map(|seconds| part(seconds, wall))).collect(),
            ops,
            kv_peak: part(run.peak_blocks as f64, run.stats.kv_blocks_total as f64),
            hit_rate: part(run.stats.prefix_hits as f64, run.stats.prefix_queries as f64),
            loaded: (run.stats.tiers.host_slots > 0)
                .then(|| part(run.stats.tiers.hits as f64, run.stats.prefix_queries as f64)),
            preemptions: run.stats.preemptions,
            uncovered: part(tally.uncovered, busy),
            uncovered_steps: tally.uncovered_steps,
        }
    }
}

/// The metrics of one run.
pub fn figures(run: &Run) -> Figures {
    Figures::new(&run.measurements, run.refused, run.wall)
}

/// The report of a simulation.
#[derive(Debug, Serialize)]
pub struct SimReport {
    /// Version of this program.
    pub version: &'static str,
    /// Properties of the engine.
    pub engine: Header,
    /// Number of such engines.
    pub engines: usize,
    /// True if the ledger was measured with other kernels than this program's.
    pub stale: bool,
    /// True if the times of steps were estimated.
    pub estimated: bool,
    /// Workloads in the order of the flags.
    pub rows: Vec<Row>,
}

impl SimReport {
    /// A report without rows.
    pub fn new(simulation: &Simulation, (stale, estimated): (bool, bool)) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            engine: simulation.header.clone(),
            engines: simulation.engines,
            stale,
            estimated,
            rows: Vec::new(),
        }
    }

    fn simulated(&self) -> &'static str {
        if self.estimated { "simulated with estimated steps" } else { "simulated" }
    }

    /// The report as a plot.
    pub fn svg(&self) -> Result<String> {
        let Header { model, device, .. } = &self.engine;
        let model = model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let stale = if self.stale { "; the ledger is stale" } else { "" };
        let simulated = self.simulated();
        let is_one_line = self.rows.windows(2).all(|pair| pair[0].line == pair[1].line);
        let x_label = match self.rows.first().map(|row| row.line).filter(|_| is_one_line) {
            Some("closed loop") => "concurrent requests",
            Some("burst") => "requests",
            Some("Poisson") => "requests per second",
            Some("trace") => "speed of the trace",
            _ => "concurrent requests, or requests per second",
        };
        let ttft: [Figure<Row>; 2] =
            [("p50", Mark::Line, |row| row.median.ttft_ms.p50), ("p99", Mark::Line, |row| row.median.ttft_ms.p99)];
        let tpot: [Figure<Row>; 2] =
            [("p50", Mark::Line, |row| row.median.tpot_ms.p50), ("p99", Mark::Line, |row| row.median.tpot_ms.p99)];
        let rate: [Figure<Row>; 1] = [("simulated", Mark::Line, |row| row.median.output_tok_s)];
        let panel = |title, figures: &[_]| panel(&self.rows, (title, x_label), |row| (row.line, row.x), figures);
        let panels = [panel("TTFT, ms", &ttft), panel("TPOT, ms", &tpot), panel("output tokens per second", &rate)];
        render(&format!("pegainfer sim: {model}"), &format!("{device}, {simulated}{stale}"), &panels, Ink::Grey)
    }

    /// The report as tables.
    pub fn table(&self) -> String {
        let Header { model, device, .. } = &self.engine;
        let engines = if self.engines > 1 { format!("{} engines, each ", self.engines) } else { String::new() };
        let mut out = format!("{model} on {engines}{device}, {}\n", self.simulated());
        let _ = write!(
            out,
            "{:<16} {:>6} {:>6} |{:^27}|{:^27}|{:^27}|\n{:<16} {:>6} {:>6} |",
            "", "prompt", "output", "TTFT ms", "TPOT ms", "ITL ms", "", "tokens", "tokens"
        );
        for _ in 0..3 {
            let _ = write!(out, "{:>8} {:>8} {:>8} |", "p50", "p90", "p99");
        }
        let _ = writeln!(out, "{:>8} {:>9}", "req/s", "out tok/s");
        for row in &self.rows {
            row.write_times(&mut out, &self.engine);
        }
        let _ = write!(out, "\n{:<16} |{:^26}|{:^26}|", "", "steps", "% of the time");
        let _ = write!(out, "{:>8} {:>8} {:>9} {:>10}\n{:<16} |", "KV peak", "cached", "preempted", "uncovered", "");
        for _ in 0..2 {
            let _ = write!(out, "{:>8} {:>8} {:>8}|", "decode", "prefill", "mixed");
        }
        let _ = writeln!(out, "{:>8} {:>8} {:>9} {:>10}", "%", "%", "requests", "% of time");
        for row in &self.rows {
            row.write_engine(&mut out);
        }
        for Row { name, longer_steps, .. } in &self.rows {
            let Some(Figures { ttft_ms: ttft, tpot_ms: tpot, .. }) = longer_steps else { continue };
            let percent = 100.0 * (ANOTHER_CARD - 1.0);
            let _ = write!(
                out,
                "\n{name} on a card with steps {percent:.0} % longer: TTFT p50 {} and p99 {} ms, TPOT {} and {} ms",
                number(ttft.p50, 1),
                number(ttft.p99, 1),
                number(tpot.p50, 2),
                number(tpot.p99, 2)
            );
        }
        for (row, loaded) in self.rows.iter().filter_map(|row| Some((row, row.engine.loaded?))) {
            let _ =
                write!(out, "\n{}, % of prompt tokens loaded from beyond the device: {:.1}", row.name, 100.0 * loaded);
        }
        for row in self.rows.iter().filter(|row| !row.engine.ops.is_empty()) {
            let ops = row.engine.ops.iter().filter(|(_, part)| *part >= 0.01);
            let ops: Vec<String> = ops.map(|(op, part)| format!("{op} {:.0}", 100.0 * part)).collect();
            let _ = write!(out, "\n{}, % of the device's time by op: {}", row.name, ops.join(", "));
        }
        out + "\n"
    }
}

impl Row {
    fn write_times(&self, out: &mut String, engine: &Header) {
        let Self { name, prompt_len, output_len, median, .. } = self;
        let _ = writeln!(
            out,
            "{name:<16} {prompt_len:>6.0} {output_len:>6.0} |{} |{} |{} |{:>8} {:>9}",
            times(median.ttft_ms),
            times(median.tpot_ms),
            times(median.itl_ms),
            number(median.req_s, 2),
            number(median.output_tok_s, 1)
        );
        if median.failed > 0 {
            let Header { max_model_len, kv_blocks, block_size, .. } = engine;
            let (all, capacity) = (median.failed + median.requests, kv_blocks * block_size);
            let _ = writeln!(
                out,
                "{:<16} {} of {all} refused: longer than the context of {max_model_len} tokens or the KV cache of {capacity}",
                "", median.failed
            );
        }
    }

    fn write_engine(&self, out: &mut String) {
        let EngineUse { steps, busy, kv_peak, hit_rate, preemptions, uncovered, .. } = &self.engine;
        let _ = write!(out, "{:<16} |", self.name);
        let columns: String = steps.iter().map(|(_, steps)| format!("{steps:>8} ")).collect();
        let _ = write!(out, "{columns}|");
        let columns: String = busy.iter().map(|(_, part)| format!("{:>8.1} ", 100.0 * part)).collect();
        out.push_str(&columns);
        let percent = |part: &f64| 100.0 * part;
        let (kv, hits, uncovered) = (percent(kv_peak), percent(hit_rate), percent(uncovered));
        let _ = writeln!(out, "|{kv:>7.1} {hits:>8.1} {preemptions:>9} {uncovered:>10.1}");
    }
}
