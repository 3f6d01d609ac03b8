//! Plots of a ledger.

use super::floors::{Floors, Given};
use crate::bench::svg::bars::Bars;
use crate::bench::svg::{Ink, Mark, Panel, Series, render};
use anyhow::{Context, Result};
use pegainfer_core::ledger::{Law, Ledger, OpShares, StepKind, StepLine, StepLoad};
use std::collections::BTreeMap;
use std::path::Path;

/// Ops that take less than this part of every step are one.
const SMALL_OP: f64 = 0.02;
/// Most contexts that are plotted.
const MAX_CONTEXTS: usize = 6;
/// What the bars of `ops.svg` are.
const SHARED: &str = "measured times of steps, shared as their ops were timed";
/// What the points of `errors.svg` are.
const CROSS_VALIDATED: &str = "each step predicted from the others (cross-validation)";

/// What the plots of floors show.
const ROOFLINE: &str =
    "area: share of the step; the dashed line is the datasheet's memory bandwidth and dense bf16 rate";
const EFFICIENCY: &str = "decode steps: the least time at the datasheet's peak rates, % of the measured time";

/// Writes `steps.svg`, `ops.svg` and `errors.svg` into `dir`, and `roofline.svg` and `efficiency.svg` if the model's shape and the
/// device's peak rates are known.
pub fn write(ledger: &Ledger, dir: &Path, given: Given<'_>) -> Result<()> {
    let name = ledger.header.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let title = |what: &str| format!("{name} on {}: {what}", ledger.header.device);
    let steps = ledger.anchored_steps();
    let mut plots = vec![
        ("steps.svg", render(&title("measured steps"), "", &[decode(&steps), prefill(&steps)], Ink::Grey)?),
        (
            "ops.svg",
            render(
                &title("steps by op"),
                SHARED,
                &[decode_ops(ledger, &steps), prompt_ops(ledger, &steps)],
                Ink::Grey,
            )?,
        ),
        ("errors.svg", render(&title("error of the law"), CROSS_VALIDATED, &[errors(ledger)], Ink::Grey)?),
    ];
    match Floors::new(ledger, given) {
        Ok(floors) => {
            let (roofline, efficiency) = (floors.roofline()?, [floors.efficiency()?]);
            plots.push(("roofline.svg", render(&title("roofline"), ROOFLINE, &roofline, Ink::Grey)?));
            plots.push(("efficiency.svg", render(&title("efficiency"), EFFICIENCY, &efficiency, Ink::Grey)?));
        }
        Err(why) => log::warn!("roofline.svg and efficiency.svg are left out: {why:#}"),
    }
    for (name, plot) in plots {
        let file = dir.join(name);
        std::fs::write(&file, plot).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    Ok(())
}

/// Time of decode steps over their number of sequences, a line for each context.
fn decode(steps: &[StepLine]) -> Panel {
    let mut contexts: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
    for StepLine { load, us, .. } in steps.iter().filter(|line| line.load.kind() == StepKind::Decode) {
        let points = contexts.entry(load.decode_kv / load.decode_rows).or_default();
        points.push((load.decode_rows as f64, us / 1e3));
    }
    // A context that few numbers of sequences have is that of a full KV cache.
    let fewest = contexts.values().map(Vec::len).max().unwrap_or(0) / 3;
    let contexts = contexts.into_iter().filter(|(_, points)| points.len() > fewest).take(MAX_CONTEXTS);
    let series = contexts.map(|(context, points)| line(format!("{context} tokens each"), points)).collect();
    Panel { title: "decode step, ms".into(), x_label: "sequences".into(), series }
}

/// Time of prefill steps over their tokens.
fn prefill(steps: &[StepLine]) -> Panel {
    let alone = |load: &StepLoad| {
        let tokens = load.prefill_tokens as u64;
        load.kind() == StepKind::Prefill && load.prefill_rows == 1 && load.pairs == tokens * (tokens + 1) / 2
    };
    let of = steps.iter().filter(|line| alone(&line.load));
    let points = of.map(|line| (line.load.prefill_tokens as f64, line.us / 1e3)).collect();
    let series = vec![line("one prompt, nothing cached".into(), points)];
    Panel { title: "prefill step, ms".into(), x_label: "tokens".into(), series }
}

/// A line whose points are in the order of x.
fn line(name: String, mut points: Vec<(f64, f64)>) -> Series {
    points.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    Series { name, mark: Mark::Line, points }
}

fn decode_ops(ledger: &Ledger, steps: &[StepLine]) -> Bars {
    let label = |load: &StepLoad| format!("{} x {}", load.decode_rows, load.decode_kv / load.decode_rows);
    let x_label = "sequences x context";
    let ms = |line: &StepLine| line.us / 1e3;
    bars(ledger, steps, ("decode step, ms", x_label), &ms, |kind| kind == StepKind::Decode, &label)
}

fn prompt_ops(ledger: &Ledger, steps: &[StepLine]) -> Bars {
    let label = |load: &StepLoad| match load.decode_rows {
        0 => load.prefill_tokens.to_string(),
        rows => format!("{} + {rows}", load.prefill_tokens),
    };
    let x_label = "prompt tokens + decoding sequences";
    let title = "step with prompts, ms per 1,000 tokens";
    let ms = |line: &StepLine| line.us / line.load.tokens() as f64;
    bars(ledger, steps, (title, x_label), &ms, |kind| kind != StepKind::Decode, &label)
}

/// A bar for each step of these kinds whose ops were timed, as high as `ms` says.
fn bars(
    ledger: &Ledger,
    steps: &[StepLine],
    (title, x_label): (&str, &str),
    ms: &dyn Fn(&StepLine) -> f64,
    wanted: impl Fn(StepKind) -> bool,
    label: &dyn Fn(&StepLoad) -> String,
) -> Bars {
    let shares = OpShares::new(&ledger.ops);
    let timed = shares.steps().filter(|load| wanted(load.kind()));
    let timed: Vec<&StepLine> = timed.filter_map(|load| steps.iter().find(|line| line.load == *load)).collect();
    let part = |line: &StepLine, op: &str| shares.share(&line.load, op).unwrap_or(0.0);
    let large = |op: &&String| timed.iter().any(|line| part(line, op) >= SMALL_OP);
    let mut parts: Vec<String> = shares.names().iter().filter(large).cloned().collect();
    let bar = |line: &&StepLine| {
        let mut times: Vec<f64> = parts.iter().map(|op| part(line, op) * ms(line)).collect();
        times.push((ms(line) - times.iter().sum::<f64>()).max(0.0));
        (label(&line.load), times)
    };
    let bars = timed.iter().map(bar).collect();
    parts.push("other ops".into());
    Bars { title: title.into(), x_label: x_label.into(), parts, bars }
}

/// How far the law is off at steps that it was not told.
fn errors(ledger: &Ledger) -> Panel {
    let residuals = Law::residuals(&ledger.anchored_steps(), ledger.header.graphs);
    let series = StepKind::ALL.map(|kind| {
        let of = residuals.iter().filter(|residual| residual.load.kind() == kind);
        let points = of.map(|residual| (residual.measured / 1e3, 100.0 * residual.relative().abs())).collect();
        Series { name: format!("{} steps", kind.name()), mark: Mark::Points, points }
    });
    Panel { title: "error, %".into(), x_label: "measured step, ms".into(), series: series.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ledger;

    #[test]
    fn the_bars_are_as_high_as_the_steps() {
        let ledger = ledger();
        let Bars { parts, bars, .. } = decode_ops(&ledger, &ledger.steps);
        assert_eq!(
            bars.iter().map(|(label, _)| label.as_str()).collect::<Vec<_>>(),
            ["1 x 256", "32 x 256", "256 x 256"]
        );
        let us =
            |rows| ledger.steps.iter().find(|line| line.load == StepLoad::of_rows(vec![(1, 256); rows])).unwrap().us;
        for ((_, times), rows) in bars.iter().zip([1, 32, 256]) {
            assert_eq!(times.len(), parts.len());
            assert!((times.iter().sum::<f64>() / (us(rows) / 1e3) - 1.0).abs() < 1e-9, "{times:?}");
        }
        // One kernel computes all layers of a single sequence.
        let layers = parts.iter().position(|op| op == "decode_layers").unwrap();
        assert!(bars[0].1[layers] > 0.8 * us(1) / 1e3 && bars[1].1[layers] == 0.0);
    }

    #[test]
    fn lines_are_those_of_contexts_and_points_those_of_the_law() {
        let ledger = ledger();
        let names: Vec<String> = decode(&ledger.steps).series.into_iter().map(|series| series.name).collect();
        assert_eq!(names, [16, 64, 256, 1024, 4096].map(|context| format!("{context} tokens each")));
        assert!(prefill(&ledger.steps).series[0].points.is_sorted_by(|a, b| a.0 < b.0));
        let points: usize = errors(&ledger).series.iter().map(|series| series.points.len()).sum();
        assert_eq!(points, Law::residuals(&ledger.steps, ledger.header.graphs).len());
    }

    #[test]
    fn a_ledger_is_five_files() {
        let dir = tempfile::tempdir().unwrap();
        write(&ledger(), dir.path(), Given::default()).unwrap();
        let files = || std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(files(), 5);
        for name in ["steps.svg", "ops.svg", "errors.svg", "roofline.svg", "efficiency.svg"] {
            let plot = std::fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(plot.contains("Qwen3-4B on cuda:0 (NVIDIA H200)") && plot.ends_with("</svg>\n"), "{name}");
        }
        // Without the model's shape there are three.
        let unknown = Ledger { config: None, ..ledger() };
        std::fs::remove_file(dir.path().join("roofline.svg")).unwrap();
        write(&unknown, dir.path(), Given::default()).unwrap();
        assert_eq!(files(), 4);
        let error = write(&ledger(), &dir.path().join("none"), Given::default()).unwrap_err();
        assert!(error.to_string().ends_with("steps.svg cannot be written"), "{error}");
    }
}
