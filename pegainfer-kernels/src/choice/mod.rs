//! Choice of kernels: one value for each family of ops, computed from a [`Gpu`] and the shape of a call.
//!
//! An op chooses once. The value names the kernel in the op's record, the launcher in [`cuda`] launches it, and
//! [`warm_up`] learns from it which row counts are autotuned. Nothing here needs a device: a plan chooses for a card by
//! its name. table.txt lists the choices of seven cards for the shapes of the models, and a test compares it with the
//! code.

mod attention;
mod delta;
#[cfg(feature = "deepseek-v4")]
mod dense_gemm;
mod experts;
mod gemm;
mod gemm_shape;
mod gemv_splitk;
mod gpu;
mod groups;
mod int4;
mod packed;
mod prefill;
mod sample;
mod skinny_wgmma;
#[cfg(test)]
mod tests;
mod warm_up;
mod widening;

pub(crate) use attention::async_partial_bytes;
#[cfg(test)]
pub(crate) use attention::occupancy;
pub use attention::{Attention, Decode, DecodeGrid, DecodeStep};
pub(crate) use delta::RECURRENT_TOKENS;
#[cfg(triton_kernels)]
pub(crate) use delta::TRITON_SLICES;
pub use delta::{Conv, DecodeDelta, DeltaChunks, InterChunkScan};
#[cfg(feature = "deepseek-v4")]
pub(crate) use dense_gemm::{DenseGemm, DenseShape};
pub use experts::{ExpertShape, GroupedGemm, fuses_router};
pub(crate) use gemm::fuses_bias;
pub use gemm::{AddNorm, Gemm, Skinny, Swiglu};
pub use gemm_shape::{GemmShape, Output, WeightFormat};
pub use gemv_splitk::GemvPlan;
pub(crate) use gemv_splitk::tiles as gemv_tiles;
pub use gpu::{Architecture, CublasLt, Gpu};
pub use groups::GroupsPlan;
pub(crate) use groups::width as group_width;
pub use int4::{Int4Gemm, Int4MmaPlan};
pub(crate) use packed::{Packed, Packing};
pub use prefill::Prefill;
pub(crate) use sample::sample_cluster;
pub use skinny_wgmma::SkinnyPlan;
pub(crate) use skinny_wgmma::width as skinny_width;
pub use warm_up::warm_up;
pub use widening::Widening;

use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::OpError;

/// The GPU that a plan without a device is for.
struct Planned(Gpu);

/// The GPU in use, or why it cannot be described.
struct Opened(Result<Gpu, OpError>);

/// Lets the ops of an [`Exec`] on `Device::Meta` choose for this card, instead of [`Gpu::PLANNED`].
pub fn plan_for(exec: &mut Exec, gpu: Gpu) {
    exec.attach(Planned(gpu));
}

/// The GPU that kernels are chosen for: the one in use; the planned one on `Device::Meta`; none on a CPU. The first
/// call on a GPU waits until cuBLASLt is open.
pub fn gpu(exec: &mut Exec) -> Result<Option<Gpu>, OpError> {
    let activations = exec.activations();
    let gpu = match exec.device() {
        Device::Cpu(_) => return Ok(None),
        Device::Meta => exec.attached(|_| Planned(Gpu::PLANNED)).0,
        Device::Cuda => {
            let open = |exec: &mut Exec| {
                let cublaslt = cuda::cublaslt(exec);
                Opened(exec.gpu().and_then(|gpu| gpu.info()).map(|info| Gpu::of(&info, cublaslt)))
            };
            exec.attached(open).0.clone()?
        }
    };
    Ok(Some(Gpu { activations, ..gpu }))
}

/// Name of the kernel for a record: the CPU's instruction set, or the chosen kernel.
pub(crate) fn name<T>(device: Device, choice: &Option<T>, name: fn(&T) -> &'static str) -> &'static str {
    match (device, choice) {
        (Device::Cpu(isa), _) => isa.name(),
        (Device::Cuda | Device::Meta, Some(choice)) => name(choice),
        (Device::Cuda | Device::Meta, None) => "none",
    }
}
