//! Descriptors of matrices for the copy engine, which kernels take as parameters.

use super::error;
use crate::tensor::{DType, OpError, Tensor};
use cudarc::driver::sys;
use std::ffi::c_void;

/// Columns of a box: 128 bytes, what the swizzle spans.
pub const BOX_COLUMNS: usize = 64;

/// Most rows of a box.
const MAX_ROWS: usize = 256;

/// A matrix of bf16 in device memory, of which a kernel copies boxes of [`BOX_COLUMNS`] columns to shared memory with
/// the 128-byte swizzle. What lies outside the matrix arrives as zeros.
///
/// It holds the matrix's address, as a captured graph does.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(pub(super) sys::CUtensorMap);

impl TensorMap {
    /// Of `matrix`, `[rows, columns]` bf16 with columns in multiples of 8 on a GPU of compute capability 9.0 or later,
    /// in boxes of `rows` rows, 1 to 256.
    pub fn new(op: &'static str, matrix: &Tensor, rows: usize) -> Result<Self, OpError> {
        let (height, width) = matrix.rows_cols();
        assert!(matrix.dtype() == DType::Bf16 && (1..=MAX_ROWS).contains(&rows), "{op}: boxes of {}", matrix.name());
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, pitch) = ([width as u64, height as u64], [(width * DType::Bf16.size()) as u64]);
        let (extent, strides) = ([BOX_COLUMNS as u32, rows as u32], [1, 1]);
        // SAFETY: the driver reads two sizes, one pitch, two extents and two strides, and writes the descriptor.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                matrix.device() as *mut c_void,
                sizes.as_ptr(),
                pitch.as_ptr(),
                extent.as_ptr(),
                strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().map_err(error(op))?;
        Ok(Self(map))
    }
}
