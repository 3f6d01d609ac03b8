//! GEMMs of FP8 by FP8 with scales of blocks.

use super::{BlasLt, Multiplied};
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use std::ptr::from_ref;

impl BlasLt {
    /// Makes the operation of FP8: w has a scale for each block of 128 x 128, x for each 128 columns of a row.
    pub(super) fn set_up_fp8(
        &mut self,
        compute: sys::cublasComputeType_t,
        scale: sys::cudaDataType,
    ) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_A_SCALE_MODE as W_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE as X_MODE,
            CUBLASLT_MATMUL_DESC_TRANSA as TRANSPOSE_FIRST,
        };
        use sys::cublasLtMatmulMatrixScale_t::{
            CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F as BLOCKS, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F as VECTORS,
        };
        let lt = &self.library.functions;
        let transpose: i32 = 1;
        // SAFETY: the operation is made before it is used; its attributes are int32.
        unsafe {
            (lt.create_operation)(&mut self.fp8_operation, compute, scale).result()?;
            for (attribute, value) in [(TRANSPOSE_FIRST, transpose), (W_MODE, BLOCKS as i32), (X_MODE, VECTORS as i32)]
            {
                (lt.set_operation)(self.fp8_operation, attribute, from_ref(&value).cast(), 4).result()?;
            }
        }
        Ok(())
    }

    /// The operation of `multiplied`, with these scales.
    pub(super) fn operation(
        &self,
        multiplied: Multiplied,
        (x, w): (u64, u64),
    ) -> Result<sys::cublasLtMatmulDesc_t, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_A_SCALE_POINTER as W_SCALES, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER as X_SCALES,
        };
        if multiplied != Multiplied::Fp8 {
            return Ok(self.operation);
        }
        for (attribute, address) in [(W_SCALES, w), (X_SCALES, x)] {
            let address = from_ref(&address).cast();
            // SAFETY: the operation was made in `set_up_fp8`; the attribute is a pointer.
            unsafe { (self.library.functions.set_operation)(self.fp8_operation, attribute, address, 8) }.result()?;
        }
        Ok(self.fp8_operation)
    }
}
