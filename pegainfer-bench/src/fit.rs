//! `pegainfer fit`: says whether a model fits a card, with how much context, and how fast it runs.
//!
//! Memory comes from the functions that loading uses. [`speed`](mod@speed): times from a built-in ledger, or limits from
//! rates.

mod speed;

use super::bench::args::parse_positive;
use super::bench::peaks::Peaks;
use super::bench::roofline;
use super::cards::{self, CARDS, Card};
use crate::defaults::Defaults;
use anyhow::{Context, Result, bail};
use clap::{Args, Parser};
use pegainfer_kernels::cuda;
use pegainfer_models::args::{EngineArgs, FormatArgs, KvCacheDType, QuantizationArg};
use pegainfer_models::model_path::ModelDir;
use pegainfer_models::{engine, model_path};
use pegainfer_runtime::GpuFit;
use pegainfer_terminal::stdout::print;
use pegainfer_terminal::values::parse_bytes;
use speed::{PROMPTS, Rates, Speed};
use std::num::NonZeroUsize;

/// Bytes of the plain read that measures the memory of a CPU.
const READ_BYTES: u64 = 1 << 30;

/// Flags of `fit`.
#[derive(Debug, Clone, Args)]
pub struct FitArgs {
    /// Checkpoint directory (config.json is enough), GGUF file, or Hugging Face id, of which only small files are
    /// downloaded unless it names a GGUF file
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Card, such as h200, 4090 or "RTX 6000 Ada" [default: the GPU of this machine, or its CPU]
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Memory of the card, such as 24G. Without --gpu, the speed is that of each known card of this size
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub gpu_memory: Option<u64>,
    /// Number of such cards that share the model
    #[arg(long, alias = "tp", value_name = "N", default_value = "1")]
    pub tensor_parallel_size: NonZeroUsize,
    /// Context length in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<NonZeroUsize>,
    /// Maximum number of sequences that run at the same time [default: as for the server]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<NonZeroUsize>,
    /// Formats of weights and KV cache.
    #[command(flatten)]
    pub formats: FormatArgs,
    /// Memory bandwidth of a card that is not known, in GB/s
    #[arg(long, value_name = "GB/S", value_parser = parse_positive)]
    pub read_gbs: Option<f64>,
    /// bf16 rate of a card that is not known, in TFLOP/s
    #[arg(long, value_name = "TFLOP/S", value_parser = parse_positive)]
    pub peak_tflops: Option<f64>,
}

/// A device that a model may run on.
struct Target {
    name: String,
    /// Memory of a GPU in bytes; `None` for this machine's CPU.
    gpu_memory: Option<u64>,
    /// Names and rates of the devices with this memory.
    rates: Vec<Rates>,
}

/// Runs the command. A model that does not fit is an error that says what would.
pub fn run(args: &FitArgs) -> Result<()> {
    let model = model_path::resolve_config(Some(&args.model))?;
    let target = target(args)?;
    let fit = match (fit(&model, args, target.gpu_memory, &args.formats), target.gpu_memory) {
        (Ok(fit), None) if fit.used() > fit.total => {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            bail!("{} takes {:.1} GB, and {} has {:.1} GB free", args.model, gb(fit.used()), target.name, gb(fit.total))
        }
        (Ok(fit), _) => fit,
        (Err(error), Some(memory)) => {
            bail!("{} does not fit {}: {error:#}{}", args.model, target.name, alternatives(&model, args, memory))
        }
        (Err(error), None) => return Err(error),
    };
    print(&format!("{} fits {}\n\n{fit}\n{}", args.model, target.name, requests(&fit)))?;
    let ranks = args.tensor_parallel_size.get();
    // Several cards of one size are compared at one length.
    let mut prompts = if target.rates.len() > 1 { vec![PROMPTS[0].min(fit.context)] } else { PROMPTS.to_vec() };
    if target.rates.len() == 1 && !prompts.contains(&fit.context) {
        prompts.push(fit.context);
    }
    prompts.sort_unstable();
    for rates in &target.rates {
        let speed = Speed::new((&model, &args.formats), (ranks, rates), &fit, &prompts)?;
        print(&speed.to_string())?;
    }
    if target.rates.is_empty() {
        let known: Vec<_> = CARDS.iter().map(|card| card.name).collect();
        let known = known.join(", ");
        print(&format!("\nspeed: unknown; give --read-gbs and --peak-tflops, or --gpu with one of {known}\n"))?;
    }
    Ok(())
}

