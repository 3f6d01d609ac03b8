//! The op of hyper-connections that has CUDA kernels.

use super::{Call, EPS, Output, unit};
use crate::ops::deepseek_v4::{HyperSpec, HyperWeights, hyper_mix};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;

/// Calls the op, if it is this one.
pub(super) fn run(exec: &mut Exec, call: &mut Call<'_>) -> Result<Option<Vec<Output>>, OpError> {
    if call.record.op != "hyper_mix" {
        return Ok(None);
    }
    let mut read = std::mem::take(&mut call.read).into_iter();
    let (Some(streams), Some(mut function), Some(base), Some(scale), [mixed, post, comb]) =
        (read.next(), read.next(), read.next(), read.next(), &mut call.written[..])
    else {
        return Ok(None);
    };
    // Products of a few units, as trained weights give: of larger ones the sigmoids and the softmax are 0 or 1.
    let elements = function.elements();
    let size = 4.0 / (elements as f32 / 24.0).sqrt();
    exec.write(&mut function, 0..elements, |first, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, v)| *v = size * unit(1, first + i));
    })?;
    let spec = HyperSpec { iters: 20, eps: 1e-6, norm_eps: EPS };
    hyper_mix(exec, &streams, &HyperWeights { function, base, scale }, spec, mixed, (post, comb))?;
    call.outputs(exec).map(Some)
}
