//! `pegainfer plan`: the recorded ops of one step, printed.

pub mod times;

use super::bench::args::parse_positive;
use super::bench::roofline::Peaks;
use super::shipped::{self, ShippedArgs};
use super::watch::other_model;
use crate::models::args::{EngineArgs, FormatArgs};
use crate::models::model_path::ModelDir;
use crate::models::{engine, model_path};
use crate::values::parse_bytes;
use anyhow::{Result, bail};
use clap::{ArgGroup, Args, Parser, ValueEnum};
use pegainfer_core::ledger::{Ledger, StepLoad};
use pegainfer_core::record::{OpRecord, Operand};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use times::Times;

/// Flags of `plan`.
#[derive(Debug, Clone, Args)]
#[command(group(ArgGroup::new("times").args(["ledger", "gpu", "model"]).multiple(true)))]
pub struct PlanArgs {
    /// Checkpoint directory (config.json is enough), or a Hugging Face id [default: the ledger's model, or qwen3-tiny, which
    /// is inside the executable]
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
    /// Plan one rank of N that share the model on GPUs, with what it sends to the others. DeepSeek-V4 only
    #[arg(long, alias = "tp", value_name = "N", default_value = "1", conflicts_with_all = ["gpu_memory", "times"])]
    pub tensor_parallel_size: NonZeroUsize,
    /// Formats of weights and KV cache.
    #[command(flatten)]
    pub formats: FormatArgs,
    /// Print instead what the server would make of a GPU with this much memory, such as 24G: sequences, KV cache, tokens of a step
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with_all = ["json", "times"])]
    pub gpu_memory: Option<u64>,
    /// Add the times of this ledger, beside the least that the device needs
    #[arg(long, value_name = "LEDGER")]
    pub ledger: Option<PathBuf>,
    /// Times of a ledger inside the executable.
    #[command(flatten)]
    pub shipped: ShippedArgs,
    /// Memory bandwidth for the least time, in GB/s [default: the datasheet's]
    #[arg(long, value_name = "GB/S", value_parser = parse_positive, requires = "times")]
    pub read_gbs: Option<f64>,
    /// bf16 rate for the least time, in TFLOP/s [default: the datasheet's]
    #[arg(long, value_name = "TFLOP/S", value_parser = parse_positive, requires = "times")]
    pub peak_tflops: Option<f64>,
    /// Print every op as JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// The engine's flags, for their defaults.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    engine: EngineArgs,
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
        let engine = EngineArgs { formats: args.formats.clone(), ..Defaults::try_parse_from(["plan"])?.engine };
        print!("{}", engine::gpu_fit(&model.dir, &engine, bytes)?);
        return Ok(());
    }
    let (batch, context) = (args.batch.get(), args.context.get());
    let tokens = match args.phase {
        Phase::Decode => 1,
        Phase::Prefill => context,
    };
    let ranks = ledger.as_ref().map_or(args.tensor_parallel_size.get(), |ledger| ledger.header.ranks);
    let overrides = args.formats.overrides();
    let records = engine::record_rank(&model.dir, &overrides, ranks, (batch, tokens, context))?;
    let load = StepLoad::of_rows(vec![(tokens, context); batch]);
    // A model of the hub is named by its id: its directory is one of the cache.
    let source = model.hub_id.clone().unwrap_or_else(|| model.to_string());
    let times = ledger.map(|ledger| times(&ledger, args, &source, &load, &records)).transpose()?;
    if args.json {
        let mut plan = json(&records);
        if let Some(times) = times {
            plan["times"] = serde_json::to_value(times)?;
        }
        println!("{plan:#}");
    } else {
        print!("{}{}", table(&records), times.map(|times| times.to_string()).unwrap_or_default());
    }
    Ok(())
}

/// The model that is planned: that of `--model-path`, or else that of the ledger.
fn model(args: &PlanArgs, ledger: Option<&Ledger>) -> Result<ModelDir> {
    match ledger.and_then(|ledger| Some((ledger.config.as_ref()?, &ledger.header.model))) {
        Some((config, name)) if args.model_path.is_none() => model_path::of_config(config, name),
        _ => model_path::resolve_config(args.model_path.as_deref()),
    }
}

