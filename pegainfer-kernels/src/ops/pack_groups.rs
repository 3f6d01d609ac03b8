//! Group-quantised weights in the order of a GPU's kernels.

use super::Matrix;
use super::check::Check;
use crate::choice::Packed;
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::grouped::format::GroupFormat;

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
