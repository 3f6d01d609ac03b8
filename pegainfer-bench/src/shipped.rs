//! Built-in ledgers, found by GPU and model.

use super::anchor;
use super::ledger_origin::card;
use anyhow::{Context, Result, bail};
use clap::Args;
use pegainfer_core::ledger::Ledger;
use std::path::Path;

/// A ledger of the repository as text, about 50 KB. Compression would shrink the executable by less than a thousandth.
struct Shipped {
    /// GPU name for `--gpu`.
    gpu: &'static str,
    /// Model name for `--model`.
    model: &'static str,
    text: &'static str,
}

macro_rules! ledger {
    ($file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../ledgers/", $file))
    };
}

/// All ledgers of the repository.
static LEDGERS: &[Shipped] = &[
    Shipped { gpu: "h100", model: "qwen3-4b", text: ledger!("h100-qwen3-4b.jsonl") },
    Shipped { gpu: "h100", model: "qwen3.5-4b", text: ledger!("h100-qwen35-4b.jsonl") },
    Shipped { gpu: "h200", model: "qwen3-4b", text: ledger!("h200-qwen3-4b.jsonl") },
    Shipped { gpu: "h200", model: "qwen3.5-4b", text: ledger!("h200-qwen35-4b.jsonl") },
    Shipped { gpu: "h200x2", model: "deepseek-v4-flash", text: ledger!("h200x2-deepseek-v4-flash.jsonl") },
];

/// Flags that select a built-in ledger.
#[derive(Debug, Clone, Default, Args)]
pub struct ShippedArgs {
    /// With --model: use the built-in ledger of this GPU, such as h200, or h200x2 for two
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// With --gpu: use the built-in ledger of this model, such as Qwen/Qwen3-4B
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
}

impl ShippedArgs {
    /// True if one of the flags is given.
    pub fn is_given(&self) -> bool {
        self.gpu.is_some() || self.model.is_some()
    }
}

/// The ledger in `file`, or the built-in one selected by the flags.
pub fn read(file: Option<&Path>, shipped: &ShippedArgs) -> Result<Ledger> {
    match (file, &shipped.gpu, &shipped.model) {
        (Some(file), None, None) => anchor::read(file),
        (Some(_), ..) => bail!("give the file of a ledger or --gpu and --model, not both"),
        (None, Some(gpu), Some(model)) => find(gpu, model),
        (None, ..) => bail!(
            "give the file of a ledger, or both --gpu and --model of one of those inside this executable: {}",
            known()
        ),
    }
}

/// The built-in ledger of this model on this GPU, by their usual names.
fn find(gpu: &str, model: &str) -> Result<Ledger> {
    let named =
        |ledger: &&Shipped| gpu_name(ledger.gpu) == gpu_name(gpu) && model_name(ledger.model) == model_name(model);
    let Some(ledger) = LEDGERS.iter().find(named) else {
        bail!(
            "no ledger of {model} on {gpu} is inside this executable: measure one with pegainfer ledger, estimate with pegainfer sim --roofline, or take one of these: {}",
            known()
        );
    };
    Ledger::read(ledger.text.as_bytes()).with_context(|| format!("the ledger of {} on {}", ledger.model, ledger.gpu))
}

/// The flags of each ledger, one per line.
fn known() -> String {
    let options = LEDGERS.iter().map(|Shipped { gpu, model, .. }| format!("--gpu {gpu} --model {model}"));
    options.collect::<Vec<_>>().join(", ")
}

/// Normal form of a GPU name: `h200` for `NVIDIA H200`, `cuda:0 (NVIDIA H200)` and `nvidia-h200`, `h100` for `NVIDIA
/// H100 80GB HBM3`, `h200x2` for `cuda:0 to cuda:1 (2 x NVIDIA H200)`, `2 x H200` and `2xh200`.
fn gpu_name(name: &str) -> String {
    let name = card(name).to_lowercase().replace("nvidia", "").replace(['(', ')'], " ");
    let (count, name) = match name.split_once('x') {
        Some((count, name)) if count.trim().parse::<usize>().is_ok() => (format!("x{}", count.trim()), name),
        _ => (String::new(), &name[..]),
    };
    let is_memory =
        |word: &str| word.starts_with("hbm") || word.strip_suffix("gb").is_some_and(|gb| gb.parse::<usize>().is_ok());
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !is_memory(word));
    words.collect::<String>() + &count
}