/// The times that the ledger has for a step.
fn times(ledger: &Ledger, args: &PlanArgs, source: &str, load: &StepLoad, records: &[OpRecord]) -> Result<Times> {
    let engine = EngineArgs { formats: args.formats.clone(), ..Defaults::try_parse_from(["plan"])?.engine };
    let kv_cache_dtype = engine.overrides().kv_dtype.name();
    if let Some(other) = other_model(&ledger.header, source, &engine, kv_cache_dtype) {
        bail!("the ledger was measured with {other}: give the --model-path and the formats that it was measured with");
    }
    let peaks = Peaks::given_or_of_device(args.read_gbs, args.peak_tflops, &ledger.header.device);
    Ok(Times::new(ledger, load, records, peaks)?)
}

/// One line of the printed plan; equal nodes of several layers are folded into one line.
struct Line<'a> {
    first: usize,
    record: &'a OpRecord,
    count: usize,
    /// Indices of the lines whose output the first node of this line reads.
    after: Vec<usize>,
}

/// The plan as a table. Nodes that differ only in their layer are one line; column `after` has the numbers of the lines whose
/// results a line reads.
pub fn table(records: &[OpRecord]) -> String {
    let lines = fold(records);
    let (bytes, flops) = totals(records);
    let percentage = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let mut out = format!(
        "{:>3} {:<22} {:>4} {:<46} {:<5} {:<12} {:>11} {:>9} {:>7} {:>7}  {}\n",
        "#", "op", "x", "shapes", "dtype", "kernel", "MB", "GFLOP", "% MB", "% FLOP", "after"
    );
    for (i, line) in lines.iter().enumerate() {
        let count = line.count as u64;
        let (b, f) = (line.record.bytes * count, line.record.flops * count);
        let after: Vec<String> = line.after.iter().map(ToString::to_string).collect();
        let dtype = line.record.writes.first().or(line.record.reads.first()).map(|o| o.dtype.to_string());
        let _ = writeln!(
            out,
            "{i:>3} {:<22} {:>4} {:<46} {:<5} {:<12} {:>11.3} {:>9.3} {:>7.2} {:>7.2}  {}",
            line.record.op,
            line.count,
            line.record.shapes(),
            dtype.unwrap_or_default(),
            line.record.kernel,
            b as f64 / 1e6,
            f as f64 / 1e9,
            percentage(b, bytes),
            percentage(f, flops),
            after.join(" ")
        );
    }
    let _ = writeln!(
        out,
        "total: {} nodes, {:.3} MB, {:.3} GFLOP, {:.2} FLOP/byte",
        records.len(),
        bytes as f64 / 1e6,
        flops as f64 / 1e9,
        flops as f64 / bytes.max(1) as f64
    );
    for (op, (calls, sent)) in exchanges(records) {
        let _ = writeln!(out, "{op}: {calls} calls, {:.3} MB sent by each rank", sent as f64 / 1e6);
    }
    out
}

/// Calls of each op that sends something to other ranks, and the bytes that a rank sends for all of them.
fn exchanges(records: &[OpRecord]) -> BTreeMap<&'static str, (usize, u64)> {
    let mut exchanges: BTreeMap<_, (usize, u64)> = BTreeMap::new();
    for record in records.iter().filter(|record| record.sent > 0) {
        let (calls, sent) = exchanges.entry(record.op).or_default();
        *calls += 1;
        *sent += record.sent;
    }
    exchanges
}

