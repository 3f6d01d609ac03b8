//! Tensor maps: descriptors of matrices for the Tensor Memory Accelerator (TMA), which kernels take as parameters.

use super::status::error;
use crate::tensor::{DType, OpError, Tensor};
use cudarc::driver::sys;
use std::ffi::c_void;

/// Columns of a box of 128 bytes, the span of the widest swizzle.
pub const BOX_COLUMNS: usize = 64;

/// Maximum rows of a box.
const MAX_ROWS: usize = 256;

/// A bf16 matrix in device memory, of which a kernel copies boxes to shared memory, usually of [`BOX_COLUMNS`] columns,
/// with a swizzle as wide as the box. Elements outside the matrix read as zeros.
///
/// Contains the matrix's address, like a captured graph.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(pub(super) sys::CUtensorMap);

impl TensorMap {
    /// A map of `matrix`, `[rows, columns]` bf16 with columns a multiple of 8, in boxes of `rows` rows, 1 to 256. Needs
    /// compute capability 9.0.
    pub fn new(op: &'static str, matrix: &Tensor, rows: usize) -> Result<Self, OpError> {
        assert!(matrix.dtype() == DType::Bf16, "{op}: {} is not bf16", matrix.name());
        Self::of_memory(op, matrix.device(), matrix.rows_cols(), [rows, BOX_COLUMNS])
    }

    /// A map of a bf16 matrix at `address` (aligned to 16 bytes) of `(rows, columns)` elements, in boxes of
    /// `[rows, columns]`: 1 to 256 rows, and 16, 32 or 64 columns, the span of the swizzle.
    pub fn of_memory(
        op: &'static str,
        address: u64,
        (height, width): (usize, usize),
        [rows, columns]: [usize; 2],
    ) -> Result<Self, OpError> {
        use sys::CUtensorMapSwizzle as Swizzle;
        let swizzle = match columns {
            16 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            BOX_COLUMNS => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            _ => panic!("{op}: boxes of {columns} columns"),
        };
        assert!((1..=MAX_ROWS).contains(&rows), "{op}: boxes of {rows} rows");
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, pitch) = ([width as u64, height as u64], [(width * DType::Bf16.size()) as u64]);
        let (extent, strides) = ([columns as u32, rows as u32], [1, 1]);
        // SAFETY: the driver reads two sizes, one pitch, two extents and two strides, and writes the descriptor.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                address as *mut c_void,
                sizes.as_ptr(),
                pitch.as_ptr(),
                extent.as_ptr(),
                strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().map_err(error(op))?;
        Ok(Self(map))
    }
}
