//! The file of `--models`: a TOML table for each model, with the long names of flags as keys.

use super::kv_events::KvEventsArgs;
use super::lora::LoraArgs;
use super::settings;
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use pegainfer_models::args::EngineArgs;
use std::path::Path;
use std::time::Duration;
use toml::{Table, Value};

/// Keys of a table that are no flags.
const OWN: [&str; 4] = ["path", "aliases", "pinned", "idle-time"];
/// Flags of the whole process.
const OF_PROCESS: [&str; 3] = ["model-path", "log-level", "log-format"];

/// A model of the file.
#[derive(Debug)]
pub struct ModelEntry {
    /// Its name, and its aliases.
    pub names: Vec<String>,
    /// True if it is loaded at the start and stays.
    pub pinned: bool,
    /// Time after which it leaves when idle; `None` for the server's.
    pub idle_time: Option<Duration>,
    /// Its flags.
    pub engine: EngineArgs,
    /// Its adapters.
    pub lora: LoraArgs,
    /// Its KV events.
    pub kv_events: KvEventsArgs,
}

/// Flags of a model.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct ModelFlags {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    kv_events: KvEventsArgs,
}

impl ModelEntry {
    /// A model with these flags and no adapters, which comes and goes.
    pub fn new(name: String, engine: EngineArgs) -> Self {
        let lora = LoraArgs { lora_modules: Vec::new(), lora_root: None, max_cpu_loras: None };
        let kv_events = KvEventsArgs::default();
        Self { names: vec![name], pinned: false, idle_time: None, engine, lora, kv_events }
    }
}

/// Reads the models of a file. `base` has the flags of the command line, which the file overrides.
pub fn read(file: &Path, base: &EngineArgs) -> Result<Vec<ModelEntry>> {
    let shown = format!("--models {}", file.display());
    let text = std::fs::read_to_string(file).with_context(|| format!("{shown} cannot be read"))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| anyhow!("{shown} is not valid TOML: {error}"))?;
    ensure!(!table.is_empty(), "{shown} has no model: write a table for each, such as [small]");
    table.into_iter().map(|(name, value)| entry(&shown, name, value, base)).collect()
}

