//! Figures as a table, as JSON and as a plot, each beside its limit.

use super::args::Workload;
use super::roofline::{Limit, Limits, Roofline};
use super::stats::{Figures, Percentiles};
use super::svg::{Panel, Series, render};
use super::workload::{Arrivals, Point};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;

/// One line of the report: a point, or one pass over its prompts.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What it is, for people.
    pub name: String,
    /// The line of the plot that it belongs to.
    #[serde(skip)]
    line: String,
    /// Where on that line.
    #[serde(skip)]
    x: f64,
    /// What was asked for.
    #[serde(flatten)]
    pub point: Point,
    /// The median of each figure over the rounds.
    pub median: Figures,
    /// The least, or most, that each figure of the median can be.
    pub limits: Limits,
    /// The limit as a share of the median, p50 of times.
    pub roofline_share: Shares,
    /// The figures of each round.
    pub rounds: Vec<Figures>,
}

/// 1 is the roofline itself.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Shares {
    ttft: f64,
    tpot: f64,
    output_tok_s: f64,
}

/// Everything that a run gave.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Of this program.
    pub version: &'static str,
    /// As on the command line.
    pub workload: &'static str,
    /// Directory of the model.
    pub model: String,
    /// `engine` without HTTP, else the server's address.
    pub target: String,
    /// Of this machine.
    pub device: String,
    /// Of the random prompts and arrivals.
    pub seed: u64,
    /// What the limits were computed from.
    pub roofline: Roofline,
    /// In the order of the sweep.
    pub rows: Vec<Row>,
}

impl Row {
    /// The row of pass number `pass` over a point's prompts, from its rounds.
    pub fn new(
        workload: &Workload,
        point: Point,
        pass: usize,
        rounds: Vec<Figures>,
        roofline: &Roofline,
    ) -> Result<Self> {
        let median = Figures::median(&rounds);
        let limits = roofline.limits(point, &median)?;
        let roofline_share = Shares {
            ttft: limits.ttft_ms.value / median.ttft_ms.p50,
            tpot: limits.tpot_ms.value / median.tpot_ms.p50,
            output_tok_s: median.output_tok_s / limits.output_tok_s.value,
        };
        let prompt_len = point.prompt_len as f64;
        let (name, line, x) = match (workload, point.arrivals) {
            (Workload::Latency(_), _) => ("1 stream".into(), format!("{} out", point.output_len), prompt_len),
            (Workload::Prefix(_), _) if pass == 0 => ("cold".into(), "cold".into(), prompt_len),
            (Workload::Prefix(_), _) => ("again".into(), "again".into(), prompt_len),
            (_, Arrivals::Closed { streams }) => (plural(streams, "stream"), "closed loop".into(), streams as f64),
            (_, Arrivals::Burst) => (format!("burst of {}", point.requests), "burst".into(), point.requests as f64),
            (_, Arrivals::Poisson { qps }) => (format!("{qps} qps"), "Poisson".into(), qps),
        };
        Ok(Self { name, line, x, point, median, limits, roofline_share, rounds })
    }

    fn write(&self, out: &mut String) {
        let Self { name, point, median, limits, roofline_share: share, .. } = self;
        let _ = writeln!(
            out,
            "{name:<14} {:>6} {:>6} {:>6.0} |{} {:>8} |{} {:>8} |{} |{:>7.2} {:>9.1} {:>8}",
            point.prompt_len,
            point.output_len,
            median.cached_tokens,
            times(median.ttft_ms),
            percent(share.ttft, limits.ttft_ms),
            times(median.tpot_ms),
            percent(share.tpot, limits.tpot_ms),
            times(median.itl_ms),
            median.req_s,
            median.output_tok_s,
            percent(share.output_tok_s, limits.output_tok_s)
        );
        if median.failed > 0 {
            let _ = writeln!(out, "{:<14} {} of {} failed", "", median.failed, median.failed + median.requests);
        }
    }
}

fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

impl Report {
    /// For people.
    pub fn table(&self) -> String {
        let mut out = format!(
            "{}\n{:<14} {:>6} {:>6} {:>6} |{:^35}|{:^35}|{:^26}|\n{:<14} {:>6} {:>6} {:>6} |",
            self.device,
            "",
            "prompt",
            "output",
            "cached",
            "TTFT ms",
            "TPOT ms",
            "ITL ms",
            "",
            "tokens",
            "tokens",
            "tokens"
        );
        for _ in 0..2 {
            let _ = write!(out, "{:>8} {:>8} {:>8} {:>8} |", "p50", "p90", "p99", "% roof");
        }
        out += &format!("{:>8} {:>8} {:>8} |{:>7} {:>9} {:>8}\n", "p50", "p90", "p99", "req/s", "out tok/s", "% roof");
        for row in &self.rows {
            row.write(&mut out);
        }
        out + &self.notes()
    }

