//! The experts of a layer: the routed ones, and the shared one if this rank adds it.

use super::experts::{ExpertMath, Experts, routed_experts, shared_expert};
use super::packed::Activation;
use super::side_stream::on_side_stream;
use super::values::activation;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// A rank's experts of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Moe<'a> {
    /// The routed experts.
    pub routed: &'a Experts,
    /// Number of the first routed expert of this rank.
    pub first: usize,
    /// The expert of all tokens; `None` if another rank adds it.
    pub shared: Option<&'a Experts>,
}

/// True if [`moe`] itself rounds `x`, `[T, hidden]` bf16 or f32, like `round_activation`: on a GPU if its kernels for
/// `T` tokens pack `x` in FP8 (csrc/experts/wgmma.cu, csrc/deepseek_v4/pack.cu), on a CPU always.
/// `scratch`: see [`moe`]. An error if the GPU is lost.
pub fn moe_rounds(
    exec: &mut Exec,
    x: &Tensor,
    experts: Moe<'_>,
    math: ExpertMath,
    scratch: &Tensor,
) -> Result<bool, OpError> {
    if exec.device() != Device::Cuda {
        return Ok(true);
    }
    let shared = experts.shared.map_or(Ok(true), |shared| gpu::is_large_expert(exec, x, shared, math, scratch))?;
    Ok(shared && gpu::packs_experts(exec, x, experts.routed, math)?)
}

/// Starts [`moe`] before the experts of the tokens are chosen, `k` per token. If `moe` has no kernels that compute
/// both, writes the output of the shared expert to `scratch`, concurrently with later ops until [`moe`]. Operands are
/// those of [`moe`].
pub fn begin_moe(
    exec: &mut Exec,
    x: Activation<'_>,
    k: usize,
    experts: Moe<'_>,
    math: ExpertMath,
    scratch: &mut Tensor,
) -> Result<(), OpError> {
    match experts.shared {
        Some(shared) if !gpu::fuses_experts(exec, x, (&experts, k), math)? => {
            let tokens = x.values.rows_cols().0;
            on_side_stream(exec, tokens, 0, |exec| shared_expert(exec, x.values, shared, math, scratch))
        }
        _ => Ok(()),
    }
}

/// `out = Σ_e routed expert e + shared expert`, see [`routed_experts`] and [`shared_expert`], in fewer launches on
/// devices with kernels for it. Follows [`begin_moe`].
///
/// `x`: `[T, hidden]` bf16 or f32; if the experts are in FP4 and FP8, values of `round_activation` unless
/// [`moe_rounds`], with packed rows if the device takes them; `chosen`: `[T, k]` u32; `weights`: `[T, k]` f32;
/// `scratch`: `[T, hidden]` of the dtype of `x`, from [`begin_moe`]; `out`: `[T, hidden]` of the dtype of `x`.
pub fn moe(
    exec: &mut Exec,
    x: Activation<'_>,
    (chosen, weights): (&Tensor, &Tensor),
    experts: Moe<'_>,
    math: ExpertMath,
    scratch: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("moe");
    if !gpu::fuses_experts(exec, x, (&experts, chosen.rows_cols().1), math)? {
        let (routed, shared) = ((experts.routed, experts.first), experts.shared.map(|_| scratch));
        return routed_experts(exec, x.values, (chosen, weights), routed, math, shared, out);
    }
    let ((tokens, hidden), k) = (x.values.rows_cols(), chosen.rows_cols().1);
    activation(check, x.values, &[tokens, hidden])?;
    check.is(chosen, DType::U32, &[tokens, k])?;
    check.is(weights, DType::F32, &[tokens, k])?;
    check.is(out, x.values.dtype(), &[tokens, hidden])?;
    let width = experts.routed.check(check, hidden)?;
    if let Some(shared) = experts.shared {
        check.that(shared.check(check, hidden)? == width, "the shared expert has a different width")?;
        check.that(shared.count == 1, "there is one shared expert")?;
    }
    exec.record(|_| {
        let count = experts.routed.count;
        // At most this many distinct experts are read.
        let read = count.min(tokens * k) as u64;
        let all: u64 = experts.routed.tensors().map(Tensor::bytes).sum();
        let shared: Vec<&Tensor> = experts.shared.into_iter().flat_map(Experts::tensors).collect();
        let shared_bytes: u64 = shared.iter().map(|tensor| tensor.bytes()).sum();
        let packed = x.packed.map_or(0, Tensor::bytes);
        let bytes = packed + out.bytes() + all / count.max(1) as u64 * read + shared_bytes;
        let flops = 6 * (tokens * (k + usize::from(experts.shared.is_some())) * hidden * width) as u64;
        let operands = [Some(x.values), Some(chosen), Some(weights), x.packed].into_iter().flatten();
        let reads: Vec<&Tensor> = operands.chain(experts.routed.tensors()).chain(shared).collect();
        OpRecord::new("moe", "experts_skinny", &reads, &[out], flops).with_bytes(bytes)
    });
    gpu::moe(exec, check.0, x, (chosen, weights), &experts, math, out)
}
