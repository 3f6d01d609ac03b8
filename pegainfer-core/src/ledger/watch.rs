//! Compares the time of each served step with the law's prediction and finds the op that has become slower.
//!
//! The steps of a machine differ from those of the ledger: another card, another clock, other load. Predictions of each
//! kind of step are therefore scaled by the median of measured over predicted. A step that then takes more than twice
//! as long, and at least 2 ms longer, starts an investigation of the next steps. From the next slow step on, ops are
//! timed, which costs the overlap of steps. If most of these steps are slow, the op with the largest excess is named.
//! Otherwise the step was slow once: the host or the driver had other work, or a kernel was used for the first time.

use super::law::Law;
use super::load::{StepKind, StepLoad};
use super::op_shares::OpShares;
use std::fmt;
use std::time::Duration;

/// Number of steps of a kind before its steps are judged.
const MIN_STEPS: u64 = 32;
/// Measured over predicted time above which a step is slow, if it also takes [`MIN_EXCESS_US`] longer.
const SLOW: f64 = 2.0;
/// Minimum excess of a slow step over its predicted time, in microseconds.
const MIN_EXCESS_US: f64 = 2000.0;
/// Steps of an investigation.
const INVESTIGATED: usize = 16;
/// Minimum share of the excess for one op to be named.
const MIN_OP_PART: f64 = 0.5;
/// Minimum share of the time for an op to count when estimating how much slower all ops are.
const MIN_LARGE_PART: f64 = 0.05;
/// Step size of the running median estimate.
const MEDIAN_STEP: f64 = 0.02;

/// Cause of slow steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// One op takes most of the excess time.
    Op,
    /// All ops are slower: lower clock, or other work on the device.
    Device,
    /// The next steps were fast again.
    Once,
    /// Steps stay slow, and no op was timed.
    Unknown,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 4] = [Self::Op, Self::Device, Self::Once, Self::Unknown];

    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Op => "op",
            Self::Device => "device",
            Self::Once => "once",
            Self::Unknown => "unknown",
        }
    }
}

/// A slow step and the result of its investigation.
#[derive(Debug, Clone, PartialEq)]
pub struct Anomaly {
    /// Number of the step.
    pub step: u64,
    /// Load of the step.
    pub load: StepLoad,
    /// Measured microseconds.
    pub took_us: f64,
    /// Predicted microseconds.
    pub predicted_us: f64,
    /// Why.
    pub cause: Cause,
    /// The op with the largest excess in the steps after it, and its mean excess in microseconds.
    pub op: Option<(String, f64)>,
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (took, predicted) = (self.took_us / 1e3, self.predicted_us / 1e3);
        let (kind, tokens) = (self.load.kind().name(), self.load.tokens());
        write!(f, "step {} ({kind}, {tokens} tokens) took {took:.1} ms, {predicted:.1} predicted: ", self.step)?;
        match (self.cause, &self.op) {
            (Cause::Op, Some((op, us))) => write!(f, "{op} +{:.1} ms in each of the next steps", us / 1e3),
            (Cause::Device, _) => f.write_str("all ops are slower; other work on the device, or a lower clock?"),
            (Cause::Once, _) => f.write_str("the next steps were not"),
            _ => f.write_str("the next steps were slow as well"),
        }
    }
}

/// Detector of slow steps and its state.
#[derive(Debug)]
pub struct Watch {
    law: Law,
    shares: OpShares,
    /// Number of steps of each kind, and their median of ln(measured / predicted).
    kinds: [(u64, f64); 3],
    investigation: Option<Investigation>,
}

/// Investigation of the steps after a slow one.
#[derive(Debug)]
struct Investigation {
    anomaly: Anomaly,
    steps: usize,
    slow: usize,
    /// Number of steps whose ops were timed.
    timed: usize,
    ops: Vec<OpSum>,
}

/// An op in these steps.
#[derive(Debug)]
struct OpSum {
    name: String,
    /// Measured microseconds.
    us: f64,
    /// Expected microseconds.
    expected: f64,
}

impl Watch {
    /// A detector that has seen no steps.
    pub fn new(law: Law, shares: OpShares) -> Self {
        Self { law, shares, kinds: [(0, 0.0); 3], investigation: None }
    }