    fn notes(&self) -> String {
        let rounds = self.rows.first().map_or(0, |row| row.rounds.len());
        let Roofline { read_bytes_s, read_source, peak_source, .. } = self.roofline;
        let compute = match self.roofline.peak_flop_s {
            Some(peak) => format!("compute {:.3} TFLOP/s ({peak_source})", peak / 1e12),
            None => "no bf16 rate is known for this device: give --peak-tflops".to_owned(),
        };
        format!(
            "Medians of {}. % roof: of p50, the share that memory (m) or compute (c) needs at least; of the \
             rate, its share of the most they allow.\nThe limits are those of the recorded ops: TTFT, the request's own \
             prefill; TPOT, a decode step at the mean batch and context.\nmemory {:.1} GB/s ({read_source}); {compute}\n",
            plural(rounds, "round"),
            read_bytes_s / 1e9
        )
    }

    /// The sweep as a plot.
    pub fn svg(&self, workload: &Workload) -> String {
        let model = self.model.rsplit('/').next().unwrap_or_default();
        let title = format!("pegainfer bench {}: {model}", self.workload);
        let panels = match workload {
            Workload::Latency(_) | Workload::Prefix(_) => [self.ttft("prompt tokens"), self.tpot("prompt tokens")],
            Workload::Throughput(_) => [self.tpot("requests at once"), self.rate("requests at once")],
            Workload::Serve(_) => [self.tpot("requests a second"), self.rate("requests a second")],
        };
        render(&title, &format!("{}; dashed: roofline", self.device), &panels)
    }

    fn ttft(&self, x_label: &str) -> Panel {
        let measured: [Figure; 2] = [("p50", |row| row.median.ttft_ms.p50), ("p99", |row| row.median.ttft_ms.p99)];
        self.panel("TTFT, ms", x_label, &measured, |row| row.limits.ttft_ms.value)
    }

    fn tpot(&self, x_label: &str) -> Panel {
        let measured: [Figure; 2] = [("p50", |row| row.median.tpot_ms.p50), ("p99", |row| row.median.tpot_ms.p99)];
        self.panel("TPOT, ms", x_label, &measured, |row| row.limits.tpot_ms.value)
    }

    fn rate(&self, x_label: &str) -> Panel {
        let measured: [Figure; 1] = [("measured", |row| row.median.output_tok_s)];
        self.panel("output tokens a second", x_label, &measured, |row| row.limits.output_tok_s.value)
    }

    /// Every figure, and its limit, of every line of the sweep.
    fn panel(&self, title: &str, x_label: &str, measured: &[Figure], limit: fn(&Row) -> f64) -> Panel {
        let mut lines: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !lines.contains(&row.line.as_str()) {
                lines.push(&row.line);
            }
        }
        let mut series = Vec::new();
        for line in &lines {
            let figures = measured.iter().map(|figure| (*figure, false)).chain([(("roofline", limit), true)]);
            for ((name, figure), dashed) in figures {
                let name = if lines.len() > 1 { format!("{line}, {name}") } else { name.to_owned() };
                let rows = self.rows.iter().filter(|row| row.line == *line);
                series.push(Series { name, dashed, points: rows.map(|row| (row.x, figure(row))).collect() });
            }
        }
        Panel { title: title.into(), x_label: x_label.into(), series }
    }
}

/// A name for the legend, and where the value is.
type Figure = (&'static str, fn(&Row) -> f64);

fn times(times: Percentiles) -> String {
    let Percentiles { p50, p90, p99 } = times;
    format!("{:>8} {:>8} {:>8}", milliseconds(p50), milliseconds(p90), milliseconds(p99))
}

/// Four digits, or a dash where nothing was measured.
fn milliseconds(value: f64) -> String {
    match value {
        v if v.is_nan() => "-".into(),
        v if v < 10.0 => format!("{v:.3}"),
        v if v < 100.0 => format!("{v:.2}"),
        v => format!("{v:.1}"),
    }
}

fn percent(share: f64, limit: Limit) -> String {
    if share.is_finite() { format!("{:.1} {}", 100.0 * share, &limit.by[..1]) } else { "-".into() }
}
