//! Shares of ops in the time of a step.

use super::file::OpLine;
use super::load::StepLoad;

/// Shares of ops, from the steps whose ops were timed.
#[derive(Debug, Clone, Default)]
pub struct OpShares {
    names: Vec<String>,
    /// Load of each such step, and the share of each op.
    steps: Vec<(StepLoad, Vec<f64>)>,
    /// Calls of each op in the same steps.
    calls: Vec<Vec<usize>>,
}

impl OpShares {
    /// The shares of the ops of a ledger.
    pub fn new(lines: &[OpLine]) -> Self {
        let mut all = Self::default();
        for line in lines {
            let op = all.names.iter().position(|name| *name == line.op).unwrap_or_else(|| {
                all.names.push(line.op.clone());
                all.names.len() - 1
            });
            let step = all.steps.iter().position(|(load, _)| *load == line.load).unwrap_or_else(|| {
                all.steps.push((line.load, Vec::new()));
                all.calls.push(Vec::new());
                all.steps.len() - 1
            });
            let shares = &mut all.steps[step].1;
            shares.resize(shares.len().max(op + 1), 0.0);
            shares[op] += line.us;
            let calls = &mut all.calls[step];
            calls.resize(calls.len().max(op + 1), 0);
            calls[op] += line.calls;
        }
        for (_, shares) in &mut all.steps {
            let sum: f64 = shares.iter().sum();
            shares.iter_mut().for_each(|share| *share /= sum.max(f64::MIN_POSITIVE));
        }
        all
    }

    /// Names of the ops.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Loads of the steps whose ops were timed.
    pub fn steps(&self) -> impl Iterator<Item = &StepLoad> {
        self.steps.iter().map(|(load, _)| load)
    }

    /// The step of the same kind that is nearest in size, and the known shares of its ops in the order of
    /// [`names`](Self::names); `None` if no step of that kind was timed.
    pub fn nearest(&self, load: &StepLoad) -> Option<(&StepLoad, &[f64])> {
        self.index_of_nearest(load).map(|at| (&self.steps[at].0, &self.steps[at].1[..]))
    }

    fn index_of_nearest(&self, load: &StepLoad) -> Option<usize> {
        let (kind, tokens) = (load.kind(), load.tokens());
        let same = self.steps.iter().enumerate().filter(|(_, (other, _))| other.kind() == kind);
        same.min_by_key(|(_, (other, _))| other.tokens().abs_diff(tokens)).map(|(at, _)| at)
    }

    /// Calls of the op with this name in [`nearest`](Self::nearest).
    pub fn calls(&self, load: &StepLoad, op: &str) -> usize {
        let place = self.names.iter().position(|name| name == op);
        let calls = self.index_of_nearest(load).zip(place).and_then(|(at, place)| self.calls[at].get(place));
        calls.copied().unwrap_or(0)
    }

    /// The shares of [`nearest`](Self::nearest); empty if no step of that kind was timed.
    pub fn of(&self, load: &StepLoad) -> &[f64] {
        self.nearest(load).map_or(&[], |(_, shares)| shares)
    }

    /// Share of the op with this name in [`nearest`](Self::nearest); `None` if there is no such op.
    pub fn share(&self, load: &StepLoad, op: &str) -> Option<f64> {
        let place = self.names.iter().position(|name| name == op)?;
        self.of(load).get(place).copied().filter(|share| *share > 0.0)
    }

    /// Adds the ops of a step of `seconds` to `ops`.
    pub fn add(&self, load: &StepLoad, seconds: f64, ops: &mut Vec<f64>) {
        ops.resize(self.names.len(), 0.0);
        ops.iter_mut().zip(self.of(load)).for_each(|(op, share)| *op += share * seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_shared_as_the_nearest_one() {
        let load = |rows: usize| StepLoad { decode_rows: rows, decode_kv: rows, ..StepLoad::default() };
        let line = |rows, op: &str, us| OpLine { load: load(rows), op: op.into(), calls: 1, us, ..OpLine::default() };
        let shares = OpShares::new(&[line(1, "linear", 30.0), line(1, "norm", 10.0), line(8, "linear", 20.0)]);
        assert_eq!(shares.names(), ["linear", "norm"]);
        assert_eq!((shares.share(&load(2), "norm"), shares.share(&load(9), "norm")), (Some(0.25), None));
        assert_eq!((shares.calls(&load(2), "norm"), shares.calls(&load(9), "norm")), (1, 0));
        assert_eq!(shares.nearest(&load(5)).map(|(step, _)| step.decode_rows), Some(8));
        let mut ops = Vec::new();
        shares.add(&load(2), 4.0, &mut ops);
        assert_eq!(ops, [3.0, 1.0]);
        shares.add(&load(7), 4.0, &mut ops);
        assert_eq!(ops, [7.0, 1.0]);
        shares.add(&StepLoad { prefill_rows: 1, prefill_tokens: 9, ..StepLoad::default() }, 1.0, &mut ops);
        assert_eq!(ops, [7.0, 1.0], "no step of that kind was timed");
    }
}