    /// Predicted time of a step in microseconds; `None` outside the law's range.
    pub fn predict(&self, load: &StepLoad) -> Option<f64> {
        Some(self.law.time(load)).filter(|prediction| prediction.covered).map(|prediction| prediction.us)
    }

    /// Shares of ops in step times.
    pub fn shares(&self) -> &OpShares {
        &self.shares
    }

    /// True if the ops of the next step are to be timed.
    pub fn times_ops(&self) -> bool {
        self.investigation.as_ref().is_some_and(|investigation| investigation.slow > 0)
    }

    /// True if the last step was slow or follows a slow step.
    pub fn investigates(&self) -> bool {
        self.investigation.is_some()
    }

    /// Adds step `number`, which took `took`; [`predict`](Self::predict) gave `predicted` microseconds. `ops`: op
    /// times, if requested and supported by the device. Returns the result of an investigation that ends with this
    /// step.
    pub fn add_step(
        &mut self,
        number: u64,
        load: &StepLoad,
        (took, predicted): (Duration, f64),
        ops: &[(&str, Duration)],
    ) -> Option<Anomaly> {
        if predicted <= 0.0 {
            return None;
        }
        let took_us = took.as_secs_f64() * 1e6;
        let kind = StepKind::ALL.iter().position(|kind| *kind == load.kind())?;
        let (seen, median) = &mut self.kinds[kind];
        let scale = median.exp();
        let ratio = (took_us / predicted).max(1e-9).ln();
        // Each step moves the estimate a little towards its own side, early steps more: outliers count no more than
        // others.
        let away = ratio - *median;
        let most = MEDIAN_STEP.max(1.0 / (*seen + 1) as f64);
        *median += if *seen == 0 { away } else { away.clamp(-most, most) };
        *seen += 1;
        let expected = predicted * scale;
        let slow = *seen > MIN_STEPS && took_us > SLOW * expected && took_us > expected + MIN_EXCESS_US;
        if self.investigation.is_some() {
            return self.investigate(load, (slow, expected), ops);
        }
        if slow {
            let (cause, op) = (Cause::Unknown, None);
            let anomaly = Anomaly { step: number, load: *load, took_us, predicted_us: expected, cause, op };
            self.investigation = Some(Investigation { anomaly, steps: 0, slow: 0, timed: 0, ops: Vec::new() });
        }
        None
    }

    /// Adds one of the steps after a slow one.
    fn investigate(
        &mut self,
        load: &StepLoad,
        (slow, expected): (bool, f64),
        ops: &[(&str, Duration)],
    ) -> Option<Anomaly> {
        let investigation = self.investigation.as_mut()?;
        investigation.steps += 1;
        investigation.slow += usize::from(slow);
        investigation.timed += usize::from(!ops.is_empty());
        let mut times: Vec<(&str, f64)> = Vec::new();
        for (op, time) in ops {
            let us = time.as_secs_f64() * 1e6;
            match times.iter_mut().find(|(other, _)| other == op) {
                Some((_, sum)) => *sum += us,
                None => times.push((op, us)),
            }
        }
        let shares = self.shares.of(load);
        for (op, us) in times {
            let share =
                self.shares.names().iter().zip(shares).find(|(name, _)| *name == op).map_or(0.0, |share| *share.1);
            let expected = share * expected;
            match investigation.ops.iter_mut().find(|other| other.name == op) {
                Some(sum) => (sum.us, sum.expected) = (sum.us + us, sum.expected + expected),
                None => investigation.ops.push(OpSum { name: op.to_owned(), us, expected }),
            }
        }
        if investigation.steps < INVESTIGATED {
            return None;
        }
        self.investigation.take().map(Investigation::end)
    }
}

