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
/// `logits`: `[rows, vocab]` f32. One result per wanted row, in order; empty on `Meta`. A GPU copies the wanted rows and
/// the CPU twin computes.
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
            Ok(wanted.par_iter().map(|w| report(&logits[w.row * vocab..][..vocab], w)).collect())
        }
        Device::Cuda => {
            let mut memory = std::mem::take(&mut exec.scratch);
            let host = memory.slice::<f32>(wanted.len() * vocab);
            let mut rows = host.chunks_exact_mut(vocab).zip(wanted);
            let read = rows.try_for_each(|(to, w)| exec.read(logits, w.row * vocab, to));
            let host = &*host;
            let reports = |()| {
                exec.on_host(|| {
                    wanted.par_iter().zip(host.par_chunks_exact(vocab)).map(|(w, row)| report(row, w)).collect()
                })
            };
            let reports = read.map(reports);
            exec.scratch = memory;
            reports
        }
        Device::Meta => Ok(Vec::new()),
    }
}

fn report(row: &[f32], wanted: &LogprobRow) -> TokenLogprobs {
    let (logprob, rank, top) = sampling::logprobs_row(row, wanted.token, wanted.top);
    TokenLogprobs { logprob, rank, top }
}
