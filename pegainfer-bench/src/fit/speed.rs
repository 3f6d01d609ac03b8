//! The speed of a model on a device: measured times of a built-in ledger, or what memory and arithmetic allow.

use crate::bench::peaks::Peaks;
use crate::bench::report::number;
use crate::defaults::Defaults;
use crate::ledger_origin::other_model;
use crate::roofline::Roofline;
use crate::shipped::{self, ShippedArgs};
use crate::stale;
use anyhow::Result;
use clap::Parser;
use pegainfer_core::ledger::{Law, Ledger, StepLoad};
use pegainfer_models::args::{EngineArgs, FormatArgs};
use pegainfer_models::model_path::ModelDir;
use pegainfer_runtime::GpuFit;
use std::fmt;

/// Prompt lengths in tokens.
pub const PROMPTS: [usize; 3] = [1024, 8192, 32_768];

/// Name and peak rates of a device.
#[derive(Debug, Clone)]
pub struct Rates {
    /// Name of the card.
    pub card: String,
    /// Its rates.
    pub peaks: Peaks,
    /// Source of the rates.
    pub source: &'static str,
}

/// Speed at some context lengths.
pub struct Speed {
    /// Source of the times, as a heading.
    heading: String,
    rows: Vec<Row>,
}

/// Speed of a number of requests at the same time.
struct Row {
    context: usize,
    requests: usize,
    /// Microseconds of a decode step; NaN if unknown.
    step_us: f64,
    /// Microseconds of the prefill of one prompt; NaN if unknown.
    prefill_us: f64,
}

impl Speed {
    /// The speed of a model with these formats on `ranks` devices with these rates, within the memory of `fit`, at the
    /// prompt lengths `prompts` that fit.
    pub fn new(
        (model, formats): (&ModelDir, &FormatArgs),
        (ranks, rates): (usize, &Rates),
        fit: &GpuFit,
        prompts: &[usize],
    ) -> Result<Self> {
        let Rates { card, peaks, source } = rates;
        let gpus = if ranks == 1 { card.clone() } else { format!("{card}x{ranks}") };
        let times = match measured(model, formats, &gpus)? {
            Some(ledger) => Times::Ledger(ledger.law()?, Box::new(ledger)),
            None => Times::Roofline(Roofline { model, overrides: formats.overrides(), ranks, peaks: *peaks }),
        };
        let heading = match &times {
            Times::Ledger(_, ledger) => match stale::warning(&ledger.header) {
                Some(warning) => format!("{gpus}: {warning}"),
                None => {
                    format!("{gpus}, measured on {}", ledger.header.measured.as_deref().unwrap_or("an unknown date"))
                }
            },
            Times::Roofline(_) => format!(
                "{gpus}, an estimate: at most this, by {} GB/s and {} TFLOP/s {source}; not measured with this model",
                rate(peaks.read_bytes_s, 1e9),
                rate(peaks.flop_s, 1e12)
            ),
        };
        let mut rows = Vec::new();
        for context in prompts.iter().copied().filter(|context| *context <= fit.context) {
            let most = (fit.kv_tokens / context.max(1)).min(fit.sequences).max(1);
            let prefill_us = times.prefill(context)?;
            for requests in [1, most].into_iter().take(if most > 1 { 2 } else { 1 }) {
                rows.push(Row { context, requests, step_us: times.step(requests, 1, context)?, prefill_us });
            }
        }
        Ok(Self { heading, rows })
    }
}

/// Source of step times.
enum Times<'a> {
    Ledger(Law, Box<Ledger>),
    Roofline(Roofline<'a>),
}

impl Times<'_> {
    /// Microseconds of a step of equal rows; NaN if unknown.
    fn step(&self, batch: usize, tokens: usize, context: usize) -> Result<f64> {
        match self {
            Self::Ledger(law, _) => {
                let time = law.time(&StepLoad::of_rows(vec![(tokens, context); batch]));
                Ok(if time.covered { time.us } else { f64::NAN })
            }
            Self::Roofline(roofline) => Ok(roofline.step_us(batch, tokens, context)?.unwrap_or(f64::NAN)),
        }
    }

    /// Microseconds of the prefill of a prompt, in chunks of the measured budget of a step.
    fn prefill(&self, tokens: usize) -> Result<f64> {
        let chunk = match self {
            Self::Ledger(_, ledger) => ledger.header.max_num_batched_tokens,
            Self::Roofline(_) => tokens,
        };
        let ends = (0..tokens).step_by(chunk.max(1)).map(|start| (start, (start + chunk).min(tokens)));
        ends.map(|(start, end)| self.step(1, end - start, end)).sum()
    }
}

