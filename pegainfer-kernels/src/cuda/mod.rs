//! Launchers: one file per op or family of kernels. An op calls its launcher after checking the operands, with the
//! kernel and grid of [`choice`](crate::choice). The kernels are in csrc/, some in triton/ and tilelang/.

mod abi;
mod adjust;
mod attention;
mod attention_decode;
mod attention_operands;
mod attention_prefill;
mod blaslt;
mod causal_conv;
pub(crate) mod collectives;
mod columns;
pub mod cupti;
mod decode_layers;
#[cfg(feature = "deepseek-v4")]
pub(crate) mod deepseek_v4;
mod delta_chunks;
#[cfg(triton_kernels)]
mod delta_chunks_triton;
mod delta_decode;
mod delta_rule;
mod dummy;
mod fp8;
mod gated_decode;
mod gated_norm;
mod gated_qkv;
mod gather;
mod gemm_mma;
mod gemm_wgmma;
mod gemv_splitk;
mod groups;
#[cfg(feature = "deepseek-v4")]
mod hyper_mix;
mod int4;
mod linear;
mod lora;
pub(crate) mod moe;
mod narrow_gemm;
mod norm;
mod pack;
mod penalties;
mod qkv;
mod read;
mod sample;
mod scratch;
mod skinny_wgmma;
mod swiglu;
#[cfg(triton_kernels)]
mod triton;
pub(crate) mod vision;
mod widened;
mod widened_fp8;
mod write_runs;

pub(crate) use adjust::adjust_logits;
pub(crate) use attention::attention;
pub(crate) use attention_decode::decode_fused;
pub use blaslt::blaslt;
#[cfg(feature = "deepseek-v4")]
pub(crate) use blaslt::plan_row_counts;
pub(crate) use blaslt::{cublaslt, m_bucket};
pub(crate) use causal_conv::causal_conv1d;
pub(crate) use decode_layers::decode_layers;
pub use decode_layers::{DECODE_LAYERS_ROWS, DecodeState};
pub(crate) use delta_chunks::gated_delta_chunks;
pub(crate) use delta_decode::decode_delta;
pub(crate) use delta_rule::delta_recurrent;
pub(crate) use dummy::{random_bytes, uniform};
pub(crate) use fp8::quantize_fp8;
pub(crate) use gated_decode::gated_decode_fused;
pub(crate) use gated_norm::gated_rms_norm;
pub(crate) use gated_qkv::{attention_gate, gated_qk_norm_rope_write_kv};
pub(crate) use gather::{embedding, gather};
pub(crate) use gemm_wgmma::linear_bias_wgmma;
pub(crate) use groups::{pack as pack_groups, pack_fp8};
#[cfg(feature = "deepseek-v4")]
pub(crate) use hyper_mix::hyper_mix;
pub(crate) use linear::{linear, linear_add_norm, linear_swiglu};
pub(crate) use lora::add_adapters;
pub(crate) use norm::{add_rms_norm, rms_norm};
pub(crate) use pack::pack_rows;
pub(crate) use penalties::{count_tokens, penalize};
pub(crate) use qkv::{qk_norm_rope_write_kv, rope_write_kv};
pub use read::read_bandwidth;
pub(crate) use sample::{logprobs, sample};
pub(crate) use swiglu::swiglu;
pub(crate) use write_runs::write_runs;

use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;

/// The kernels, compiled.
pub mod images {
    #[cfg(triton_kernels)]
    use super::triton::{Build, Kind, Parameter, TritonKernel};
    use pegainfer_core::cuda::Image;

    /// Gives embedded bytes the alignment that the driver requires.
    #[repr(C, align(16))]
    #[allow(dead_code, reason = "unused in a CPU-only build")]
    struct Aligned<T: ?Sized>(T);

    include!(concat!(env!("OUT_DIR"), "/images.rs"));
}

/// Number of GPUs that `--device cuda` can use, or a sentence that explains why there are none.
pub fn available() -> Result<usize, String> {
    if !images::BUILT {
        return Err("this build is CPU-only: run tools/setup-cuda.sh and build again".to_owned());
    }
    pegainfer_core::cuda::device_count()
}

/// Opens GPU `ordinal` with `threads` host threads, and starts opening cuBLASLt, which takes a quarter of a second, on
/// a separate thread.
pub fn open(ordinal: usize, threads: Option<usize>) -> std::io::Result<Exec> {
    let mut exec = Exec::cuda(ordinal, threads)?;
    blaslt::begin(&mut exec);
    Ok(exec)
}

/// Kernels load 16 bytes at a time, so rows must be whole vectors of 8 bf16.
fn vectors(op: &'static str, width: usize) -> Result<(), OpError> {
    if width > 0 && width.is_multiple_of(8) {
        return Ok(());
    }
    Err(OpError { op, message: format!("rows of {width} elements: the GPU kernels take multiples of 8") })
}
