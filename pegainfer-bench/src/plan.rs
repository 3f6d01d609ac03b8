//! `pegainfer plan`: prints the recorded ops of one step.
//!
//! [`table`](mod@table) prints them, [`times`] adds a ledger's times. Instead of ops, [`capacity`] prints the memory of
//! GPUs, and [`load`] the least times of some requests.

mod capacity;
mod load;
mod table;
pub mod times;

use super::bench::args::parse_positive;
use super::bench::peaks::Peaks;
use super::ledger_origin::other_model;
use super::shipped::{self, ShippedArgs};
use crate::defaults::Defaults;
use anyhow::{Result, bail};
use capacity::Capacity;
use clap::{ArgGroup, Args, Parser, ValueEnum};
use load::{LoadArgs, LoadLimits};
use pegainfer_core::ledger::{Ledger, StepLoad};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_models::args::{EngineArgs, FormatArgs};
use pegainfer_models::model_path::ModelDir;
use pegainfer_models::{engine, model_path, speculative};
use pegainfer_terminal::stdout::{print, print_exact};
use pegainfer_terminal::values::{parse_bytes, parse_bytes_or_none, parse_gib};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use table::{json, table};
use times::Times;

/// Flags of `plan`.
#[derive(Debug, Clone, Args)]
#[command(group(ArgGroup::new("times").args(["ledger", "gpu", "model"]).multiple(true)))]
#[command(group(ArgGroup::new("timed").args(["ledger", "gpu", "model", "concurrency"]).multiple(true)))]
pub struct PlanArgs {
    /// Checkpoint directory (config.json is enough), or a Hugging Face id [default: the ledger's model, or qwen3-tiny,
    /// which is inside the executable]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Kind of step: one new token per sequence, or whole prompts
    #[arg(long, value_enum, default_value_t = Phase::Decode)]
    pub phase: Phase,
    /// Number of sequences in the step
    #[arg(long, value_name = "N", default_value = "1")]
    pub batch: NonZeroUsize,
    /// Context length of each sequence in tokens, including the new ones
    #[arg(long, value_name = "TOKENS", default_value = "1024")]
    pub context: NonZeroUsize,
    /// Plan one of N ranks, with its messages to the others; with --gpu-memory, N GPUs that share the model
    #[arg(long, alias = "tp", value_name = "N", default_value = "1", conflicts_with = "times")]
    pub tensor_parallel_size: NonZeroUsize,
    /// With --gpu-memory, engines that each have GPUs, a copy of the weights and a KV cache of their own; the ops are
    /// those of one engine
    #[arg(long, alias = "dp", value_name = "N", default_value = "1")]
    pub data_parallel_size: NonZeroUsize,
    /// Formats of weights and KV cache.
    #[command(flatten)]
    pub formats: FormatArgs,
    /// Requests instead of a step.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Print what fits a GPU with this much memory, such as 24G: sequences, KV cache, tokens of a step
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with_all = ["json", "times"])]
    pub gpu_memory: Option<u64>,
    /// With --gpu-memory: maximum number of sequences that run at the same time
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<NonZeroUsize>,
    /// With --gpu-memory: token budget of one engine step
    #[arg(long, value_name = "TOKENS")]
    pub max_num_batched_tokens: Option<NonZeroUsize>,
    /// With --gpu-memory: memory for snapshots of state; 0 switches the prefix cache of Qwen3.5 off
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes_or_none)]
    pub state_cache_memory: Option<u64>,
    /// With --gpu-memory: host memory for copies of KV blocks, in GiB or with a unit, as for the server
    #[arg(long, value_name = "GIB", value_parser = parse_gib)]
    pub kv_offloading_size: Option<u64>,
    /// With --gpu-memory: speculative decoding, as for the server
    #[arg(long, value_name = "JSON", value_parser = speculative::parse)]
    pub speculative_config: Option<Speculation>,
    /// Add the times of this ledger, next to the least that the device needs
    #[arg(long, value_name = "LEDGER")]
    pub ledger: Option<PathBuf>,
    /// Times of a ledger inside the executable.
    #[command(flatten)]
    pub shipped: ShippedArgs,
    /// Memory bandwidth for the least time, in GB/s [default: the datasheet's]
    #[arg(long, value_name = "GB/S", value_parser = parse_positive, requires = "timed")]
    pub read_gbs: Option<f64>,
    /// bf16 rate for the least time, in TFLOP/s [default: the datasheet's]
    #[arg(long, value_name = "TFLOP/S", value_parser = parse_positive, requires = "timed")]
    pub peak_tflops: Option<f64>,
    /// Print every op as JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Kind of the planned step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Phase {
    /// Only the last token of each sequence is new.
    Decode,
    /// All tokens of each sequence are new.
    Prefill,
}

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<()> {
    let given = args.ledger.is_some() || args.shipped.is_given();
    let ledger = given.then(|| shipped::read(args.ledger.as_deref(), &args.shipped)).transpose()?;
    let model = model(args, ledger.as_ref())?;
    if let Some(bytes) = args.gpu_memory {
        let engine = EngineArgs {
            formats: args.formats.clone(),
            tensor_parallel_size: Some(args.tensor_parallel_size),
            max_num_seqs: args.max_num_seqs,
            max_num_batched_tokens: args.max_num_batched_tokens,
            state_cache_memory: args.state_cache_memory,
            speculative_config: args.speculative_config.clone(),
            ..Defaults::try_parse_from(["plan"])?.engine
        };
        let gpu = engine::gpu_fit(&model.dir, &engine, bytes)?;
        let (ranks, engines) = (args.tensor_parallel_size.get(), args.data_parallel_size.get());
        return print(&Capacity { gpu, ranks, engines, host: args.kv_offloading_size }.to_string());
    }
    let ranks = ledger.as_ref().map_or(args.tensor_parallel_size.get(), |ledger| ledger.header.ranks);
    let overrides = args.formats.overrides();
    let record = |step| engine::record_rank(&model.dir, &overrides, ranks, step);
    let device = ledger.as_ref().map_or("", |ledger| &ledger.header.device);
    let peaks = Peaks::given_or_datasheet(args.read_gbs, args.peak_tflops, device);
    if let Some(limits) = LoadLimits::new(&args.load, args.data_parallel_size.get(), peaks, record)? {
        return match args.json {
            true => print_exact(&format!("{:#}\n", serde_json::to_value(limits)?)),
            false => print(&limits.to_string()),
        };
    }
    let (batch, context) = (args.batch.get(), args.context.get());
    let tokens = match args.phase {
        Phase::Decode => 1,
        Phase::Prefill => context,
    };
    let records = record((batch, tokens, context))?;
    let load = StepLoad::of_rows(vec![(tokens, context); batch]);
    // A hub model is named by its id, because its directory is in the cache.
    let source = model.hub_id.clone().unwrap_or_else(|| model.to_string());
    let times = ledger.map(|ledger| times(&ledger, args, &source, peaks, (&load, &records))).transpose()?;
    if args.json {
        let mut plan = json(&records);
        if let Some(times) = times {
            plan["times"] = serde_json::to_value(times)?;
        }
        print_exact(&format!("{plan:#}\n"))
    } else {
        print(&format!("{}{}", table(&records), times.map(|times| times.to_string()).unwrap_or_default()))
    }
}