/// Lengths and numbers of requests that the KV cache holds.
fn requests(fit: &GpuFit) -> String {
    let short = 4096.min(fit.context);
    let at_once = (fit.kv_tokens / short.max(1)).min(fit.sequences);
    format!("context: one request of up to {} tokens, or {at_once} at once of {short} tokens\n", fit.context)
}

/// The device that the flags name, or this machine's.
fn target(args: &FitArgs) -> Result<Target> {
    let given = Peaks::given_or_datasheet(args.read_gbs, args.peak_tflops, "");
    let several = |name: &str| match args.tensor_parallel_size.get() {
        1 => name.to_owned(),
        ranks => format!("{ranks} x {name}"),
    };
    let own = |card: &Card| Rates {
        card: card.name.to_owned(),
        peaks: Peaks::given_or_datasheet(args.read_gbs, args.peak_tflops, card.name),
        source: "of the datasheet",
    };
    if let Some(name) = &args.gpu {
        let Some(card) = cards::named(name) else {
            let known: Vec<_> = CARDS.iter().map(|card| card.name).collect();
            bail!("--gpu {name} is not known: give --gpu-memory, or one of {}", known.join(", "));
        };
        let memory = args.gpu_memory.unwrap_or(card.memory());
        return Ok(Target { name: several(card.name), gpu_memory: Some(memory), rates: vec![own(card)] });
    }
    if let Some(memory) = args.gpu_memory {
        let name = several(&format!("a GPU of {:.1} GB", memory as f64 / 1e9));
        let rates = match given.flop_s.zip(given.read_bytes_s) {
            Some(_) => vec![Rates { card: name.clone(), peaks: given, source: "as given" }],
            None => cards::of_size(memory).map(own).collect(),
        };
        return Ok(Target { name, gpu_memory: Some(memory), rates });
    }
    match cuda::available() {
        Ok(_) => {
            let gpu = cuda::open(0, Some(1))?.gpu()?.info()?;
            let rates = cards::of_device(&gpu.name).map(own);
            Ok(Target {
                name: several(&gpu.name),
                gpu_memory: Some(gpu.memory as u64),
                rates: rates.into_iter().collect(),
            })
        }
        Err(_) => cpu(given),
    }
}

/// This machine's CPU, with measured rates unless these are given.
fn cpu(given: Peaks) -> Result<Target> {
    let (peaks, source) = match given.flop_s.zip(given.read_bytes_s) {
        Some(_) => (given, "as given"),
        None => (roofline::cpu_peaks(READ_BYTES).context("the rates of the CPU cannot be measured")?, "measured now"),
    };
    let name = "the CPU of this machine".to_owned();
    Ok(Target { rates: vec![Rates { card: "CPU".to_owned(), peaks, source }], name, gpu_memory: None })
}

/// Memory use with these formats.
fn fit(model: &ModelDir, args: &FitArgs, gpu: Option<u64>, formats: &FormatArgs) -> Result<GpuFit> {
    let engine = EngineArgs {
        formats: formats.clone(),
        tensor_parallel_size: Some(args.tensor_parallel_size),
        max_model_len: args.max_model_len,
        max_num_seqs: args.max_num_seqs,
        ..Defaults::try_parse_from(["fit"])?.engine
    };
    match gpu {
        Some(bytes) => engine::gpu_fit(&model.dir, &engine, bytes),
        None => engine::cpu_fit(&model.dir, &engine),
    }
}

