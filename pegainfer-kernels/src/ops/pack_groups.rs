//! Group-quantised weights in the order of a GPU's kernels.

use super::check::Check;
use super::{BlockScales, Matrix};
use crate::choice::{self, Architecture, Packed};
use crate::cpu::weights::BLOCK;
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::grouped::format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};
use pegainfer_core::weights::grouped_scale_name;

/// Bytes after packed scales that the kernels may read: they fetch the scales of whole tiles, of which the last may reach
/// beyond the last row by up to 255 rows.
const TAIL_BYTES: usize = 1024;

/// The matrix of codes and scales as a checkpoint has them. A GPU packs them in the order in which its kernels read them, if
/// they have one for the format; other weights, and those on a CPU, stay as they are.
///
/// `codes`: `[n, code_bytes(k)]` u8; `scales`: `[n, scale_bytes(k)]` u8.
pub fn pack_groups(exec: &mut Exec, format: GroupFormat, mut codes: Tensor, scales: Tensor) -> Result<Matrix, OpError> {
    let (check, (n, bytes)) = (Check("pack_groups"), codes.rows_cols());
    let k = bytes * 8 / format.bits();
    check.is(&codes, DType::U8, &[n, format.code_bytes(k)])?;
    check.is(&scales, DType::U8, &[n, format.scale_bytes(k)])?;
    let packed = Packed::of(format, n, k).filter(|_| exec.device() == Device::Cuda);
    let Some(packed) = packed else { return Ok(Matrix::Grouped { format, codes, scales }) };
    let width = scales.rows_cols().1;
    let rows = (packed.records + packed.extra + TAIL_BYTES).div_ceil(width);
    let message = |error: std::io::Error| OpError { op: "pack_groups", message: error.to_string() };
    let mut to = exec.tensor(scales.name(), &[rows, width], DType::U8).map_err(message)?;
    to.set_rows(n);
    exec.record(|_| OpRecord::new("pack_groups", "packed", &[&scales], &[&codes, &to], 0));
    cuda::pack_groups(exec, (format, packed), &mut codes, &scales, &mut to)?;
    // Memory of the old scales may be used again at once.
    exec.synchronize()?;
    Ok(Matrix::Grouped { format, codes, scales: to })
}

/// An FP8 weight for the GPU in use. Hopper multiplies FP8 by FP8, and takes it as it is; for other GPUs it becomes groups of
/// 128 columns with the scale of their block, packed, so that few rows of x need no widened copy.
///
/// `weight`: `[n, k]` e4m3 codes; `scale`: `[n / 128, k / 128]` f32, both rounded up.
pub fn pack_fp8(exec: &mut Exec, mut weight: Tensor, scale: Tensor) -> Result<Matrix, OpError> {
    let (n, k) = weight.rows_cols();
    let format = GroupFormat {
        values: Values::E4m3,
        scales: GroupScales::Plain { group: BLOCK, dtype: ScaleDType::F32, offset: Offset::None },
    };
    let takes_fp8 = match exec.device() {
        Device::Cpu(_) => true,
        Device::Meta => choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper()),
        // Without a wait for cuBLASLt.
        Device::Cuda => Architecture::of(exec.gpu()?.info()?.capability) == Architecture::Hopper,
    };
    if takes_fp8 || Packed::of(format, n, k).is_none() {
        return Ok(Matrix::Fp8 { weight, scale: BlockScales::F32(scale) });
    }
    let message = |error: std::io::Error| OpError { op: "pack_fp8", message: error.to_string() };
    let name = grouped_scale_name(weight.name(), format);
    let mut to = exec.tensor(&name, &[n, format.scale_bytes(k)], DType::U8).map_err(message)?;
    exec.record(|_| OpRecord::new("pack_fp8", "packed", &[&scale], &[&weight, &to], 0));
    if exec.device() == Device::Cuda {
        cuda::pack_fp8(exec, &mut weight, &scale, &mut to)?;
        exec.synchronize()?;
    }
    Ok(Matrix::Grouped { format, codes: weight, scales: to })
}
