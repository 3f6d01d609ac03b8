//! Runs one step repeatedly, as an engine runs its steps.

use super::measurable::Measurable;
use pegainfer_core::ledger::MeasureStep;
use pegainfer_core::tensor::OpError;
use std::time::{Duration, Instant};

/// Runs steps as the engine does: launches the next one while one runs, if the device computes concurrently with the
/// host.
pub struct Pipelined<'a, E>(pub &'a mut E);

impl<E: Measurable> MeasureStep for Pipelined<'_, E> {
    fn run(&mut self, rows: &[(usize, usize)], runs: usize) -> Result<Vec<Duration>, OpError> {
        let (step, depth) = (E::step(rows), self.0.useful_depth());
        let (mut times, mut in_flight, mut last) = (Vec::with_capacity(runs), 0, Instant::now());
        // With two steps in flight, the first time includes a launch. The last one lacks what ran while the step was
        // launched, because a launch waits if the device's queue is full.
        let extra = self.extra();
        for _ in 0..self.runs(runs) {
            self.0.launch(&step)?;
            self.0.sample(&step)?;
            in_flight += 1;
            if in_flight == depth {
                self.finish(&mut times, &mut last)?;
                in_flight -= 1;
            }
        }
        for _ in 0..in_flight {
            self.finish(&mut times, &mut last)?;
        }
        times.truncate(runs + extra);
        Ok(times.split_off(extra))
    }
}

impl<E: Measurable> Pipelined<'_, E> {
    /// Number of runs before and after the measured ones.
    fn extra(&self) -> usize {
        usize::from(self.0.useful_depth() > 1)
    }

    /// Total number of steps for `runs` measured ones.
    pub fn runs(&self, runs: usize) -> usize {
        runs + 2 * self.extra()
    }

    fn finish(&mut self, times: &mut Vec<Duration>, last: &mut Instant) -> Result<(), OpError> {
        self.0.finish()?;
        let now = Instant::now();
        times.push(now - std::mem::replace(last, now));
        Ok(())
    }
}
