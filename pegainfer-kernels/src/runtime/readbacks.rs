//! The readbacks of all steps in flight.

use super::results::Results;
use super::sampler::Sampler;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::{Outcome, STEPS_IN_FLIGHT, SampleRow};
use pegainfer_core::tensor::OpError;

/// The results of the steps in flight.
#[derive(Debug)]
pub struct Readbacks {
    /// Step `n` has number `n % STEPS_IN_FLIGHT`.
    results: [Results; STEPS_IN_FLIGHT],
    /// Steps that were started so far.
    started: usize,
    /// Steps that were finished or abandoned so far.
    finished: usize,
}

impl Readbacks {
    /// For steps of at most `rows` samples.
    pub fn new(exec: &mut Exec, rows: usize) -> std::io::Result<Self> {
        let results = [Results::new(exec, rows)?, Results::new(exec, rows)?];
        Ok(Self { results, started: 0, finished: 0 })
    }

    /// Starts the readback of what `samples` drew: the end of a launch.
    pub fn start(&mut self, exec: &mut Exec, sampler: &mut Sampler, samples: &[SampleRow]) -> Result<(), OpError> {
        assert!(self.started - self.finished < STEPS_IN_FLIGHT, "too many steps in flight");
        sampler.start_readback(exec, samples, &mut self.results[self.started % STEPS_IN_FLIGHT])?;
        self.started += 1;
        Ok(())
    }

    /// Waits for the oldest step in flight.
    pub fn finish(&mut self) -> Result<Outcome, OpError> {
        assert!(self.finished < self.started, "no step is in flight");
        let outcome = self.results[self.finished % STEPS_IN_FLIGHT].wait()?;
        self.finished += 1;
        Ok(outcome)
    }

    /// Forgets every step in flight; the device must be done with them.
    pub fn abandon(&mut self) {
        self.finished = self.started;
    }
}
