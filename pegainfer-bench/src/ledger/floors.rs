//! Plots of measured times against the device's minimum: a roofline of ops, and the efficiency of decode steps.

use crate::bench::peaks::Peaks;
use crate::bench::svg::heat_map::HeatMap;
use crate::bench::svg::{Mark, Panel, Series};
use crate::plan::times::{OpTime, Time, Times};
use anyhow::{Result, bail, ensure};
use pegainfer_core::ledger::{Header, Ledger, OpShares, StepKind, StepLoad};
use pegainfer_kernels::ops::KvDType;
use pegainfer_models::model_path::{self, ModelDir};
use pegainfer_models::{detect, engine};
use pegainfer_runtime::{AtLoad, Overrides};
use std::collections::{BTreeMap, BTreeSet};

/// Minimum fraction of a step for an op to be plotted.
const SMALL_OP: f64 = 0.01;

/// Flags for properties that a ledger may lack.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given<'a> {
    /// Checkpoint directory or Hugging Face id of the model, for a ledger without its config.json.
    pub model_path: Option<&'a str>,
    /// Memory bandwidth in GB/s.
    pub read_gbs: Option<f64>,
    /// bf16 rate in TFLOP/s.
    pub peak_tflops: Option<f64>,
}

/// The steps of a ledger with their floors.
pub struct Floors<'a> {
    ledger: &'a Ledger,
    model: ModelDir,
    overrides: Overrides,
    peaks: Peaks,
    /// Known peak rates: FLOP/s and bytes per second.
    limits: (f64, f64),
}

/// A step of equal sequences: their number, and new tokens and context of each.
type Alike = (usize, usize, usize);

impl<'a> Floors<'a> {
    /// Finds the model's shape and the device's peak rates.
    ///
    /// # Errors
    /// One of them is unknown.
    pub fn new(ledger: &'a Ledger, given: Given<'_>) -> Result<Self> {
        let Header { model: name, device, quantization, kv_cache_dtype, vocab_size, .. } = &ledger.header;
        let peaks = Peaks::given_or_datasheet(given.read_gbs, given.peak_tflops, device);
        let Some(limits) = peaks.flop_s.zip(peaks.read_bytes_s) else {
            bail!("the peak rates of {device} are not known: give --read-gbs and --peak-tflops");
        };
        let model = match (&ledger.config, given.model_path) {
            (Some(config), _) => model_path::from_config(config, name)?,
            (None, Some(path)) => model_path::resolve_config(Some(path))?,
            (None, None) => bail!("the ledger does not have the config.json of {name}: give --model-path"),
        };
        let tokens = (detect::detect(&model.dir)?.vocab_size)(&model.dir)?;
        ensure!(
            tokens == *vocab_size,
            "--model-path has a vocabulary of {tokens} tokens and the ledger's model one of {vocab_size}: give that of {name}"
        );
        let kv_dtype = if kv_cache_dtype == KvDType::Fp8.name() { KvDType::Fp8 } else { KvDType::Bf16 };
        let at_load = |name: &String| [AtLoad::Fp8, AtLoad::Int4].into_iter().find(|format| format.name() == name);
        let overrides =
            Overrides { quantization: quantization.as_ref().and_then(at_load), kv_dtype, ..Overrides::default() };
        Ok(Self { ledger, model, overrides, peaks, limits })
    }

    fn times(&self, load: &StepLoad, (batch, tokens, context): Alike) -> Result<Times> {
        let ranks = self.ledger.header.ranks;
        let records = engine::record_rank(&self.model.dir, &self.overrides, ranks, (batch, tokens, context))?;
        Ok(Times::new(self.ledger, load, &records, self.peaks)?)
    }

