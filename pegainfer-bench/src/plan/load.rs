//! The least times of a load on a device: what memory bandwidth and arithmetic allow, without a run.

use crate::bench::limits::{Limit, Limits, Load, Work};
use crate::bench::peaks::Peaks;
use anyhow::{Result, bail};
use clap::Args;
use pegainfer_core::record::OpRecord;
use serde::Serialize;
use std::fmt;
use std::num::NonZeroUsize;

/// Flags of a load.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Print the least TTFT and TPOT and the highest rate of so many requests at a time, instead of the ops of a step
    #[arg(long, value_name = "N", requires_all = ["prompt_len", "output_len"])]
    #[arg(conflicts_with_all = ["phase", "batch", "context", "gpu_memory"])]
    pub concurrency: Option<NonZeroUsize>,
    /// With --concurrency: tokens of each prompt
    #[arg(long, value_name = "TOKENS", requires = "concurrency")]
    pub prompt_len: Option<NonZeroUsize>,
    /// With --concurrency: generated tokens of each request
    #[arg(long, value_name = "TOKENS", requires = "concurrency")]
    pub output_len: Option<NonZeroUsize>,
}

/// The limits of a load.
#[derive(Debug, Serialize)]
pub struct LoadLimits {
    concurrency: usize,
    prompt_len: usize,
    output_len: usize,
    read_bytes_s: f64,
    peak_flop_s: f64,
    limits: Limits,
}

impl LoadLimits {
    /// The limits of the load that the flags give, if they give one. `record` has the ops of a step: sequences, new
    /// tokens of each, context length of each.
    pub fn new(
        args: &LoadArgs,
        engines: usize,
        peaks: Peaks,
        mut record: impl FnMut((usize, usize, usize)) -> Result<Vec<OpRecord>>,
    ) -> Result<Option<Self>> {
        let LoadArgs { concurrency: Some(concurrency), prompt_len: Some(prompt), output_len: Some(output) } = args
        else {
            return Ok(None);
        };
        let (Some(read_bytes_s), Some(peak_flop_s)) = (peaks.read_bytes_s, peaks.flop_s) else {
            bail!("the peak rates of the device are not known: give --read-gbs and --peak-tflops");
        };
        let (concurrency, prompt_len, output_len) = (concurrency.get(), prompt.get(), output.get());
        let load = Load { sequences: concurrency, engines, output_len };
        // The mean context of a request that decodes.
        let context = prompt_len + output_len.div_ceil(2);
        let mut work = |step| anyhow::Ok(Work::of(&record(step)?));
        let (decode, prefill) = (work((load.batch(), 1, context))?, work((1, prompt_len, prompt_len))?);
        let limits = Limits::new(load, decode, prefill, peaks);
        Ok(Some(Self { concurrency, prompt_len, output_len, read_bytes_s, peak_flop_s, limits }))
    }
}

impl fmt::Display for LoadLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { concurrency, prompt_len, output_len, read_bytes_s, peak_flop_s, limits } = self;
        let plural = if *concurrency == 1 { "request" } else { "requests" };
        writeln!(f, "{concurrency} {plural} at a time, {prompt_len} / {output_len} tokens")?;
        writeln!(f, "memory {:.0} GB/s, compute {:.0} TFLOP/s\n", read_bytes_s / 1e9, peak_flop_s / 1e12)?;
        let rows: [(&str, Limit); 4] = [
            ("TTFT, ms: the prompt alone", limits.ttft_ms),
            ("TPOT, ms: a decode step alone", limits.decode_ms),
            ("TPOT, ms: all decode, with their prompts", limits.tpot_ms),
            ("most output tokens per second", limits.output_tok_s),
        ];
        for (name, Limit { value, by }) in rows {
            let digits = if value < 1000.0 { 3 } else { 0 };
            writeln!(f, "{name:<40} {value:>10.digits$}  {by}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanArgs;
    use clap::Parser;
    use pegainfer_models::engine;
    use pegainfer_runtime::Overrides;
    use pegainfer_testing::model_dir;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        plan: PlanArgs,
    }

    fn limits(flags: &[&str], peaks: Peaks) -> Result<Option<LoadLimits>> {
        let args = Flags::try_parse_from(["plan"].iter().chain(flags))?.plan.load;
        LoadLimits::new(&args, 1, peaks, |step| engine::record_rank(&model_dir(), &Overrides::default(), 1, step))
    }

    #[test]
    fn a_load_has_the_work_of_its_steps() {
        let peaks = Peaks { read_bytes_s: Some(1e18), flop_s: Some(1e12) };
        let load = ["--concurrency", "32", "--prompt-len", "200", "--output-len", "32"];
        let limits = limits(&load, peaks).unwrap().unwrap();
        let flops = |batch, tokens, context| -> f64 {
            let records = engine::record(&model_dir(), &Overrides::default(), batch, tokens, context).unwrap();
            records.iter().map(|record| record.flops as f64).sum()
        };
        let (decode, prompt) = (flops(32, 1, 216), flops(1, 200, 200));
        // 31 other prompts in 31 steps.
        let expected = (decode + prompt) / 1e12 * 1e3;
        assert!((limits.limits.tpot_ms.value / expected - 1.0).abs() < 1e-9, "{limits:?}");
        assert_eq!(limits.limits.ttft_ms.value, prompt / 1e12 * 1e3);
        let text = limits.to_string();
        assert!(text.starts_with("32 requests at a time, 200 / 32 tokens\n") && text.lines().count() == 7, "{text}");
    }

    #[test]
    fn a_load_needs_its_lengths_and_rates() {
        let load = ["--concurrency", "2", "--prompt-len", "20", "--output-len", "2"];
        let error = limits(&load, Peaks::default()).unwrap_err().to_string();
        assert_eq!(error, "the peak rates of the device are not known: give --read-gbs and --peak-tflops");
        assert!(limits(&load[..4], Peaks::default()).is_err());
        assert!(limits(&[&load[..], &["--batch", "3"]].concat(), Peaks::default()).is_err());
        assert!(limits(&[], Peaks::default()).unwrap().is_none());
    }
}