/// A rate in units of `unit`, with two decimals if it is small.
fn rate(rate: Option<f64>, unit: f64) -> String {
    let rate = rate.map_or(f64::NAN, |rate| rate / unit);
    number(rate, if rate < 10.0 { 2 } else { 0 })
}

/// The built-in ledger of this model, with these formats, on these cards.
fn measured(model: &ModelDir, formats: &FormatArgs, gpus: &str) -> Result<Option<Ledger>> {
    let source = model.hub_id.clone().unwrap_or_else(|| model.to_string());
    let shipped = ShippedArgs { gpu: Some(gpus.to_owned()), model: Some(source.clone()) };
    let Ok(ledger) = shipped::read(None, &shipped) else { return Ok(None) };
    let engine = EngineArgs { formats: formats.clone(), ..Defaults::try_parse_from(["fit"])?.engine };
    let other = other_model(&ledger.header, &source, &engine, engine.overrides().kv_dtype.name());
    Ok(Some(ledger).filter(|_| other.is_none()))
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nspeed on {}", self.heading)?;
        writeln!(
            f,
            "{:>8} {:>9} {:>14} {:>14} {:>14}",
            "context", "requests", "tok/s of each", "tok/s of all", "first token, s"
        )?;
        for Row { context, requests, step_us, prefill_us } in &self.rows {
            let each = 1e6 / step_us;
            let (one, all) = (number(each, 1), number(each * *requests as f64, 1));
            writeln!(f, "{context:>8} {requests:>9} {one:>14} {all:>14} {:>14}", number(prefill_us / 1e6, 3))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_models::{engine, model_path};
    use pegainfer_testing::model_dir;

    #[test]
    fn an_estimate_is_the_work_of_a_step_over_the_rates() {
        let model = model_path::resolve_config(Some(&model_dir().display().to_string())).unwrap();
        let engine = Defaults::try_parse_from(["fit"]).unwrap().engine;
        let fit = engine::gpu_fit(&model.dir, &engine, 16_000_000_000).unwrap();
        let peaks = Peaks { read_bytes_s: Some(1e9), flop_s: Some(1e18) };
        let rates = Rates { card: "x".to_owned(), peaks, source: "as given" };
        let speed = Speed::new((&model, &engine.formats), (1, &rates), &fit, &[1024, 4096, 8192]).unwrap();
        let places: Vec<_> = speed.rows.iter().map(|row| (row.context, row.requests)).collect();
        assert_eq!(places, [(1024, 1), (1024, 256), (4096, 1), (4096, 256)]);
        let records = engine::record(&model.dir, &engine.overrides(), 1, 1, 1024).unwrap();
        let bytes: u64 = records.iter().map(|op| op.bytes).sum();
        assert_eq!(speed.rows[0].step_us, bytes as f64 / 1e9 * 1e6);
        let text = speed.to_string();
        assert!(
            text.contains("x, an estimate: at most this, by 1.00 GB/s and 1000000 TFLOP/s as given; not measured"),
            "{text}"
        );
        let rate = format!(" {:.1} ", 1e6 / speed.rows[0].step_us);
        assert!(text.contains(&rate), "{rate}: {text}");
    }

    #[test]
    fn a_ledger_of_the_card_gives_measured_times() {
        let ledger = shipped::read(None, &ShippedArgs { gpu: Some("h200".into()), model: Some("qwen3-4b".into()) });
        let ledger = ledger.unwrap();
        let config = ledger.config.as_ref().unwrap();
        let model = model_path::from_config(config, "Qwen/Qwen3-4B").unwrap();
        let engine = Defaults::try_parse_from(["fit"]).unwrap().engine;
        let card = crate::cards::named("h200").unwrap();
        let rates =
            Rates { card: card.name.to_owned(), peaks: Peaks::from_datasheet(card.name), source: "of the datasheet" };
        let fit = engine::gpu_fit(&model.dir, &engine, card.memory()).unwrap();
        let speed = Speed::new((&model, &engine.formats), (1, &rates), &fit, &[1024, 4096, 8192]).unwrap();
        assert!(speed.heading.starts_with("H200") && speed.heading.contains("measured on 2026-"), "{}", speed.heading);
        let expected = ledger.law().unwrap().time(&StepLoad::of_rows([(1, 1024)])).us;
        assert_eq!((speed.rows[0].requests, speed.rows[0].step_us), (1, expected));
        // Other formats were not measured.
        let fp8 = FormatArgs { quantization: Some(pegainfer_models::args::QuantizationArg::Fp8), ..engine.formats };
        assert!(
            Speed::new((&model, &fp8), (1, &rates), &fit, &PROMPTS).unwrap().heading.starts_with("H200, an estimate")
        );
    }
}
