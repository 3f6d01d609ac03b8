//! Draws one token per row of logits.

use super::check::Check;
use crate::cpu::sampling::{self, SampleScratch};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// How to sample one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleSpec {
    /// Temperature, truncation and seed.
    pub params: SamplingParams,
    /// Position of the drawn token in its sequence: with the seed it names the random number.
    pub position: u64,
}

/// Samples each row by its own parameters: temperature, min-p, top-k, top-p, one draw; greedy rows take the most
/// likely token, the lowest id on a tie.
///
/// `logits`: `[rows, vocab]` f32; `specs`: one per row; `out`: `[rows]` u32. A GPU samples steps whose rows are all
/// greedy, without waiting; otherwise it copies the logits and the CPU twin samples.
pub fn sample(exec: &mut Exec, logits: &Tensor, specs: &[SampleSpec], out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("sample");
    let (rows, vocab) = logits.rows_cols();
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.is(out, DType::U32, &[rows])?;
    check.that(specs.len() == rows && vocab > 0, "one spec per row of logits")?;
    exec.record(|_| OpRecord::new("sample", "rows", &[logits], &[out], 2 * logits.elements() as u64));
    match exec.device() {
        Device::Cpu(_) => {
            let spec = |row: usize| (specs[row].params, specs[row].position);
            let mut scratch: Vec<SampleScratch> = (0..exec.threads()).map(|_| SampleScratch::default()).collect();
            sampling::sample_rows(logits.host(), vocab, spec, &mut scratch, out.host_mut());
            Ok(())
        }
        Device::Cuda if specs.iter().all(|spec| spec.params.is_greedy()) => cuda::argmax(exec, logits, out),
        Device::Cuda => {
            let mut tokens = vec![0u32; rows];
            sample_on_host(exec, logits, specs, &mut tokens)?;
            exec.write(out, 0..rows, |first, piece| piece.copy_from_slice(&tokens[first..][..piece.len()]))
        }
        Device::Meta => Ok(()),
    }
}

/// Copies the logits of a GPU and samples them with the CPU twin.
fn sample_on_host(exec: &mut Exec, logits: &Tensor, specs: &[SampleSpec], out: &mut [u32]) -> Result<(), OpError> {
    let vocab = logits.rows_cols().1;
    let mut memory = std::mem::take(&mut exec.scratch);
    let host = memory.slice::<f32>(logits.elements());
    let read = exec.read(logits, 0, host);
    if read.is_ok() {
        let spec = |row: usize| (specs[row].params, specs[row].position);
        let mut scratch: Vec<SampleScratch> = (0..exec.threads()).map(|_| SampleScratch::default()).collect();
        exec.on_host(|| sampling::sample_rows(host, vocab, spec, &mut scratch, out));
    }
    exec.scratch = memory;
    read
}