    /// Rate of each op over its FLOPs per byte, for the steps whose ops were timed: decode steps, and prompts.
    pub fn roofline(&self) -> Result<[Panel; 2]> {
        let (top, slope) = (self.limits.0 / 1e12, self.limits.1 / 1e12);
        let panel = |title: &str, kind| -> Result<Panel> {
            let mut series = self.ops(kind)?;
            let xs = || series.iter().flat_map(|op| &op.points).map(|at| at.0).filter(|x| *x > 0.0);
            let (least, most) = (xs().fold(top / slope, f64::min), xs().fold(2.0 * top / slope, f64::max));
            let limit = vec![(least, slope * least), (top / slope, top), (most, top)];
            let name = format!("{:.0} GB/s, {top:.0} TFLOP/s", 1e3 * slope);
            series.push(Series { name, mark: Mark::Dashed, points: limit });
            Ok(Panel { title: format!("{title}, TFLOP/s"), x_label: "FLOPs per byte".into(), series })
        };
        Ok([
            panel("ops of decode steps by sequences", StepKind::Decode)?,
            panel("ops of prefill steps by tokens", StepKind::Prefill)?,
        ])
    }

    /// The ops of the timed steps of one kind.
    fn ops(&self, kind: StepKind) -> Result<Vec<Series>> {
        let mut ops: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let shares = OpShares::new(&self.ledger.ops);
        for load in shares.steps().filter(|load| load.kind() == kind) {
            let Some(alike) = alike(load) else { continue };
            let times = self.times(load, alike)?;
            for OpTime { op, bytes, flops, time, .. } in times.ops {
                let Some((us, step)) = time.us.zip(times.step.us).filter(|(us, step)| us / step >= SMALL_OP) else {
                    continue;
                };
                // Copies compute nothing.
                if flops > 0 {
                    let at = (flops as f64 / bytes as f64, flops as f64 / us / 1e6);
                    ops.entry(op).or_default().push(((load.tokens().to_string(), us / step), at));
                }
            }
        }
        let series = |(name, dots): (&str, Vec<_>)| {
            let (dots, points) = dots.into_iter().unzip();
            Series { name: name.into(), mark: Mark::Dots(dots), points }
        };
        Ok(ops.into_iter().map(series).collect())
    }

    /// Floor over measured time of each decode step, rows by context.
    pub fn efficiency(&self) -> Result<HeatMap> {
        let mut steps = Vec::new();
        for load in self.ledger.steps.iter().map(|line| &line.load).filter(|load| load.kind() == StepKind::Decode) {
            let Some(alike) = alike(load) else { continue };
            let Time { floor_us, us } = self.times(load, alike)?.step;
            let part = floor_us.zip(us).map(|(floor, us)| floor / us);
            steps.push(DecodeStep { sequences: alike.0, context: alike.2, part });
        }
        let sequences: BTreeSet<usize> = steps.iter().map(|step| step.sequences).collect();
        let contexts = contexts(&steps);
        let mut rows = Vec::new();
        for (&over, &context) in std::iter::once(&0).chain(&contexts).zip(&contexts) {
            let row_steps: Vec<_> =
                steps.iter().filter(|step| step.context > over && step.context <= context).collect();
            let cell = |n: &usize| row_steps.iter().find(|step| step.sequences == *n).and_then(|step| step.part);
            let prefix = if row_steps.iter().all(|step| step.context == context) { "" } else { "\u{2264} " };
            rows.push((format!("{prefix}{context}"), sequences.iter().map(cell).collect()));
        }
        let columns = sequences.iter().map(ToString::to_string).collect();
        let title = "tokens of context".to_owned();
        Ok(HeatMap { title, x_label: "sequences".into(), columns, rows })
    }
}

/// A measured decode step.
struct DecodeStep {
    sequences: usize,
    /// Context tokens of each sequence.
    context: usize,
    /// Floor over measured time.
    part: Option<f64>,
}

/// Contexts with their own row: those with at least a third as many steps as the most frequent one, and the longest.
/// Other contexts, which fill the KV cache, share the row of the next longer one.
fn contexts(steps: &[DecodeStep]) -> Vec<usize> {
    let all: BTreeSet<usize> = steps.iter().map(|step| step.context).collect();
    let count = |context: usize| steps.iter().filter(|step| step.context == context).count();
    let peak = all.iter().map(|context| count(*context)).max().unwrap_or(0);
    let longest = all.last().copied();
    all.into_iter().filter(|context| 3 * count(*context) > peak || Some(*context) == longest).collect()
}

