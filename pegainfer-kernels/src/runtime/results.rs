//! The readback of a step in flight.

use crate::ops::{REPORT_WORDS, token_logprobs};
use pegainfer_core::exec::Exec;
use pegainfer_core::readback::Readback;
use pegainfer_core::schedule::{Outcome, SampleRow};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// The sampled tokens and their log-probabilities, on their way to the host.
#[derive(Debug)]
pub struct Results {
    readback: Readback,
    /// What each sample row asked for, see `GenerateRequest::logprobs`.
    asked: Vec<Option<usize>>,
}

impl Results {
    /// For at most `rows` sample rows.
    pub fn new(exec: &mut Exec, rows: usize) -> std::io::Result<Self> {
        let bytes = |words: usize| (words * DType::U32.size()).next_multiple_of(64);
        let readback = Readback::new(exec, bytes(rows) + bytes(rows * REPORT_WORDS))?;
        Ok(Self { readback, asked: Vec::new() })
    }

    /// Begins to copy `sampled` (`[samples]` u32) and, if a row asked for them, `logprobs` (`[samples, REPORT_WORDS]`).
    pub(super) fn start(
        &mut self,
        exec: &mut Exec,
        samples: &[SampleRow],
        sampled: &Tensor,
        logprobs: &Tensor,
    ) -> Result<(), OpError> {
        self.asked.clear();
        self.asked.extend(samples.iter().map(|row| row.logprobs));
        let tensors = [sampled, logprobs];
        self.readback.start(exec, if self.wants_logprobs() { &tensors } else { &tensors[..1] })
    }

    /// Waits for the copies. On `Meta` there are no tokens.
    pub fn wait(&mut self) -> Result<Outcome, OpError> {
        let wanted = self.wants_logprobs();
        let arrived = self.readback.wait()?;
        let tokens = arrived.tensor(0).to_vec();
        let logprobs = if wanted {
            let rows = arrived.tensor(1).chunks_exact(REPORT_WORDS).zip(&self.asked);
            rows.map(|(row, asked)| asked.map(|top| token_logprobs(row, top))).collect()
        } else {
            vec![None; tokens.len()]
        };
        Ok(Outcome { tokens, logprobs, ..Outcome::default() })
    }

    fn wants_logprobs(&self) -> bool {
        self.asked.iter().any(Option::is_some)
    }
}
