//! Metrics as a table, as JSON and as a plot, each with its limit.

use super::args::Workload;
use super::cells::CellsSummary;
use super::limits::{Limit, Limits};
use super::percentiles::Percentiles;
use super::replay::TraceSummary;
use super::roofline::Roofline;
use super::stats::Figures;
use super::svg::{Ink, Mark, Panel, Series, render};
use super::workload::Point;
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;

/// One line of the report: a point, or one pass over its prompts.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Name of the row in the table.
    pub name: String,
    /// Sampling of its requests, if several are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<String>,
    /// Line of the plot to which the row belongs.
    #[serde(skip)]
    line: String,
    /// x value on that line.
    #[serde(skip)]
    x: f64,
    /// Measurement point.
    #[serde(flatten)]
    pub point: Point,
    /// Median of each metric over the runs.
    pub median: Figures,
    /// Limit of each metric of the median.
    pub limits: Limits,
    /// Limit over median (p50 for times; inverted for rates), so that 1 is the roofline.
    pub roofline_share: RooflineFractions,
    /// Metrics of each run.
    #[serde(rename = "rounds")]
    pub runs: Vec<Figures>,
}

/// Fractions of the roofline: 1 is the roofline itself.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RooflineFractions {
    ttft: f64,
    tpot: f64,
    output_tok_s: f64,
}

/// The report of a benchmark.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this program.
    pub version: &'static str,
    /// Name of the workload on the command line.
    pub workload: &'static str,
    /// Directory of the model.
    pub model: String,
    /// `engine` without HTTP, otherwise the server's address.
    pub target: String,
    /// Name of this machine's device.
    pub device: String,
    /// Seed of the random prompts and arrival times.
    pub seed: u64,
    /// Device limits, from which the limits of the metrics are computed.
    pub roofline: Roofline,
    /// Summary of the replayed trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceSummary>,
    /// The public benchmark that the rows are cells of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cells: Option<CellsSummary>,
    /// Rows in the order of the sweep.
    pub rows: Vec<Row>,
}

impl Row {
    /// The row of one pass over a point's prompts, from its runs.
    pub fn new(
        workload: &Workload,
        point: Point,
        pass: usize,
        runs: Vec<Figures>,
        roofline: &Roofline,
    ) -> Result<Self> {
        let median = Figures::median(&runs);
        let limits = roofline.limits(point, &median)?;
        let roofline_share = RooflineFractions {
            ttft: limits.ttft_ms.value / median.ttft_ms.p50,
            tpot: limits.tpot_ms.value / median.tpot_ms.p50,
            output_tok_s: median.output_tok_s / limits.output_tok_s.value,
        };
        let prompt_len = point.prompt_len as f64;
        let (name, line, x) = match workload {
            Workload::Latency(_) => ("concurrency 1".into(), format!("{} out", point.output_len), prompt_len),
            Workload::Cells(_) => {
                let line = format!("{} / {}", point.prompt_len, point.output_len);
                let (name, _, x) = point.place();
                (name, line, x)
            }
            Workload::Prefix(_) if pass == 0 => ("cold".into(), "cold".into(), prompt_len),
            Workload::Prefix(_) => ("cached".into(), "cached".into(), prompt_len),
            _ => {
                let (name, line, x) = point.place();
                (name, line.to_owned(), x)
            }
        };
        Ok(Self { name, sampling: None, line, x, point, median, limits, roofline_share, runs })
    }

    /// The row with the name of its sampling.
    pub fn sampled(self, sampling: String) -> Self {
        let name = format!("{}, {sampling}", self.name);
        Self { name, line: sampling.clone(), sampling: Some(sampling), ..self }
    }

    fn write(&self, out: &mut String, width: usize) {
        let Self { name, point, median, limits, roofline_share: share, .. } = self;
        let _ = writeln!(
            out,
            "{name:<width$} {:>6} {:>6} {:>6} |{} {:>8} |{} {:>8} |{} |{:>7} {:>9} {:>8}",
            point.prompt_len,
            point.output_len,
            number(median.cached_tokens, 0),
            times(median.ttft_ms),
            percent(share.ttft, limits.ttft_ms),
            times(median.tpot_ms),
            percent(share.tpot, limits.tpot_ms),
            times(median.itl_ms),
            number(median.req_s, 2),
            number(median.output_tok_s, 1),
            percent(share.output_tok_s, limits.output_tok_s)
        );
        write_problems(out, width, median);
    }
}

/// Writes how many requests failed or ended early, if any, after `width` spaces.
pub fn write_problems(out: &mut String, width: usize, figures: &Figures) {
    let Figures { requests, failed, stopped_early: early, .. } = figures;
    if *failed > 0 {
        let _ = writeln!(out, "{:<width$} {failed} of {} failed", "", failed + requests);
    }
    if *early > 0 {
        let _ = writeln!(out, "{:<width$} {early} of {requests} stopped before their length", "");
    }
}

/// A number of things.
pub fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

