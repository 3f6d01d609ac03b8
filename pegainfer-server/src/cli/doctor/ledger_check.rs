//! `doctor --ledger`: compares the step times of this device with a ledger.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use pegainfer_bench::anchor;
use pegainfer_bench::ledger_origin::card;
use pegainfer_core::ledger::{Anchor, Header, StepGroup};
use pegainfer_models::args::EngineArgs;
use pegainfer_models::model_path;
use pegainfer_terminal::stdout::print;
use std::path::Path;

/// Maximum relative difference of step times; more means that the ledger does not apply.
const TOLERANCE: f64 = 0.05;

/// Only the engine flags.
#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    engine: EngineArgs,
}

/// Measures some steps of `file` again, on GPU `gpu` if they are GPU steps.
pub fn run(file: &Path, model_path: Option<&str>, gpu: usize) -> Result<()> {
    let ledger = anchor::read(file)?;
    let args = engine_args(&ledger.header, model_path, gpu)?;
    let model = model_path::resolve(&args)?;
    let (header, anchor) = anchor::measure(&ledger, &model, &args)?;
    print(&anchor::table(&anchor).to_string())?;
    for line in differences(&ledger.header, &header) {
        print(&format!("{line}\n"))?;
    }
    let why = verdict(&ledger.header, &header, &anchor);
    ensure!(why.is_none(), "the step times of this device differ from the ledger: {}", why.unwrap_or_default());
    print(&format!("ok: every factor is within {:.0} %\n", 100.0 * TOLERANCE))
}

/// The flags of the measured engine.
fn engine_args(header: &Header, model_path: Option<&str>, gpu: usize) -> Result<EngineArgs> {
    let device = if header.device.starts_with("cpu") { "cpu".to_owned() } else { format!("cuda:{gpu}") };
    let numbers = [
        ("--max-num-seqs", header.max_num_seqs),
        ("--max-num-batched-tokens", header.max_num_batched_tokens),
        ("--mixed-step-token-budget", header.max_num_mixed_tokens),
        ("--max-model-len", header.max_model_len),
    ];
    let mut words = vec!["doctor".to_owned(), "--device".to_owned(), device];
    words.extend(numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]));
    let mut flag = |name: &str, value: &str| words.extend([name.to_owned(), value.to_owned()]);
    if header.kv_cache_dtype.starts_with("fp8") {
        flag("--kv-cache-dtype", "fp8");
    }
    if let Some(format) = &header.quantization {
        flag("--quantization", format);
    }
    if !header.graphs {
        flag("--cuda-graph", "false");
    }
    if let Some(model) = model_path {
        flag("--model-path", model);
        if Path::new(model).is_dir() && !has_weights(Path::new(model)) {
            flag("--load-format", "dummy");
        }
    }
    Ok(Flags::try_parse_from(words).context("the header of the ledger has values that no engine can have")?.engine)
}

