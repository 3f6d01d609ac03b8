//! What an executor keeps from step to step, whatever the model.

use super::{Inputs, Results, Sampler};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::schedule::{Graphs, Outcome, STEPS_IN_FLIGHT, SampleRow};
use pegainfer_core::tensor::OpError;

/// Largest step.
#[derive(Debug, Clone, Copy)]
pub struct StepSize {
    /// Input tokens.
    pub tokens: usize,
    /// Rows.
    pub rows: usize,
    /// Tokens of context.
    pub context: usize,
}

/// Device, inputs and results of the steps of a model; `W` is its own workspace.
#[derive(Debug)]
pub struct StepState<W> {
    /// Where ops run.
    pub exec: Exec,
    /// Inputs of the newest step.
    pub inputs: Inputs,
    /// Its activations.
    pub work: W,
    /// Its tokens.
    pub sampler: Sampler,
    /// Of decode steps.
    pub graphs: Graphs,
    /// Used in turn.
    results: [Results; STEPS_IN_FLIGHT],
    /// Steps so far.
    launched: usize,
    /// Steps so far.
    finished: usize,
}

impl<W> StepState<W> {
    /// Allocates everything but the workspace. `vocab`: ids of the vocabulary; `graphs`: whether a GPU replays decode
    /// steps.
    pub fn new(mut exec: Exec, vocab: usize, size: StepSize, graphs: bool, work: W) -> std::io::Result<Self> {
        if exec.device() == Device::Cuda {
            cuda::copy_by_kernels(&mut exec).map_err(std::io::Error::other)?;
        }
        let StepSize { tokens, rows, context } = size;
        let inputs = Inputs::new(&mut exec, vocab, tokens, rows, context)?;
        let sampler = Sampler::new(&mut exec, vocab, rows)?;
        let results = [Results::new(&mut exec, rows)?, Results::new(&mut exec, rows)?];
        let largest = if graphs && exec.device() == Device::Cuda { sampler.max_rows() } else { 0 };
        let graphs = Graphs::new(largest);
        Ok(Self { exec, inputs, work, sampler, graphs, results, launched: 0, finished: 0 })
    }

    /// Steps that it helps to have in flight: a device that computes beside the host can have the next one waiting.
    pub fn useful_depth(&self) -> usize {
        if self.exec.device() == Device::Cuda { STEPS_IN_FLIGHT } else { 1 }
    }

    /// Begins to copy what `samples` drew to the host: the end of a launch.
    pub fn launched(&mut self, samples: &[SampleRow]) -> Result<(), OpError> {
        assert!(self.launched - self.finished < STEPS_IN_FLIGHT, "too many steps in flight");
        let Self { exec, sampler, results, .. } = self;
        sampler.report(exec, samples, &mut results[self.launched % STEPS_IN_FLIGHT])?;
        self.launched += 1;
        Ok(())
    }

    /// Waits for the oldest step in flight.
    pub fn finish(&mut self) -> Result<Outcome, OpError> {
        assert!(self.finished < self.launched, "no step is in flight");
        let outcome = self.results[self.finished % STEPS_IN_FLIGHT].wait()?;
        self.finished += 1;
        Ok(outcome)
    }

    /// Forgets every step in flight, once the device is done with them; an error says that the device is lost.
    pub fn abandon(&mut self) -> Result<(), OpError> {
        self.finished = self.launched;
        self.exec.synchronize()
    }
}