/// The model to plan: from `--model-path`, or the ledger's.
fn model(args: &PlanArgs, ledger: Option<&Ledger>) -> Result<ModelDir> {
    match ledger.and_then(|ledger| Some((ledger.config.as_ref()?, &ledger.header.model))) {
        Some((config, name)) if args.model_path.is_none() => model_path::from_config(config, name),
        _ => model_path::resolve_config(args.model_path.as_deref()),
    }
}

/// The ledger's times for a step.
fn times(
    ledger: &Ledger,
    args: &PlanArgs,
    source: &str,
    peaks: Peaks,
    (load, records): (&StepLoad, &[OpRecord]),
) -> Result<Times> {
    let engine = EngineArgs { formats: args.formats.clone(), ..Defaults::try_parse_from(["plan"])?.engine };
    let kv_cache_dtype = engine.overrides().kv_dtype.name();
    if let Some(other) = other_model(&ledger.header, source, &engine, kv_cache_dtype) {
        bail!("the ledger was measured with {other}: give the --model-path and the formats that it was measured with");
    }
    Ok(Times::new(ledger, load, records, peaks)?)
}

#[cfg(test)]
mod tests {
    use super::table::totals;
    use super::*;
    use pegainfer_core::record::Operand;
    use pegainfer_core::tensor::DType;
    use pegainfer_kernels::ops::KvDType;
    use pegainfer_runtime::{AtLoad, Overrides};
    use pegainfer_testing::model_dir;
    use serde_json::Value;
    use std::collections::{HashMap, HashSet};

    /// Bytes that a decode step of the bundled model moves, and elements of its read-only matrices by data type.
    fn decode(overrides: &Overrides) -> (u64, HashMap<DType, usize>) {
        let records = engine::record(&model_dir(), overrides, 3, 1, 100).unwrap();
        let written: HashSet<u32> = records.iter().flat_map(|r| &r.writes).map(|o| o.id).collect();
        let inputs: HashMap<u32, &Operand> = records.iter().flat_map(|r| &r.reads).map(|o| (o.id, o)).collect();
        let mut elements = HashMap::new();
        for operand in inputs.into_values().filter(|o| !written.contains(&o.id) && o.shape.len() == 2) {
            *elements.entry(operand.dtype).or_default() += operand.shape.iter().product::<usize>();
        }
        (totals(&records).0, elements)
    }

