//! Draws one token per row of logits.

use super::check::Check;
use crate::choice::{self, sample_cluster};
use crate::cpu::sampling::{self, SampleScratch};
use crate::cuda;
use crate::draw::DRAW_WORDS;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Samples each row with its own parameters: temperature, min-p, top-k, top-p, one draw. Greedy rows take the most
/// likely token, the lowest id on ties. Equal logits give the same token on every device and in every batch.
///
/// `logits`: `[rows, vocab]` f32; `draws`: `[rows, DRAW_WORDS]` u32, packed [`Draw`](super::Draw)s; `out`: `[rows]`
/// u32. Does not wait for a GPU.
pub fn sample(exec: &mut Exec, logits: &Tensor, draws: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("sample");
    let (rows, vocab) = logits.rows_cols();
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.is(draws, DType::U32, &[rows, DRAW_WORDS])?;
    check.is(out, DType::U32, &[rows])?;
    check.that(vocab > 0, "the vocabulary is empty")?;
    let cluster = choice::gpu(exec)?.map(|gpu| sample_cluster(&gpu, rows));
    exec.record(|device| {
        let kernel = if device == Device::Cuda { "sample" } else { "rows" };
        OpRecord::new("sample", kernel, &[logits, draws], &[out], 2 * logits.elements() as u64)
    });
    match (exec.device(), cluster) {
        (Device::Cpu(_), _) => {
            let mut scratch: Vec<SampleScratch> = (0..exec.threads()).map(|_| SampleScratch::default()).collect();
            sampling::sample_rows(logits.host(), vocab, draws.host(), &mut scratch, out.host_mut());
        }
        (Device::Cuda, Some(blocks)) => cuda::sample(exec, blocks, logits, draws, out)?,
        _ => {}
    }
    Ok(())
}