/// The plan as JSON: every node, with the indices of the nodes it depends on.
pub fn json(records: &[OpRecord]) -> Value {
    let operand = |o: &Operand| json!({"id": o.id, "name": o.name, "shape": o.shape, "dtype": o.dtype.to_string()});
    let edges = edges(records);
    let nodes: Vec<Value> = records
        .iter()
        .zip(edges)
        .map(|(r, after)| {
            json!({
                "op": r.op,
                "kernel": r.kernel,
                "reads": r.reads.iter().map(operand).collect::<Vec<_>>(),
                "writes": r.writes.iter().map(operand).collect::<Vec<_>>(),
                "bytes": r.bytes,
                "flops": r.flops,
                "sent": r.sent,
                "after": after,
            })
        })
        .collect();
    let (bytes, flops) = totals(records);
    let sent: u64 = records.iter().map(|r| r.sent).sum();
    json!({"nodes": nodes, "bytes": bytes, "flops": flops, "sent": sent})
}

fn totals(records: &[OpRecord]) -> (u64, u64) {
    (records.iter().map(|r| r.bytes).sum(), records.iter().map(|r| r.flops).sum())
}

/// For each node, the nodes that last wrote its operands.
fn edges(records: &[OpRecord]) -> Vec<Vec<usize>> {
    let mut writer: HashMap<u32, usize> = HashMap::new();
    records
        .iter()
        .enumerate()
        .map(|(i, record)| {
            let mut after: Vec<usize> = record.reads.iter().filter_map(|o| writer.get(&o.id).copied()).collect();
            after.sort_unstable();
            after.dedup();
            writer.extend(record.writes.iter().map(|o| (o.id, i)));
            after
        })
        .collect()
}

/// Key that a node shares with its counterparts of other layers: the op, and the shapes and names of its operands without
/// the layer number.
fn kind(record: &OpRecord) -> (&'static str, Vec<(String, &[usize])>) {
    let name = |o: &Operand| o.name.split('.').filter(|part| part.parse::<usize>().is_err()).collect::<String>();
    let operands = record.reads.iter().chain(&record.writes);
    (record.op, operands.map(|o| (name(o), o.shape.as_slice())).collect())
}