fn entry(shown: &str, name: String, value: Value, base: &EngineArgs) -> Result<ModelEntry> {
    let Value::Table(mut table) = value else {
        bail!("{shown}: {name} is no table: write the flags of a model below its name, such as [{name}]");
    };
    let shown = format!("{shown}: [{name}]");
    let own: Table = OWN.into_iter().filter_map(|key| table.remove_entry(key)).collect();
    if let Some(flag) = OF_PROCESS.into_iter().find(|flag| table.contains_key(*flag)) {
        bail!("{shown}: {flag} is not a setting of one model; its checkpoint is its path");
    }
    let ModelFlags { mut engine, lora, kv_events } =
        settings::parse_table(&table, &shown).map_err(anyhow::Error::msg)?;
    inherit(&mut engine, base, &table);
    engine.model_path = Some(text(&own, "path", &shown)?.unwrap_or_else(|| name.clone()));
    let aliases = match own.get("aliases") {
        None => Vec::new(),
        Some(Value::Array(names)) => names
            .iter()
            .map(|name| name.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .with_context(|| format!("{shown}: aliases must be a list of names"))?,
        Some(_) => bail!("{shown}: aliases must be a list of names"),
    };
    let pinned = match own.get("pinned") {
        None => false,
        Some(value) => value.as_bool().with_context(|| format!("{shown}: pinned must be true or false"))?,
    };
    let idle_time = match own.get("idle-time") {
        None => None,
        Some(value) => Some(seconds(value).with_context(|| format!("{shown}: idle-time must be a number of seconds"))?),
    };
    let names = std::iter::once(name).chain(aliases).collect();
    Ok(ModelEntry { names, pinned, idle_time, engine, lora, kv_events })
}

fn text(table: &Table, key: &str, shown: &str) -> Result<Option<String>> {
    let Some(value) = table.get(key) else { return Ok(None) };
    Ok(Some(value.as_str().with_context(|| format!("{shown}: {key} must be a text"))?.to_owned()))
}

fn seconds(value: &Value) -> Option<Duration> {
    let seconds = value.as_float().or_else(|| value.as_integer().map(|n| n as f64))?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Takes the flags of the command line that the table does not set.
fn inherit(own: &mut EngineArgs, base: &EngineArgs, table: &Table) {
    macro_rules! inherit {
        ($($flag:literal: $($field:ident).+),* $(,)?) => {
            $(if !table.contains_key($flag) {
                own.$($field).+ = base.$($field).+.clone();
            })*
        };
    }
    inherit!(
        "hub-ca": hub_ca,
        "device": device,
        "task": task,
        "tensor-parallel-size": tensor_parallel_size,
        "data-parallel-size": data_parallel_size,
        "lose-engine": lose_engine,
        "loop-back-ranks": loop_back_ranks,
        "check-ranks": check_ranks,
        "max-model-len": max_model_len,
        "max-num-seqs": max_num_seqs,
        "max-queued-requests": max_queued_requests,
        "max-num-batched-tokens": max_num_batched_tokens,
        "mixed-step-token-budget": max_num_mixed_tokens,
        "kv-cache-dtype": formats.kv_cache_dtype,
        "quantization": formats.quantization,
        "exact-activations": formats.exact_activations,
        "fp8-prompts": formats.fp8_prompts,
        "kv-cache-memory": kv_cache_memory,
        "kv-offloading-size": kv_offloading_size,
        "state-cache-memory": state_cache_memory,
        "state-cache-interval": state_cache_interval,
        "gpu-memory-utilization": gpu_memory_utilization,
        "gpu-memory-limit": gpu_memory_limit,
        "cuda-graph": cuda_graph,
        "speculative-config": speculative_config,
        "enable-lora": enable_lora,
        "max-loras": max_loras,
        "max-lora-rank": max_lora_rank,
        "threads": threads,
        "load-format": load_format,
        "dummy-router-skew": dummy_router_skew,
        "language-model-only": language_model_only,
        "rope-scaling": rope_scaling,
        "step-deadline": step_deadline,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use pegainfer_models::args::DeviceArg;
    use pegainfer_testing::TempDir;

    fn read_text(text: &str) -> Result<Vec<ModelEntry>> {
        let dir = TempDir::new("models-file");
        let file = dir.path().join("models.toml");
        std::fs::write(&file, text).unwrap();
        let base = ModelFlags::parse_from(["--device", "cpu", "--threads", "3", "--max-num-seqs", "5"]).engine;
        read(&file, &base)
    }

    #[test]
    fn a_table_is_a_model() {
        let text = "
            [small]
            path = \"Qwen/Qwen3-0.6B\"
            aliases = [\"gpt\", \"mini\"]
            pinned = true
            idle-time = 90
            max-num-seqs = 7
            kv-cache-memory = \"1M\"
            [\"org/Other\"]
        ";
        let [small, other] = &read_text(text).unwrap()[..] else { panic!() };
        assert_eq!((&small.names[..], small.pinned), (&["small", "gpt", "mini"].map(str::to_owned)[..], true));
        assert_eq!((small.idle_time, small.engine.kv_cache_memory), (Some(Duration::from_secs(90)), Some(1 << 20)));
        let seqs = |entry: &ModelEntry| entry.engine.max_num_seqs.map(usize::from);
        assert_eq!((seqs(small), seqs(other)), (Some(7), Some(5)), "the file overrides the command line");
        assert_eq!((&other.engine.device, other.engine.model_path.as_deref()), (&DeviceArg::Cpu, Some("org/Other")));
    }

    #[test]
    fn bad_tables_are_refused_by_name() {
        for (text, expected) in [
            ("", "has no model"),
            ("x = 1", "x is no table"),
            ("[x]\nmax-num-seq = 5", "[x]: max-num-seq is not a setting of a model; did you mean max-num-seqs?"),
            ("[x]\nmax-num-seqs = 0", "max-num-seqs has the invalid value"),
            ("[x]\nmodel-path = \"y\"", "its checkpoint is its path"),
            ("[x]\npinned = 1", "pinned must be true or false"),
            ("[x]\naliases = [1]", "aliases must be a list of names"),
            ("[x]\nidle-time = -1", "idle-time must be a number of seconds"),
            ("[x", "is not valid TOML"),
        ] {
            let error = format!("{:#}", read_text(text).unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn every_flag_is_inherited_or_of_the_process() {
        let command = ModelFlags::command();
        let source = include_str!("models_file.rs");
        let of_one = ["kv-disk", "kv-events-config", "lora-modules", "lora-root", "max-cpu-loras", "revision"];
        for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
            let known = OF_PROCESS.contains(&long) || of_one.contains(&long) || ["help", "version"].contains(&long);
            assert!(known || source.contains(&format!("\"{long}\": ")), "{long} is not inherited");
        }
    }
}
