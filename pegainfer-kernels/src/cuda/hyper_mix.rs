//! `ops::deepseek_v4::hyper_mix` (tilelang/hyper_mix.py): a split-K GEMM of the streams and the mixing function, then
//! one kernel that adds the partial sums, mixes the streams and normalises (Sinkhorn).

use super::images;
use crate::cpu::deepseek_v4::hyper::STREAMS;
use crate::hyper_operands::{HyperSpec, HyperWeights};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

// As in tilelang/hyper_mix.py.
const THREADS: usize = 128;
const TOKENS: usize = 4;
const COLUMNS: usize = 1024;
const STRIDE: usize = 32;
const VECTOR: usize = 4;
/// Bytes of shared memory: `shared` of the GEMM kernel, `m` of the other one.
const PRODUCTS_SHARED: usize = 4 * TOKENS * STRIDE * 4;
const APPLY_SHARED: usize = STRIDE * 4;

/// The op on checked operands: streams and `mixed` in bf16.
pub(crate) fn hyper_mix(
    exec: &mut Exec,
    streams: &Tensor,
    weights: &HyperWeights,
    spec: HyperSpec,
    mixed: &mut Tensor,
    (post, comb): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let op = "hyper_mix";
    let refuse = |message| Err(OpError { op, message });
    if streams.dtype() != DType::Bf16 || mixed.dtype() != DType::Bf16 {
        return refuse("the GPU kernels take activations in bf16".to_owned());
    }
    let (tokens, hidden) = mixed.rows_cols();
    let splits = (STREAMS * hidden).div_ceil(COLUMNS);
    if tokens * splits * STRIDE * 4 > WORKSPACE_BYTES {
        return refuse(format!("{tokens} tokens of {hidden} elements: the partial sums exceed the workspace"));
    }
    if tokens == 0 {
        return Ok(());
    }
    let gpu = exec.gpu()?;
    let (partial, vectors) = (gpu.workspace(), hidden / VECTOR);
    let launch = gpu.launch(op, &images::HYPER_MIX, "hyper_mix_products_kernel")?.input(&weights.function);
    let launch = launch.pointer(partial).input(streams).u32(splits).u32(tokens).u32(vectors).shared(PRODUCTS_SHARED);
    // SAFETY: the parameters are PRODUCTS below; the op checked the shapes, and `partial` fits the workspace.
    unsafe { launch.run([splits, tokens.div_ceil(TOKENS), 1], THREADS)? };
    let launch = gpu.launch(op, &images::HYPER_MIX, "hyper_mix_apply_kernel")?.input(&weights.base).output(comb);
    let launch = launch.output(mixed).pointer(partial).output(post).input(&weights.scale).input(streams);
    let launch = launch.f32(spec.eps).u32(spec.iters).f32(spec.norm_eps).u32(splits).u32(tokens).u32(vectors);
    // SAFETY: the parameters are APPLY below; as above.
    unsafe { launch.shared(APPLY_SHARED).run([hidden.div_ceil(COLUMNS), tokens, 1], THREADS) }
}

#[cfg(test)]
mod tests {
    const SOURCE: &str = include_str!("../../tilelang/hyper_mix.cu");
    const PRODUCTS: &str = "hyper_mix_products_kernel(const float* __restrict__ function, float* __restrict__ partial, \
                            const bfloat16_t* __restrict__ streams, int splits, int tokens, int vectors)";
    const APPLY: &str = "hyper_mix_apply_kernel(const float* __restrict__ base, float* __restrict__ comb, \
                         bfloat16_t* __restrict__ mixed, const float* __restrict__ partial, float* __restrict__ post, \
                         const float* __restrict__ scale, const bfloat16_t* __restrict__ streams, float eps, int iters, \
                         float norm_eps, int splits, int tokens, int vectors)";

    /// TileLang orders the parameters by itself: tensors by name, then numbers by name.
    #[test]
    fn generated_kernels_take_what_the_launcher_gives() {
        for signature in [PRODUCTS, APPLY] {
            assert_eq!(SOURCE.matches(signature).count(), 1, "{signature}");
        }
        assert_eq!(SOURCE.matches("__launch_bounds__(128, 1)").count(), 2);
    }
}