impl Investigation {
    fn end(self) -> Anomaly {
        let Self { anomaly, steps, slow, timed, ops } = self;
        let total = |value: fn(&OpSum) -> f64| ops.iter().map(value).sum::<f64>();
        let (us, expected) = (total(|op| op.us), total(|op| op.expected));
        // The smallest slowdown of any large op affects all ops, so no single op causes it.
        let large = ops.iter().filter(|op| op.expected > MIN_LARGE_PART * expected);
        let common = large.map(|op| op.us / op.expected).fold(f64::INFINITY, f64::min).max(1.0);
        let excess = |op: &OpSum| op.us - common.min(us / expected.max(1.0)) * op.expected;
        let worst = ops.iter().max_by(|a, b| excess(a).total_cmp(&excess(b)));
        let cause = match worst {
            _ if 2 * slow < steps => Cause::Once,
            Some(op) if excess(op) > MIN_OP_PART * (us - expected) => Cause::Op,
            Some(_) => Cause::Device,
            None => Cause::Unknown,
        };
        let op = worst.map(|op| (op.name.clone(), excess(op) / timed.max(1) as f64));
        Anomaly { cause, op, ..anomaly }
    }
}

#[cfg(test)]
mod tests {
    use super::super::file::OpLine;
    use super::super::load::StepLine;
    use super::*;

    const LOAD: StepLoad = StepLoad { decode_rows: 1, decode_kv: 10, prefill_rows: 0, prefill_tokens: 0, pairs: 0 };

    /// Decode steps take 4 ms: 3 of linear, 1 of attention.
    fn watch() -> Watch {
        let prefill = StepLoad { prefill_rows: 1, prefill_tokens: 9, pairs: 45, ..StepLoad::default() };
        let line = |load, us| StepLine { load, us, spread: 0.0, runs: 1 };
        let law = Law::new(&[line(LOAD, 4000.0), line(prefill, 1.0)], false).unwrap();
        let op = |op: &str, us| OpLine { load: LOAD, op: op.into(), calls: 1, us, ..OpLine::default() };
        Watch::new(law, OpShares::new(&[op("linear", 3000.0), op("attention", 1000.0)]))
    }

    /// Steps of a machine that is `scale` times as fast, of `linear` and `attention` milliseconds; the last anomaly.
    fn run(watch: &mut Watch, steps: u64, (linear, attention): (f64, f64)) -> Option<Anomaly> {
        let time = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let mut last = None;
        for step in 0..steps {
            let ops = [("linear", time(linear)), ("attention", time(attention))];
            let ops = if watch.times_ops() { &ops[..] } else { &[] };
            let predicted = watch.predict(&LOAD).unwrap();
            last = watch.add_step(step, &LOAD, (time(linear + attention), predicted), ops).or(last);
        }
        last
    }

    #[test]
    fn a_machine_of_another_speed_is_no_anomaly() {
        for scale in [0.3, 1.0, 5.0] {
            assert_eq!(run(&mut watch(), 500, (3.0 * scale, scale)), None, "{scale}");
        }
    }

    #[test]
    fn a_slow_op_is_named() {
        let mut watch = watch();
        assert_eq!(run(&mut watch, 100, (6.0, 2.0)), None);
        let anomaly = run(&mut watch, 20, (6.0, 14.0)).unwrap();
        assert_eq!(anomaly.cause, Cause::Op);
        let (op, us) = anomaly.op.clone().unwrap();
        assert!(op == "attention" && (us - 12_000.0).abs() < 600.0, "{op} {us}");
        assert!(anomaly.to_string().contains("took 20.0 ms, 8.0 predicted: attention +1"), "{anomaly}");
    }

    #[test]
    fn a_device_on_which_all_is_slower_is_told_from_an_op() {
        let mut watch = watch();
        run(&mut watch, 100, (3.0, 1.0));
        assert_eq!(run(&mut watch, 20, (9.1, 2.9)).unwrap().cause, Cause::Device);
    }

    #[test]
    fn a_single_slow_step_is_told_from_a_slow_device() {
        let mut watch = watch();
        run(&mut watch, 100, (3.0, 1.0));
        assert_eq!(run(&mut watch, 1, (300.0, 1.0)), None);
        let anomaly = run(&mut watch, 20, (3.0, 1.0)).unwrap();
        assert_eq!((anomaly.cause, anomaly.step), (Cause::Once, 0));
    }

    #[test]
    fn short_excesses_and_the_first_steps_are_not_judged() {
        let mut watch = watch();
        assert_eq!(run(&mut watch, 20, (30.0, 10.0)), None);
        let mut fast = self::watch();
        run(&mut fast, 100, (0.3, 0.1));
        assert_eq!(run(&mut fast, 40, (1.3, 0.1)), None, "1 ms more is less than the least excess");
    }
}
