//! The normalised output of the sampled tokens from their residual streams.

use super::Pass;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{self as ops, HyperWeights};

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