impl Report {
    /// The report as a table.
    pub fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(15);
        let mut out = format!(
            "{}\n{:<width$} {:>6} {:>6} {:>6} |{:^35}|{:^35}|{:^26}|\n{:<width$} {:>6} {:>6} {:>6} |",
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
            row.write(&mut out, width);
        }
        if let Some(trace) = &self.trace {
            out += &format!("{trace}\n");
        }
        out + &self.notes()
    }

    fn notes(&self) -> String {
        let runs = self.rows.first().map_or(0, |row| row.runs.len());
        let Roofline { read_bytes_s, read_source, peak_source, engines, .. } = self.roofline;
        let compute = match self.roofline.peak_flop_s {
            Some(peak) => format!("compute {:.3} TFLOP/s ({peak_source})", peak / 1e12),
            None => "no bf16 rate is known for this device: give --peak-tflops".to_owned(),
        };
        let each = if engines > 1 { format!("each of {engines} engines: ") } else { String::new() };
        format!(
            "Medians of {}. % roof: the time that memory (m) or compute (c) needs at least, as a percentage of p50; for the \
             rate, its percentage of the limit.\nThe limits are those of the recorded ops: TTFT, the request's own \
             prefill; TPOT, a decode step at the mean batch size and context, with its part of the prompts of other \
             requests.\n{each}memory {:.1} GB/s ({read_source}); {compute}\n",
            plural(runs, "run"),
            read_bytes_s / 1e9
        )
    }

    /// The sweep as a plot.
    pub fn svg(&self, workload: &Workload) -> Result<String> {
        let model = self.model.rsplit('/').next().unwrap_or_default();
        let title = format!("pegainfer bench {}: {model}", self.workload);
        let panels = match workload {
            Workload::Latency(_) | Workload::Prefix(_) => [self.ttft("prompt tokens"), self.tpot("prompt tokens")],
            Workload::Throughput(_) | Workload::Cells(_) => {
                [self.tpot("concurrent requests"), self.rate("concurrent requests")]
            }
            Workload::Serve(_) => [self.tpot("requests per second"), self.rate("requests per second")],
            Workload::Replay(_) => [self.tpot("speed of the trace"), self.rate("speed of the trace")],
        };
        render(&title, &format!("{}; dashed: roofline", self.device), &panels, Ink::Grey)
    }

    fn ttft(&self, x_label: &str) -> Panel {
        let p50: Figure<Row> = ("p50", Mark::Line, |row| row.median.ttft_ms.p50);
        let p99: Figure<Row> = ("p99", Mark::Line, |row| row.median.ttft_ms.p99);
        self.panel("TTFT, ms", x_label, &[p50, p99, ("roofline", Mark::Dashed, |row| row.limits.ttft_ms.value)])
    }

    fn tpot(&self, x_label: &str) -> Panel {
        let p50: Figure<Row> = ("p50", Mark::Line, |row| row.median.tpot_ms.p50);
        let p99: Figure<Row> = ("p99", Mark::Line, |row| row.median.tpot_ms.p99);
        self.panel("TPOT, ms", x_label, &[p50, p99, ("roofline", Mark::Dashed, |row| row.limits.tpot_ms.value)])
    }

    fn rate(&self, x_label: &str) -> Panel {
        let measured: Figure<Row> = ("measured", Mark::Line, |row| row.median.output_tok_s);
        let limit: Figure<Row> = ("roofline", Mark::Dashed, |row| row.limits.output_tok_s.value);
        self.panel("output tokens per second", x_label, &[measured, limit])
    }

    fn panel(&self, title: &str, x_label: &str, figures: &[Figure<Row>]) -> Panel {
        panel(&self.rows, (title, x_label), |row| (&row.line, row.x), figures)
    }
}

/// Name in the legend, how its points are drawn, and accessor of the value.
pub type Figure<R> = (&'static str, Mark, fn(&R) -> f64);

/// A panel with every figure of the rows. `place` gives a row's line and its x value on that line.
pub fn panel<'a, R>(
    rows: &'a [R],
    (title, x_label): (&str, &str),
    place: impl Fn(&'a R) -> (&'a str, f64),
    figures: &[Figure<R>],
) -> Panel {
    let mut lines: Vec<&str> = Vec::new();
    for (line, _) in rows.iter().map(&place) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let mut series = Vec::new();
    for line in &lines {
        for (name, mark, figure) in figures {
            let name = if lines.len() > 1 { format!("{line}, {name}") } else { (*name).to_owned() };
            let rows = rows.iter().filter(|row| place(row).0 == *line);
            let points = rows.map(|row| (place(row).1, figure(row))).collect();
            series.push(Series { name, mark: mark.clone(), points });
        }
    }
    Panel { title: title.into(), x_label: x_label.into(), series }
}

/// Percentiles of a time in milliseconds, as three columns of a table.
pub fn times(times: Percentiles) -> String {
    let Percentiles { p50, p90, p99 } = times;
    format!("{:>8} {:>8} {:>8}", milliseconds(p50), milliseconds(p90), milliseconds(p99))
}

/// A number with this many decimals, or a dash if nothing was measured.
pub fn number(value: f64, decimals: usize) -> String {
    if value.is_finite() { format!("{value:.decimals$}") } else { "-".into() }
}

/// Four digits, or a dash if nothing was measured.
pub fn milliseconds(value: f64) -> String {
    match value {
        v if v < 10.0 => number(v, 3),
        v if v < 100.0 => number(v, 2),
        v => number(v, 1),
    }
}

fn percent(share: f64, limit: Limit) -> String {
    if share.is_finite() { format!("{:.1} {}", 100.0 * share, &limit.by[..1]) } else { "-".into() }
}
