//! Computes the logits of the sampled tokens from their residual streams.

use super::Pass;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{self as ops, HyperWeights};
use pegainfer_runtime::LogitsSource;
use std::ops::Range;

impl Pass<'_> {
    /// Mixes and normalises the streams of the sampled tokens with these weights: writes `last_normed`.
    pub(super) fn sampled_rows(&mut self, hyper: &HyperWeights, norm: &Tensor) -> Result<(), OpError> {
        let (rows, spec, eps) = (self.step.samples.len(), self.hyper_spec(), self.config.rms_norm_eps);
        let Self { exec, inputs, work, .. } = self;
        for tensor in [&mut work.last_streams, &mut work.last, &mut work.last_normed] {
            tensor.set_rows(rows);
        }
        if rows == 0 {
            return Ok(());
        }
        ops::pick_rows(exec, &work.streams, &inputs.common.sample_rows, &mut work.last_streams)?;
        ops::hyper_head(exec, &work.last_streams, hyper, spec, &mut work.last)?;
        ops::norm(exec, &work.last, norm, eps, &mut work.last_normed, None)
    }
}

/// The output matrix of a rank. All ranks get whole logits and sample the same tokens from them.
pub(crate) struct Head<'a> {
    /// `[samples, hidden]`.
    pub normed: &'a mut Tensor,
    /// The rank's rows, `[vocab / ranks, hidden]`.
    pub matrix: &'a Matrix,
    /// The rank's columns of the logits computed at once, `[logits_rows, vocab / ranks]` f32.
    pub part: &'a mut Tensor,
    /// The other ranks, if there are any.
    pub communicator: Option<&'a dyn Communicator>,
}

impl LogitsSource for Head<'_> {
    fn logits(&mut self, exec: &mut Exec, samples: Range<usize>, logits: &mut Tensor) -> Result<(), OpError> {
        self.normed.set_range(samples.start, samples.len());
        let Some(communicator) = self.communicator else {
            return ops::matmul(exec, &*self.normed, self.matrix, logits);
        };
        self.part.set_rows(samples.len());
        ops::matmul(exec, &*self.normed, self.matrix, self.part)?;
        communicator.all_gather(exec, self.part, logits)
    }
}
