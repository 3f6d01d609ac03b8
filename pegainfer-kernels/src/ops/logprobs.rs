//! Log-probabilities of sampled tokens and of the most likely ones.

use super::check::Check;
use crate::cpu::sampling;
use pegainfer_core::engine::TokenLogprobs;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use rayon::prelude::*;

/// One row to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogprobRow {
    /// Row of the logits.
    pub row: usize,
    /// The sampled token.
    pub token: u32,
    /// How many of the most likely tokens to report.
    pub top: usize,
}

/// Log-softmax of raw logits (before temperature and truncation) at the sampled token and at the `top` best ones, best
/// first, the lower id first on a tie.
///
/// `logits`: `[rows, vocab]` f32. One result per wanted row, in order; empty on `Meta`.
pub fn logprobs(exec: &mut Exec, logits: &Tensor, wanted: &[LogprobRow]) -> Result<Vec<TokenLogprobs>, OpError> {
    let check = Check("logprobs");
    let (rows, vocab) = logits.rows_cols();
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.that(wanted.iter().all(|w| w.row < rows && (w.token as usize) < vocab), "a row or token is out of range")?;
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    exec.record(|_| {
        let elements = (wanted.len() * vocab) as u64;
        OpRecord::new("logprobs", "rows", &[logits], &[], 3 * elements).with_bytes(4 * elements)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let logits = logits.host::<f32>();
            let report = |w: &LogprobRow| {
                let (logprob, rank, top) = sampling::logprobs_row(&logits[w.row * vocab..][..vocab], w.token, w.top);
                TokenLogprobs { logprob, rank, top }
            };
            Ok(wanted.par_iter().map(report).collect())
        }
        Device::Meta => Ok(Vec::new()),
    }
}