    #[test]
    fn fp8_weights_are_a_byte_and_their_scales() {
        let config: Value =
            serde_json::from_str(&std::fs::read_to_string(model_dir().join("config.json")).unwrap()).unwrap();
        let number = |field: &str| config[field].as_u64().unwrap() as usize;
        let (hidden, inner, layers) = (number("hidden_size"), number("intermediate_size"), number("num_hidden_layers"));
        let q = number("num_attention_heads") * number("head_dim");
        let kv = number("num_key_value_heads") * number("head_dim");
        let projections =
            [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inner, hidden), (inner, hidden), (hidden, inner)];
        let blocks = |n: usize| n.div_ceil(128);
        let elements: usize = layers * projections.iter().map(|(rows, cols)| rows * cols).sum::<usize>();
        let scales: usize =
            layers * projections.iter().map(|(rows, cols)| blocks(*rows) * blocks(*cols)).sum::<usize>();
        let fp8 = Overrides { quantization: Some(AtLoad::Fp8), ..Overrides::default() };
        let ((bf16_bytes, bf16), (fp8_bytes, fp8)) = (decode(&Overrides::default()), decode(&fp8));
        assert_eq!(
            (bf16.get(&DType::U8), fp8[&DType::U8], fp8[&DType::F32] - bf16[&DType::F32]),
            (None, elements, scales),
            "{bf16:?} {fp8:?}"
        );
        assert_eq!(bf16[&DType::Bf16] - fp8[&DType::Bf16], elements, "{bf16:?} {fp8:?}");
        assert_eq!(bf16_bytes - fp8_bytes, (2 * elements - (elements + 4 * scales)) as u64);
    }

    #[test]
    fn the_logits_of_a_step_are_one_gemm_as_on_a_gpu() {
        let rows = |batch: usize| -> Vec<usize> {
            let records = engine::record(&model_dir(), &Overrides::default(), batch, 1, 8).unwrap();
            let sampled = records.iter().filter(|record| record.op == "sample");
            sampled.map(|record| record.reads[0].shape[0]).collect()
        };
        assert_eq!((rows(32), rows(256), rows(300)), (vec![32], vec![256], vec![256, 44]));
    }

    #[test]
    fn fp8_kv_is_a_byte_and_its_scales() {
        let fp8 = Overrides { kv_dtype: KvDType::Fp8, ..Overrides::default() };
        let (bf16, fp8) = (decode(&Overrides::default()).0, decode(&fp8).0);
        // Keys and values of six layers and two heads of 128 elements: three sequences read 100 tokens each and write
        // one.
        let entries = 3 * (100 + 1) * 6 * 2 * 2;
        assert_eq!(bf16 - fp8, entries * (2 * 128 - (128 + 4)));
    }

    #[test]
    fn a_gpu_that_is_not_here_is_planned() {
        let engine = Defaults::try_parse_from(["plan"]).unwrap().engine;
        let fit = engine::gpu_fit(&model_dir(), &engine, 16_000_000_000).unwrap();
        // 256 sequences of 4,096 tokens. A larger KV cache would be useless.
        assert_eq!((fit.sequences, fit.kv_tokens, fit.context), (256, 256 * 4096, 4096));
        let text = fit.to_string();
        assert!(text.contains("1048576 tokens, 256 sequences at once") && text.contains("of 16.00 GB x 0.9"), "{text}");
        let error = engine::gpu_fit(&model_dir(), &engine, 600_000_000).unwrap_err().to_string();
        assert!(error.contains("does not fit the GPU"), "{error}");
    }

    #[test]
    fn flags_name_the_formats() {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            plan: PlanArgs,
        }
        let plan = |flags: &[&str]| Flags::parse_from(["plan"].iter().chain(flags)).plan.formats.overrides();
        let both = plan(&["--quantization", "fp8", "--kv-cache-dtype", "fp8"]);
        assert!(both.quantization == Some(AtLoad::Fp8) && both.kv_dtype == KvDType::Fp8);
        let none = plan(&[]);
        assert!(none.quantization.is_none() && none.kv_dtype == KvDType::Bf16);
    }

    #[cfg(feature = "deepseek-v4")]
    #[test]
    fn formats_of_other_models_are_refused() {
        let dir = model_dir().with_file_name("dsv4-tiny-fp4fp8");
        let fp8 = Overrides { quantization: Some(AtLoad::Fp8), ..Overrides::default() };
        let error = engine::record(&dir, &fp8, 1, 1, 8).unwrap_err().to_string();
        assert!(error.starts_with("--quantization: DeepSeek-V4 takes"), "{error}");
        let kv = Overrides { kv_dtype: KvDType::Fp8, ..Overrides::default() };
        assert!(engine::record(&dir, &kv, 1, 1, 8).unwrap_err().to_string().starts_with("--kv-cache-dtype"));
        assert!(engine::record(&dir, &Overrides::default(), 1, 1, 8).is_ok());
    }
}