fn fold(records: &[OpRecord]) -> Vec<Line<'_>> {
    let edges = edges(records);
    let mut lines: Vec<Line<'_>> = Vec::new();
    let mut line_of_kind = HashMap::new();
    let mut line_of_node = Vec::new();
    for (i, record) in records.iter().enumerate() {
        let line = *line_of_kind.entry(kind(record)).or_insert_with(|| {
            lines.push(Line { first: i, record, count: 0, after: Vec::new() });
            lines.len() - 1
        });
        lines[line].count += 1;
        line_of_node.push(line);
    }
    for line in &mut lines {
        line.after = edges[line.first].iter().map(|&node| line_of_node[node]).collect();
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::testing::model_dir;
    use pegainfer_core::tensor::DType;
    use pegainfer_kernels::ops::KvDType;
    use pegainfer_kernels::runtime::{Model, Overrides, record};
    use pegainfer_qwen3_4b::Qwen3;
    use std::collections::HashSet;

    /// Bytes that a decode step of the bundled model moves, and the elements of the matrices that it only reads, by data type.
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
        let fp8 = Overrides { fp8: true, ..Overrides::default() };
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
        // Keys and values of six layers and two heads of 128 elements: three sequences read 100 tokens each and write one.
        let entries = 3 * (100 + 1) * 6 * 2 * 2;
        assert_eq!(bf16 - fp8, entries * (2 * 128 - (128 + 4)));
    }

    #[test]
    fn a_gpu_that_is_not_here_is_planned() {
        let engine = Defaults::try_parse_from(["plan"]).unwrap().engine;
        let fit = engine::gpu_fit(&model_dir(), &engine, 16_000_000_000).unwrap();
        // 256 sequences of 4,096 tokens: more KV cache would be of no use.
        assert_eq!((fit.sequences, fit.kv_tokens, fit.context), (256, 256 * 4096, 4096));
        let text = fit.to_string();
        assert!(text.contains("1048576 tokens, 256 sequences at once") && text.contains("of 16.00 GB x 0.9"), "{text}");
        let error = engine::gpu_fit(&model_dir(), &engine, 600_000_000).unwrap_err().to_string();
        assert!(error.contains("does not fit the GPU"), "{error}");
    }

    #[test]
    fn flags_name_the_formats() {
        let plan = |flags: &[&str]| match Cli::parse_from(["pegainfer", "plan"].iter().chain(flags)).into_command() {
            Command::Plan(args) => args.formats.overrides(),
            _ => panic!("{flags:?}"),
        };
        let both = plan(&["--quantization", "fp8", "--kv-cache-dtype", "fp8"]);
        assert!(both.fp8 && both.kv_dtype == KvDType::Fp8);
        let none = plan(&[]);
        assert!(!none.fp8 && none.kv_dtype == KvDType::Bf16);
    }

    #[cfg(feature = "deepseek-v4")]
    #[test]
    fn a_rank_of_several_prints_what_it_sends() {
        let dir = model_dir().with_file_name("dsv4-tiny-fp4fp8");
        let records = engine::record_rank(&dir, &Overrides::default(), 2, (2, 1, 100)).unwrap();
        // Five layers, two rows of 256: 10 sums of f32 and one of bf16, with a flag for each word, and half of 4,096 logits.
        let (sums, logits) = (2 * (10 * 2 * 256 * 4 + 2 * 256 * 2), 2 * 2048 * 4);
        let text = table(&records);
        assert!(text.contains("\nall_reduce: 11 calls, 0.043 MB sent by each rank\n"), "{text}");
        assert!(text.contains("\nall_gather: 1 calls, 0.016 MB sent by each rank\n"), "{text}");
        let json = json(&records);
        assert_eq!(json["sent"], sums + logits);
        let sent = |op: &str| {
            let nodes = json["nodes"].as_array().unwrap().iter().filter(|node| node["op"] == op);
            nodes.map(|node| node["sent"].as_u64().unwrap()).sum::<u64>()
        };
        assert_eq!((sent("all_reduce"), sent("all_gather"), sent("embed")), (sums, logits, 0));
        let alone = table(&engine::record(&dir, &Overrides::default(), 2, 1, 100).unwrap());
        assert!(!alone.contains("sent by"), "{alone}");
        let error = engine::record_rank(&model_dir(), &Overrides::default(), 2, (2, 1, 100)).unwrap_err();
        assert_eq!(error.to_string(), "--tensor-parallel-size 2: Qwen3 runs on one device");
    }

    #[cfg(feature = "deepseek-v4")]
    #[test]
    fn formats_of_other_models_are_refused() {
        let dir = model_dir().with_file_name("dsv4-tiny-fp4fp8");
        let fp8 = Overrides { fp8: true, ..Overrides::default() };
        let error = engine::record(&dir, &fp8, 1, 1, 8).unwrap_err().to_string();
        assert!(error.starts_with("--quantization: checkpoints of DeepSeek-V4"), "{error}");
        let kv = Overrides { kv_dtype: KvDType::Fp8, ..Overrides::default() };
        assert!(engine::record(&dir, &kv, 1, 1, 8).unwrap_err().to_string().starts_with("--kv-cache-dtype"));
        assert!(engine::record(&dir, &Overrides::default(), 1, 1, 8).is_ok());
    }

    #[test]
    fn layers_fold_and_nothing_is_lost() {
        let records = record::<Qwen3>(&Qwen3::load_config(&model_dir()).unwrap(), 8, 1, 1024).unwrap();
        let lines = fold(&records);
        assert_eq!(lines.iter().map(|l| l.count).sum::<usize>(), records.len());
        assert!(lines.len() <= 15, "{} lines for {} nodes", lines.len(), records.len());
        let text = table(&records);
        assert!(text.contains("attention") && text.contains("total: 34 nodes"), "{text}");
        let json = json(&records);
        assert_eq!(json["nodes"].as_array().unwrap().len(), records.len());
        // Every node but the first reads what an earlier one wrote.
        for (i, node) in json["nodes"].as_array().unwrap().iter().enumerate().skip(1) {
            let after = node["after"].as_array().unwrap();
            assert!(!after.is_empty() && after.iter().all(|n| n.as_u64().unwrap() < i as u64), "{node}");
        }
    }
}
