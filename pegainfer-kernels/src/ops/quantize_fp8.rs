//! Rounding of weights to FP8.

use super::check::Check;
use crate::cpu::weights::{self, BLOCK};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rounds a weight to FP8. The scale of a block of 128 x 128 is its largest magnitude over 448 (1 if that is 0); a code
/// is the e4m3 value nearest to `w / scale`, ties to even. Same bits on every device.
///
/// `w`: `[n, k]` bf16; `codes`: `[n, k]` u8; `scales`: `[n / 128, k / 128]` f32, both rounded up. A GPU takes `k` in
/// multiples of 8.
pub fn quantize_fp8(exec: &mut Exec, w: &Tensor, codes: &mut Tensor, scales: &mut Tensor) -> Result<(), OpError> {
    let (check, (n, k)) = (Check("quantize_fp8"), w.rows_cols());
    check.is(w, DType::Bf16, &[n, k])?;
    check.is(codes, DType::U8, &[n, k])?;
    check.is(scales, DType::F32, &[n.div_ceil(BLOCK), k.div_ceil(BLOCK)])?;
    exec.record(|_| OpRecord::new("quantize_fp8", "blocks", &[w], &[codes, scales], 2 * (n * k) as u64));
    match exec.device() {
        Device::Cpu(_) => weights::quantize_fp8(w.host(), k, codes.host_mut(), scales.host_mut()),
        Device::Cuda => cuda::quantize_fp8(exec, w, codes, scales)?,
        Device::Meta => {}
    }
    Ok(())
}
