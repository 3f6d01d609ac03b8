//! A ledger's times next to the recorded ops of a step.

use crate::bench::peaks::Peaks;
use crate::stale;
use pegainfer_core::ledger::{LawError, Ledger, OpShares, StepLoad};
use pegainfer_core::record::OpRecord;
use serde::Serialize;
use std::fmt;

/// The times of a step and of its ops.
#[derive(Debug, Serialize)]
pub struct Times {
    /// The device of the ledger.
    device: String,
    /// True if the ledger was measured with other kernels than this program's.
    stale: bool,
    /// The warning about a stale ledger.
    #[serde(skip)]
    warning: Option<String>,
    /// Source of the step's time; `None` if the ledger does not cover the step.
    source: Option<Source>,
    /// The step.
    pub step: Time,
    /// Each op, in the order of the plan.
    pub ops: Vec<OpTime>,
    /// The step with timed ops. Its shares give the times of the ops.
    shares_of: Option<StepLoad>,
}

/// Source of a step's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Source {
    /// The step was measured.
    Measured,
    /// Interpolated between the nearest measured steps.
    Interpolated,
}

/// A time and its lower bound.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Time {
    /// Microseconds of memory traffic or arithmetic at the device's peak rates; `None` if these are unknown.
    pub floor_us: Option<f64>,
    /// Microseconds from the ledger; `None` if it has no time.
    pub us: Option<f64>,
}

/// The time of an op's calls.
#[derive(Debug, PartialEq, Serialize)]
pub struct OpTime {
    /// Name of the op.
    pub op: &'static str,
    /// Number of calls in the step.
    pub calls: usize,
    /// Bytes moved by all calls.
    pub bytes: u64,
    /// Floating-point operations of all calls.
    pub flops: u64,
    /// The time of all calls.
    #[serde(flatten)]
    pub time: Time,
}