/// Formats and cards with which the model would fit, as the end of a sentence.
fn alternatives(model: &ModelDir, args: &FitArgs, memory: u64) -> String {
    let mut fitting = Vec::new();
    for (name, format) in [("fp8", QuantizationArg::Fp8), ("int4", QuantizationArg::Int4)] {
        let formats = FormatArgs { quantization: Some(format), ..args.formats.clone() };
        if args.formats.quantization.is_none() && fit(model, args, Some(memory), &formats).is_ok() {
            fitting.push(format!("--quantization {name}"));
        }
    }
    let kv = FormatArgs { kv_cache_dtype: KvCacheDType::Fp8, ..args.formats.clone() };
    if fitting.is_empty() && fit(model, args, Some(memory), &kv).is_ok() {
        fitting.push("--kv-cache-dtype fp8".to_owned());
    }
    let mut larger: Vec<&Card> = CARDS.iter().filter(|card| card.memory() > memory).collect();
    larger.sort_by_key(|card| card.mib);
    let card = larger.into_iter().find(|card| fit(model, args, Some(card.memory()), &args.formats).is_ok());
    fitting.extend(card.map(|card| format!("a card of {:.0} GB such as {}", card.memory() as f64 / 1e9, card.name)));
    if fitting.is_empty() { String::new() } else { format!("; it fits with {}", fitting.join(", or ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::model_dir;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        fit: FitArgs,
    }

    fn args(flags: &[&str]) -> FitArgs {
        let model = model_dir().display().to_string();
        Flags::parse_from(["fit", &model].iter().chain(flags)).fit
    }

    #[test]
    fn a_card_has_its_memory_and_a_size_has_its_cards() {
        let named = target(&args(&["--gpu", "4090"])).unwrap();
        assert_eq!((named.name.as_str(), named.gpu_memory), ("RTX 4090", Some(24_564 << 20)));
        let sized = target(&args(&["--gpu-memory", "24G", "--tensor-parallel-size", "2"])).unwrap();
        assert_eq!(sized.name, "2 x a GPU of 25.8 GB");
        assert!(sized.rates.iter().any(|rates| rates.card == "L4"));
        let given = target(&args(&["--gpu-memory", "1G", "--read-gbs", "100", "--peak-tflops", "2"])).unwrap();
        assert_eq!(given.rates[0].peaks, Peaks { read_bytes_s: Some(100e9), flop_s: Some(2e12) });
        let error = target(&args(&["--gpu", "tpu"])).err().unwrap().to_string();
        assert!(error.starts_with("--gpu tpu is not known: give --gpu-memory, or one of B200, "), "{error}");
    }

    #[test]
    fn a_model_that_does_not_fit_names_what_would() {
        let (args, memory) = (args(&[]), 480_000_000);
        let model = model_path::resolve_config(Some(&args.model)).unwrap();
        assert!(fit(&model, &args, Some(memory), &args.formats).is_err());
        let text = alternatives(&model, &args, memory);
        assert!(text.ends_with("a card of 13 GB such as RTX 3060"), "{text}");
    }

    #[test]
    fn the_cpu_holds_the_bundled_model() {
        let args = args(&[]);
        let model = model_path::resolve_config(Some(&args.model)).unwrap();
        let fit = fit(&model, &args, None, &args.formats).unwrap();
        assert_eq!((fit.cuda, fit.utilization, fit.context), (0, 1.0, 4096));
        assert!(fit.weights > 18_000_000 && fit.used() < fit.total, "{fit:?}");
        let text = fit.to_string();
        assert!(!text.contains("CUDA") && text.lines().last().unwrap().ends_with(" GB"), "{text}");
        assert!(requests(&fit).starts_with("context: one request of up to 4096 tokens, or "), "{}", requests(&fit));
    }
}
