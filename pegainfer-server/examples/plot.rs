//! Draws README's plot: TPOT and throughput over concurrency, with a line for each server, for light and for dark
//! backgrounds.
//!
//!     cargo run --release --example plot -- docs/benchmarks/h200-qwen3-4b/comparison.jsonl docs/images
//!
//! Each line of the data file is one measurement: `server`, `concurrency`, `tpot_ms`, `output_tok_s`. The plots are
//! `comparison-light.svg` and `comparison-dark.svg` in the directory.

use anyhow::{Context, Result};
use clap::Parser;
use pegainfer_bench::bench::svg::{Ink, Mark, Panel, Series, render};
use serde::Deserialize;
use std::fs;
use std::path::PathBuf;

#[derive(Debug, Parser)]
struct Args {
    /// Measurements, one JSON object a line
    data: PathBuf,
    /// Directory of the plots
    out: PathBuf,
}

/// One line of the data file.
#[derive(Debug, Deserialize)]
struct Measurement {
    server: String,
    concurrency: f64,
    tpot_ms: f64,
    output_tok_s: f64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let text = fs::read_to_string(&args.data).with_context(|| format!("{} cannot be read", args.data.display()))?;
    let measurements = text.lines().map(serde_json::from_str).collect::<Result<Vec<Measurement>, _>>()?;
    let panels = [
        panel("TPOT p50, ms (lower is better)", &measurements, |m| m.tpot_ms),
        panel("output tokens per second (higher is better)", &measurements, |m| m.output_tok_s),
    ];
    let title = "Qwen3-4B in bf16 on one H200, prompts of 1,024 tokens and outputs of 128, over HTTP";
    for (name, ink) in [("light", Ink::Dark), ("dark", Ink::Light)] {
        let path = args.out.join(format!("comparison-{name}.svg"));
        let plot = render(title, "", &panels, ink)?;
        fs::write(&path, plot).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(())
}

/// A line for each server, in the order of the file.
fn panel(title: &str, measurements: &[Measurement], value: fn(&Measurement) -> f64) -> Panel {
    let mut series: Vec<Series> = Vec::new();
    for measurement in measurements {
        let point = (measurement.concurrency, value(measurement));
        match series.iter_mut().find(|line| line.name == measurement.server) {
            Some(line) => line.points.push(point),
            None => {
                series.push(Series { name: measurement.server.clone(), mark: Mark::Line, points: vec![point] });
            }
        }
    }
    Panel { title: title.into(), x_label: "concurrent requests".into(), series }
}