/// True if there are weights next to config.json.
fn has_weights(dir: &Path) -> bool {
    let files = dir.read_dir().into_iter().flatten().flatten();
    files
        .into_iter()
        .any(|file| file.path().extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf"))
}

/// Differences from the conditions of the measurement.
fn differences(ledger: &Header, now: &Header) -> Vec<String> {
    let driver = |header: &Header| header.driver.clone().unwrap_or_else(|| "unknown".to_owned());
    let pairs = [
        ("kernels", ledger.kernels.clone(), now.kernels.clone()),
        ("device", card(&ledger.device).to_owned(), card(&now.device).to_owned()),
        ("driver", driver(ledger), driver(now)),
    ];
    let differ = pairs.into_iter().filter(|(_, before, now)| before != now);
    differ.map(|(what, before, now)| format!("{what}: {now}, in the ledger {before}")).collect()
}

/// Why the ledger does not apply here; `None` if it does.
fn verdict(ledger: &Header, now: &Header, anchor: &Anchor) -> Option<&'static str> {
    let factors = anchor::factors(anchor);
    let off = |factor: f64| (factor - 1.0).abs() > TOLERANCE;
    if !factors.iter().any(|(_, factor)| off(*factor)) {
        return None;
    }
    let slower = |group: StepGroup| factors.iter().any(|(other, factor)| *other == group && *factor > 1.0 + TOLERANCE);
    let driver_changed = ledger.driver.is_some() && now.driver.is_some() && ledger.driver != now.driver;
    Some(if ledger.kernels != now.kernels {
        "the kernels have changed since; measure it again with pegainfer ledger"
    } else if card(&ledger.device) != card(&now.device) {
        "this is another device; correct it with pegainfer ledger --anchor"
    } else if driver_changed {
        "the driver has changed since; correct it with pegainfer ledger --anchor"
    } else if factors.iter().all(|(_, factor)| *factor > 1.0 + TOLERANCE) {
        "all steps are slower: look for other work on the device (nvidia-smi), and for a limit of its clocks"
    } else if slower(StepGroup::Prefill) && !slower(StepGroup::DecodeSmall) {
        "steps that compute are slower, and those that read memory are not: a lower clock, by a power limit or the \
         temperature (nvidia-smi -q -d CLOCK,PERFORMANCE)"
    } else if factors.iter().all(|(_, factor)| *factor < 1.0 + TOLERANCE) {
        "steps are faster than they were; correct it with pegainfer ledger --anchor"
    } else {
        "only some steps are slower; find the slow op with pegainfer serve --ledger"
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::ledger::{Remeasured, StepLoad};

    fn header(device: &str) -> Header {
        Header {
            version: Header::VERSION,
            program: String::new(),
            kernels: "0123456789abcdef".to_owned(),
            measured: None,
            model: "m".into(),
            device: device.into(),
            ranks: 1,
            driver: device.starts_with("cuda").then(|| "CUDA 13.0".to_owned()),
            quantization: Some("fp8".into()),
            kv_cache_dtype: "fp8_e4m3".into(),
            kv_blocks: 64,
            block_size: 16,
            max_model_len: 512,
            vocab_size: 1000,
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            max_num_mixed_tokens: 48,
            depth: 2,
            graphs: false,
            state: None,
        }
    }

    /// Small decode and prefill steps that take `decode` and `prefill` times as long as in the ledger.
    fn anchor(decode: f64, prefill: f64) -> Anchor {
        let step = |rows: &[(usize, usize)], ratio: f64| Remeasured {
            load: StepLoad::of_rows(rows.iter().copied()),
            ledger_us: 100.0,
            us: 100.0 * ratio,
        };
        Anchor { ledger_device: String::new(), steps: vec![step(&[(1, 9)], decode), step(&[(9, 9)], prefill)] }
    }

    #[test]
    fn the_verdict_names_what_has_changed() {
        let (ledger, now) = (header("cuda:0 (NVIDIA H200)"), header("cuda:3 (NVIDIA H200)"));
        let says = |ledger: &Header, decode, prefill| verdict(ledger, &now, &anchor(decode, prefill)).unwrap_or("ok");
        assert_eq!(says(&ledger, 1.04, 0.97), "ok");
        assert!(says(&ledger, 1.0, 1.2).contains("a lower clock"));
        assert!(says(&ledger, 1.2, 1.2).contains("other work on the device"));
        assert!(says(&ledger, 1.2, 1.0).contains("only some steps"));
        assert!(says(&ledger, 0.9, 1.0).contains("faster"));
        assert!(says(&header("cuda:0 (NVIDIA H100)"), 1.0, 1.2).contains("another device"));
        assert!(says(&Header { driver: Some("CUDA 12.8".into()), ..ledger.clone() }, 1.0, 1.2).contains("driver"));
        let old = Header { driver: None, kernels: "0".into(), ..ledger.clone() };
        assert!(says(&old, 1.0, 1.2).contains("kernels"));
        assert_eq!(says(&old, 1.0, 1.0), "ok");
        assert_eq!(differences(&old, &now).len(), 2);
        assert_eq!(differences(&ledger, &now), Vec::<String>::new());
    }

    #[test]
    fn the_engine_has_the_flags_of_the_ledger() {
        let args = engine_args(&header("cuda:0 (NVIDIA H200)"), None, 5).unwrap();
        assert_eq!(args.max_num_seqs.map(usize::from), Some(4));
        assert_eq!(args.max_num_mixed_tokens.get(), 48);
        assert_eq!(args.device, pegainfer_models::args::DeviceArg::Cuda(5));
        assert!(
            args.overrides().quantization == Some(pegainfer_runtime::AtLoad::Fp8)
                && args.overrides().kv_dtype.name().starts_with("fp8")
                && !args.cuda_graph
        );
        let broken = Header { max_num_seqs: 0, ..header("cpu") };
        assert!(engine_args(&broken, None, 0).is_err());
    }
}