impl Times {
    /// The times of a step with this load and the ops `records`, on a device with these peak rates.
    pub fn new(ledger: &Ledger, load: &StepLoad, records: &[OpRecord], peaks: Peaks) -> Result<Self, LawError> {
        let predicted = ledger.law()?.time(load);
        let source = match ledger.steps.iter().any(|line| line.load == *load) {
            true => Some(Source::Measured),
            false => predicted.covered.then_some(Source::Interpolated),
        };
        let us = source.map(|_| predicted.us);
        let shares = OpShares::new(&ledger.ops);
        let mut ops: Vec<OpTime> = Vec::new();
        for record in records {
            let floor_us = peaks.floor_us(record.bytes, record.flops);
            match ops.iter_mut().find(|op| op.op == record.op) {
                Some(op) => {
                    op.calls += 1;
                    op.bytes += record.bytes;
                    op.flops += record.flops;
                    op.time.floor_us = op.time.floor_us.zip(floor_us).map(|(sum, floor)| sum + floor);
                }
                None => {
                    let us = us.zip(shares.share(load, record.op)).map(|(us, share)| us * share);
                    let OpRecord { op, bytes, flops, .. } = *record;
                    ops.push(OpTime { op, calls: 1, bytes, flops, time: Time { floor_us, us } });
                }
            }
        }
        // Another build may have fused or split an op, so that its time is that of other work.
        ops.iter_mut().filter(|op| op.calls != shares.calls(load, op.op)).for_each(|op| op.time.us = None);
        let floor_us = ops.iter().map(|op| op.time.floor_us).sum();
        let shares_of = us.and(shares.nearest(load)).map(|(step, _)| *step);
        let (device, warning) = (ledger.header.device.clone(), stale::warning(&ledger.header));
        Ok(Self { device, stale: warning.is_some(), warning, source, step: Time { floor_us, us }, ops, shares_of })
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{}: the ledger's times, and the least at the device's peak rates", self.device)?;
        writeln!(f, "{:<22} {:>5} {:>11} {:>11} {:>9}", "op", "calls", "floor ms", "ms", "% floor")?;
        for OpTime { op, calls, time, .. } in &self.ops {
            writeln!(f, "{op:<22} {calls:>5} {time}")?;
        }
        let calls: usize = self.ops.iter().map(|op| op.calls).sum();
        writeln!(f, "{:<22} {calls:>5} {}", "step", self.step)?;
        match self.source {
            Some(Source::Measured) => writeln!(f, "the step was measured")?,
            Some(Source::Interpolated) => writeln!(f, "the step is interpolated from measured ones")?,
            None => writeln!(f, "the ledger does not cover this step")?,
        }
        if let Some(StepLoad { decode_rows, decode_kv, prefill_rows, prefill_tokens, .. }) = self.shares_of {
            writeln!(
                f,
                "times of ops: the step's, shared as in the nearest one whose ops were timed ({decode_rows} decoding sequences \
                 with {decode_kv} KV tokens, {prefill_rows} chunks with {prefill_tokens} tokens)"
            )?;
        }
        if let Some(warning) = &self.warning {
            writeln!(f, "{warning}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
        let part = self.floor_us.zip(self.us).map(|(floor, us)| 100.0 * floor / us);
        let ms = |us: Option<f64>| number(us.map(|us| us / 1e3), 4);
        write!(f, "{:>11} {:>11} {:>9}", ms(self.floor_us), ms(self.us), number(part, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::exec::Device;
    use pegainfer_core::ledger::{Header, HostCost, OpLine, StepLine};
    use pegainfer_kernels::sources::{self, Family};
    use pegainfer_models::engine;
    use pegainfer_runtime::Overrides;
    use pegainfer_testing::model_dir;

    const PEAKS: Peaks = Peaks { read_bytes_s: Some(1e9), flop_s: Some(1e12) };

    fn load(rows: usize, context: usize) -> StepLoad {
        StepLoad::of_rows(vec![(1, context); rows])
    }

    fn ledger() -> Ledger {
        let line = |load, us| StepLine { load, us, spread: 0.0, runs: 1 };
        let prefill = line(StepLoad::of_rows([(64, 64)]), 9000.0);
        let steps = vec![line(load(1, 100), 1000.0), line(load(4, 100), 4000.0), prefill];
        let records = engine::record(&model_dir(), &Overrides::default(), 4, 1, 100).unwrap();
        let op = |op: &str, us| {
            let calls = records.iter().filter(|record| record.op == op).count();
            OpLine { load: load(4, 100), op: op.into(), calls, us, ..OpLine::default() }
        };
        let ops = vec![op("linear", 600.0), op("decode_attention", 200.0)];
        let header = Header {
            version: Header::VERSION,
            program: String::new(),
            kernels: sources::hash(Device::Meta, Family::Qwen).into(),
            measured: None,
            model: "qwen3-tiny".into(),
            device: "cpu".into(),
            ranks: 1,
            driver: None,
            quantization: None,
            kv_cache_dtype: "bf16".into(),
            kv_blocks: 100,
            block_size: 16,
            max_model_len: 4096,
            vocab_size: 1000,
            max_num_seqs: 8,
            max_num_batched_tokens: 512,
            max_num_mixed_tokens: 512,
            depth: 1,
            graphs: false,
            state: None,
        };
        Ledger { header, host: HostCost::default(), config: None, anchor: None, steps, ops, kernels: Vec::new() }
    }

    fn times(rows: usize, peaks: Peaks) -> Times {
        let records = engine::record(&model_dir(), &Overrides::default(), rows, 1, 100).unwrap();
        Times::new(&ledger(), &load(rows, 100), &records, peaks).unwrap()
    }

    #[test]
    fn an_op_of_another_plan_has_no_time() {
        let mut ledger = ledger();
        ledger.ops[0].calls -= 1;
        let records = engine::record(&model_dir(), &Overrides::default(), 4, 1, 100).unwrap();
        let times = Times::new(&ledger, &load(4, 100), &records, PEAKS).unwrap();
        let us = |name: &str| times.ops.iter().find(|op| op.op == name).unwrap().time.us;
        assert_eq!((us("linear"), us("decode_attention")), (None, Some(1000.0)));
    }

    #[test]
    fn a_measured_step_is_shared_among_its_ops() {
        let times = times(4, PEAKS);
        assert_eq!(
            (times.source, times.step.us, times.shares_of),
            (Some(Source::Measured), Some(4000.0), Some(load(4, 100)))
        );
        let of = |name: &str| times.ops.iter().find(|op| op.op == name).unwrap();
        assert_eq!((of("linear").time.us, of("sample").time.us), (Some(3000.0), None), "{times}");
        // An op's floor is the sum over its calls; the step's floor is the sum over its ops.
        let records = engine::record(&model_dir(), &Overrides::default(), 4, 1, 100).unwrap();
        let floor = |name: &str| {
            let records = records.iter().filter(|record| record.op == name);
            records.map(|r| (r.bytes as f64 / 1e9).max(r.flops as f64 / 1e12) * 1e6).sum::<f64>()
        };
        assert!((of("linear").time.floor_us.unwrap() / floor("linear") - 1.0).abs() < 1e-9);
        let linear = || records.iter().filter(|record| record.op == "linear");
        assert_eq!(of("linear").bytes, linear().map(|record| record.bytes).sum::<u64>());
        assert_eq!(of("linear").flops, linear().map(|record| record.flops).sum::<u64>());
        assert_eq!(times.ops.iter().map(|op| op.calls).sum::<usize>(), records.len());
        let sum: f64 = times.ops.iter().map(|op| op.time.floor_us.unwrap()).sum();
        assert!((times.step.floor_us.unwrap() / sum - 1.0).abs() < 1e-9);
        let text = times.to_string();
        let sample = text.lines().find(|line| line.starts_with("sample")).unwrap();
        assert!(sample.trim_end().ends_with("-         -"), "no time was measured: {sample}");
        assert!(text.contains("the step was measured") && !text.contains("stale"), "{text}");
    }

    #[test]
    fn steps_between_measured_ones_are_interpolated_and_others_have_no_time() {
        let between = times(2, PEAKS);
        assert_eq!((between.source, between.step.us), (Some(Source::Interpolated), Some(2000.0)));
        let beyond = times(8, PEAKS);
        assert_eq!((beyond.source, beyond.step.us, beyond.shares_of), (None, None, None));
        assert!(beyond.ops.iter().all(|op| op.time.us.is_none()) && beyond.step.floor_us.is_some());
        assert!(beyond.to_string().contains("the ledger does not cover this step"));
    }

    #[test]
    fn without_the_rates_of_the_device_there_is_no_floor() {
        let times = times(4, Peaks { flop_s: None, ..PEAKS });
        assert_eq!(times.step, Time { floor_us: None, us: Some(4000.0) });
        assert!(times.to_string().lines().any(|line| line.starts_with("step") && line.ends_with("-")));
        assert_eq!(serde_json::to_value(&times).unwrap()["step"]["floor_us"], serde_json::Value::Null);
    }
}