/// The step as equal sequences, if they can be equal.
fn alike(load: &StepLoad) -> Option<Alike> {
    let alike = match (load.decode_rows, load.prefill_rows) {
        (rows @ 1.., 0) => (rows, 1, load.decode_kv / rows),
        (0, 1) => (1, load.prefill_tokens, load.prefill_tokens),
        _ => return None,
    };
    let (batch, tokens, context) = alike;
    (StepLoad::of_rows(vec![(tokens, context); batch]) == *load).then_some(alike)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ledger;

    #[test]
    fn ops_lie_below_the_limits_of_the_device() {
        let ledger = ledger();
        let [decode, prefill] = Floors::new(&ledger, Given::default()).unwrap().roofline().unwrap();
        let [limit, other] = [&decode, &prefill].map(|panel| panel.series.last().unwrap());
        assert_eq!((limit.name.as_str(), &limit.name), ("4800 GB/s, 989 TFLOP/s", &other.name));
        for panel in [&decode, &prefill] {
            for (x, y) in panel.series.iter().filter(|op| op.mark != Mark::Dashed).flat_map(|op| &op.points) {
                assert!(*y < 989.0_f64.min(4.8 * x), "{x} {y}");
            }
        }
        let dot = |name: &str, label: &str| {
            let op = decode.series.iter().find(|op| op.name == name).unwrap();
            let Mark::Dots(dots) = &op.mark else { panic!("{op:?}") };
            let i = dots.iter().position(|dot| dot.0 == label).unwrap();
            (op.points[i], dots[i].1)
        };
        // 114.8 GFLOP and 3.614 GB in 0.8144 ms, 29 % of 2.772 ms: what `plan --batch 32 --context 256` prints.
        let ((x, y), area) = dot("linear_swiglu", "32");
        assert!((x - 31.76).abs() < 0.01 && (y - 141.0).abs() < 0.1, "{x} {y}");
        assert!((area - 0.8144 / 2.7724).abs() < 1e-3);
        assert!(dot("decode_layers", "1").1 > 0.8);
        assert!(decode.series.iter().all(|op| op.name != "embedding"), "a copy has no FLOPs");
    }

    #[test]
    fn cells_are_what_plan_says_of_the_step() {
        let ledger = ledger();
        let HeatMap { columns, rows, .. } = Floors::new(&ledger, Given::default()).unwrap().efficiency().unwrap();
        assert_eq!(
            rows.iter().map(|(label, _)| label.as_str()).collect::<Vec<_>>(),
            ["16", "64", "256", "1024", "\u{2264} 4096"]
        );
        assert_eq!((columns.len(), columns[0].as_str(), columns[21].as_str()), (22, "1", "256"));
        assert!(rows.iter().all(|(_, cells)| cells.len() == 22 && cells.iter().all(Option::is_some)));
        let cell =
            |row: usize, column: &str| rows[row].1[columns.iter().position(|other| other == column).unwrap()].unwrap();
        assert!((cell(2, "32") - 0.711).abs() < 1e-3 && (cell(2, "1") - 0.760).abs() < 1e-3, "{rows:?}");
    }

    #[test]
    fn missing_inputs_are_named() {
        let mut ledger = ledger();
        ledger.config = None;
        let refused = |ledger: &Ledger, given: Given<'_>| Floors::new(ledger, given).err().unwrap().to_string();
        let given = Given::default();
        assert!(refused(&ledger, given).ends_with("the config.json of Qwen3-4B: give --model-path"));
        let tiny = pegainfer_testing::model_dir();
        let wrong = Given { model_path: tiny.to_str(), ..given };
        assert!(refused(&ledger, wrong).contains("vocabulary of"), "{}", refused(&ledger, wrong));
        ledger.header.device = "cuda:0 (another)".into();
        assert!(refused(&ledger, given).contains("the peak rates of cuda:0 (another) are not known"));
        let ledger = Ledger { config: self::ledger().config, ..ledger };
        let peaks = Given { read_gbs: Some(1000.0), peak_tflops: Some(100.0), ..given };
        let [decode, _] = Floors::new(&ledger, peaks).unwrap().roofline().unwrap();
        assert_eq!(decode.series.last().unwrap().name, "1000 GB/s, 100 TFLOP/s");
    }
}
