//! Sampled tokens, their log-probabilities and vectors on their way to the host, while later steps run.

use super::sampler::Sampler;
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::readback::Readback;
use pegainfer_core::schedule::{Outcome, STEPS_IN_FLIGHT, SampleRow};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{REPORT_WORDS, token_logprobs};
use std::collections::VecDeque;

/// Results of steps or draft passes, finished in the order in which they were started.
#[derive(Debug)]
pub struct Readbacks {
    /// Maximum number of samples in a step.
    rows: usize,
    /// Oldest first.
    in_flight: VecDeque<Results>,
    /// Memory for more.
    free: Vec<Results>,
}

/// The results of one step.
#[derive(Debug)]
struct Results {
    readback: Readback,
    /// Log-probabilities requested by each sample; see `GenerateRequest::logprobs`.
    requested: Vec<Option<usize>>,
    /// Vectors of all samples, allocated when the first one is wanted.
    vectors: Option<Readback>,
    /// Samples whose vector is wanted; empty if there is none.
    wanted: Vec<bool>,
}

impl Readbacks {
    /// Readbacks of steps of up to `rows` samples, with memory for [`STEPS_IN_FLIGHT`] steps.
    pub fn new(exec: &mut Exec, rows: usize) -> std::io::Result<Self> {
        let free = (0..STEPS_IN_FLIGHT).map(|_| Results::new(exec, rows)).collect::<Result<_, _>>()?;
        Ok(Self { free, ..Self::on_demand(rows) })
    }

    /// Readbacks of passes of up to `rows` samples; memory grows with the number of passes in flight.
    pub fn on_demand(rows: usize) -> Self {
        Self { rows, in_flight: VecDeque::new(), free: Vec::new() }
    }

    /// Starts copying the tokens of `samples`, and their log-probabilities and vectors if requested. Does not wait.
    /// `normed`: what their logits were computed from, `[samples, hidden]` bf16, if the pass may have vectors.
    pub fn start(
        &mut self,
        exec: &mut Exec,
        sampler: &mut Sampler,
        normed: Option<&mut Tensor>,
        samples: &[SampleRow],
    ) -> Result<(), OpError> {
        let mut results = match self.free.pop() {
            Some(results) => results,
            None => Results::new(exec, self.rows).map_err(failed)?,
        };
        results.requested.clear();
        results.requested.extend(samples.iter().map(|row| row.logprobs));
        let tensors = if results.wants_logprobs() { 2 } else { 1 };
        sampler.drawn(samples.len(), |drawn| results.readback.start(exec, &drawn[..tensors]))?;
        results.wanted.clear();
        if let Some(normed) = normed.filter(|_| samples.iter().any(|row| row.vector)) {
            results.wanted.extend(samples.iter().map(|row| row.vector));
            normed.set_rows(samples.len());
            let bytes = self.rows * normed.rows_cols().1 * DType::Bf16.size();
            let vectors = match &mut results.vectors {
                Some(vectors) => vectors,
                none => none.insert(Readback::new(exec, bytes.next_multiple_of(64)).map_err(failed)?),
            };
            vectors.start(exec, &[normed])?;
        }
        self.in_flight.push_back(results);
        Ok(())
    }

    /// Waits for the oldest results in flight. On `Meta` there are no tokens.
    pub fn finish(&mut self) -> Result<Outcome, OpError> {
        let mut results = self.in_flight.pop_front().expect("a step is in flight");
        let outcome = results.wait()?;
        self.free.push(results);
        Ok(outcome)
    }

    /// Drops all results in flight; nothing may be started before the device is done with them.
    pub fn abandon(&mut self) {
        self.free.extend(self.in_flight.drain(..));
    }
}

fn failed(error: std::io::Error) -> OpError {
    OpError { op: "read back", message: error.to_string() }
}

impl Results {
    /// Memory for `rows` samples.
    fn new(exec: &mut Exec, rows: usize) -> std::io::Result<Self> {
        let bytes = |words: usize| (words * DType::U32.size()).next_multiple_of(64);
        let readback = Readback::new(exec, bytes(rows) + bytes(rows * REPORT_WORDS))?;
        Ok(Self { readback, requested: Vec::new(), vectors: None, wanted: Vec::new() })
    }

    fn wait(&mut self) -> Result<Outcome, OpError> {
        let wanted = self.wants_logprobs();
        let arrived = self.readback.wait()?;
        let tokens = arrived.tensor(0).to_vec();
        let logprobs = if wanted {
            let rows = arrived.tensor(1).chunks_exact(REPORT_WORDS).zip(&self.requested);
            rows.map(|(row, requested)| requested.map(|top| token_logprobs(row, top))).collect()
        } else {
            vec![None; tokens.len()]
        };
        Ok(Outcome { tokens, logprobs, vectors: self.vectors()?, ..Outcome::default() })
    }

    /// The vectors that are wanted; empty if none is.
    fn vectors(&mut self) -> Result<Vec<Option<Box<[f32]>>>, OpError> {
        let Some(readback) = self.vectors.as_mut().filter(|_| !self.wanted.is_empty()) else { return Ok(Vec::new()) };
        let arrived = readback.wait()?;
        let values = arrived.tensor::<bf16>(0);
        // On `Meta` there are no values.
        let rows = values.chunks_exact((values.len() / self.wanted.len()).max(1)).zip(&self.wanted);
        Ok(rows.map(|(row, wanted)| wanted.then(|| row.iter().map(|value| value.to_f32()).collect())).collect())
    }

    fn wants_logprobs(&self) -> bool {
        self.requested.iter().any(Option::is_some)
    }
}