/// Normal form of a model name: `qwen35-4b` for `Qwen/Qwen3.5-4B` and for the path `/models/Qwen3.5-4B/`.
fn model_name(name: &str) -> String {
    let name = name.trim().trim_end_matches('/').rsplit('/').next().unwrap_or(name);
    name.to_lowercase().replace('.', "").replace(['_', ' '], "-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload::{Arrivals, Point};
    use crate::sim::simulation::Simulation;
    use crate::sim::workload::Workload;
    use pegainfer_kernels::sources;
    use pegainfer_models::{detect, model_path};
    use std::time::Duration;

    fn named(gpu: &str, model: &str) -> Result<Ledger> {
        read(None, &ShippedArgs { gpu: Some(gpu.to_owned()), model: Some(model.to_owned()) })
    }

    #[test]
    fn each_ledger_is_that_of_its_names_and_knows_its_model() {
        for Shipped { gpu, model, .. } in LEDGERS {
            let ledger = named(gpu, model).unwrap();
            let header = &ledger.header;
            assert_eq!((gpu_name(&header.device), model_name(&header.model)), (gpu_name(gpu), model_name(model)));
            assert!(ledger.law().is_ok() && !ledger.ops.is_empty());
            let config = model_path::from_config(ledger.config.as_ref().unwrap(), &header.model).unwrap();
            let vocab_size = || (detect::detect(&config.dir).unwrap().vocab_size)(&config.dir).unwrap();
            let engine = model.contains("3.5") && cfg!(feature = "qwen35")
                || model.starts_with("deepseek") && cfg!(feature = "deepseek-v4")
                || *model == "qwen3-4b";
            if engine {
                assert_eq!(vocab_size(), header.vocab_size, "{model}");
            }
        }
    }

    #[test]
    fn every_ledger_of_the_repository_is_inside() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ledgers");
        let texts: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap())
            .collect();
        assert_eq!(texts.len(), LEDGERS.len());
        assert!(texts.iter().all(|text| LEDGERS.iter().any(|ledger| ledger.text == text)));
    }

    #[test]
    fn the_documentation_has_the_date_and_state_of_each_ledger() {
        let page = include_str!("../../docs/performance/simulation.md");
        for Shipped { gpu, model, .. } in LEDGERS {
            let header = named(gpu, model).unwrap().header;
            let state = if sources::is_current(&header.kernels) { "current" } else { "stale" };
            let row = format!("| `--gpu {gpu} --model {model}` | {} | {state} |", header.measured.unwrap());
            assert!(page.contains(&row), "docs/performance/simulation.md lacks {row}");
        }
    }

    #[test]
    fn every_ledger_can_be_simulated() {
        for Shipped { gpu, model, .. } in LEDGERS {
            let simulation = Simulation::new(&named(gpu, model).unwrap()).unwrap();
            simulation.check().unwrap();
            for streams in [1, simulation.header.max_num_seqs] {
                let requests = 2 * streams;
                let point = Point { arrivals: Arrivals::Closed { streams }, requests, prompt_len: 256, output_len: 32 };
                let run = Workload::Point(point).run(&simulation, 1, false).unwrap();
                let tokens: usize = run.measurements.samples.iter().map(|sample| sample.tokens).sum();
                assert_eq!((tokens, run.refused), (32 * requests, 0), "{model} on {gpu}");
                assert_eq!(run.tally.uncovered_steps, 0, "{model} on {gpu}");
                assert!(run.wall > Duration::ZERO && run.tally.ops.iter().sum::<f64>() > 0.0, "{model} on {gpu}");
            }
        }
    }

    #[test]
    fn people_have_several_names_for_a_gpu_and_a_model() {
        let dense = named("h200", "qwen3-4b").unwrap();
        for (gpu, model) in [
            ("NVIDIA H200", "Qwen/Qwen3-4B"),
            ("nvidia-h200", "QWEN3_4B"),
            ("cuda:3 (NVIDIA H200)", "/models/Qwen3-4B/"),
            (" H200 ", "qwen3 4b "),
        ] {
            assert_eq!(named(gpu, model).unwrap(), dense, "{gpu} {model}");
        }
        for model in ["Qwen/Qwen3.5-4B", "qwen35-4b"] {
            assert_eq!(named("h200", model).unwrap().header.model, "Qwen3.5-4B");
        }
    }

    #[test]
    fn cards_are_told_by_kind_and_number_and_not_by_memory() {
        for (name, short) in [
            ("cuda:0 (NVIDIA H100 80GB HBM3)", "h100"),
            ("NVIDIA H100 PCIe", "h100pcie"),
            ("cuda:0 to cuda:1 (2 x NVIDIA H200)", "h200x2"),
            ("2xH200", "h200x2"),
            ("h200x4", "h200x4"),
            ("4 x NVIDIA H100 80GB HBM3", "h100x4"),
            ("NVIDIA GeForce RTX 4090", "geforcertx4090"),
        ] {
            assert_eq!(gpu_name(name), short, "{name}");
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        for (gpu, model) in
            [("h20", "qwen3-4b"), ("H200 NVL", "qwen3-4b"), ("h200", "qwen3-54b"), ("h200", "qwen3-4b-fp8")]
        {
            let error = named(gpu, model).unwrap_err().to_string();
            assert!(error.starts_with(&format!("no ledger of {model} on {gpu} is inside")), "{error}");
            assert!(error.ends_with(&known()) && error.contains(", --gpu h200 --model qwen3.5-4b"), "{error}");
        }
    }

    #[test]
    fn a_ledger_has_one_source() {
        let refused = |file: Option<&str>, gpu: Option<&str>, model: Option<&str>| {
            let shipped = ShippedArgs { gpu: gpu.map(str::to_owned), model: model.map(str::to_owned) };
            read(file.map(Path::new), &shipped).unwrap_err().to_string()
        };
        for (gpu, model) in [(None, None), (Some("h200"), None), (None, Some("qwen3-4b"))] {
            let error = refused(None, gpu, model);
            assert!(error.contains("both --gpu and --model") && error.contains(", --gpu h200"), "{error}");
        }
        assert!(refused(Some("x"), Some("h200"), Some("qwen3-4b")).ends_with("not both"));
        assert!(refused(Some("x"), None, Some("qwen3-4b")).ends_with("not both"));
        assert!(refused(Some("x"), None, None).contains("the ledger x cannot be read"));
    }
}
