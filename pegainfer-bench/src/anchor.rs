//! Measures steps of a ledger again on this device, for `ledger --anchor` and `doctor --ledger`.

use super::ledger_origin::other_model;
use anyhow::{Context, Result, ensure};
use pegainfer_core::ledger::{Anchor, Header, Ledger, Remeasured, StepGroup};
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use pegainfer_models::model_path::ModelDir;
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Minimum relative difference from the ledger at which a step is marked.
const MARKED: f64 = 0.1;

/// Reads a ledger.
pub fn read(file: &Path) -> Result<Ledger> {
    let unreadable = || format!("the ledger {} cannot be read", file.display());
    Ledger::read(BufReader::new(File::open(file).with_context(unreadable)?)).with_context(unreadable)
}

/// Loads the model and measures about a dozen steps of the ledger. Also returns this engine's properties.
pub fn measure(ledger: &Ledger, model: &ModelDir, args: &EngineArgs) -> Result<(Header, Anchor)> {
    let kv_cache_dtype = args.overrides().kv_dtype.name();
    if let Some(other) = other_model(&ledger.header, &model.to_string(), args, kv_cache_dtype) {
        anyhow::bail!("the ledger was measured with {other}: give the model and the flags that it was measured with");
    }
    let chosen = Anchor::choose(&ledger.steps);
    let (mut header, steps) = engine::measure_again(&model.dir, args, &chosen, &mut |line| {
        log::debug!("{:?}: {:.1} us, spread {:.1} %", line.load, line.us, 100.0 * line.spread);
    })?;
    ensure!(
        header.graphs == ledger.header.graphs,
        "of this engine and that of the ledger, one replays CUDA graphs and one does not: give the same --cuda-graph"
    );
    ensure!(
        header.ranks == ledger.header.ranks,
        "the ledger was measured with {} ranks, and this engine has {}: give the same --tensor-parallel-size",
        ledger.header.ranks,
        header.ranks
    );
    ensure!(!steps.is_empty(), "no step of the ledger fits this engine: give the flags that it was measured with");
    header.model = model.to_string();
    header.quantization.clone_from(&ledger.header.quantization);
    Ok((header, Anchor { ledger_device: ledger.header.device.clone(), steps }))
}

/// Each step with its ratio, and the factors of the groups.
pub fn table(anchor: &Anchor) -> String {
    let mut out = format!("{:<44} {:>10} {:>10} {:>7}\n", "step", "ledger ms", "now ms", "ratio");
    for step in &anchor.steps {
        let Remeasured { load, ledger_us, us } = step;
        let mark = if (step.ratio() - 1.0).abs() > MARKED { "  more than 10 % off" } else { "" };
        let (before, now) = (ledger_us / 1e3, us / 1e3);
        let _ = writeln!(out, "{load:<44} {before:>10.3} {now:>10.3} {:>7.3}{mark}", step.ratio());
    }
    for (group, factor) in factors(anchor) {
        let _ = writeln!(out, "factor of {} steps: {factor:.3}", group.name());
    }
    out
}

/// The factors of the measured groups.
pub fn factors(anchor: &Anchor) -> Vec<(StepGroup, f64)> {
    let measured = |group: &StepGroup| anchor.steps.iter().any(|step| StepGroup::of(&step.load) == *group);
    StepGroup::ALL.into_iter().filter(measured).map(|group| (group, anchor.factor(group))).collect()
}
