//! GEMMs of FP8 by FP8 with scales of blocks or groups.

use super::{BlasLt, Multiplied};
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use std::ptr::from_ref;

impl BlasLt {
    /// Makes the operations of [`Multiplied::Fp8`] and [`Multiplied::Fp8ByGroup`].
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
            for (operation, w_mode) in [(&mut self.fp8_operation, BLOCKS), (&mut self.group_operation, VECTORS)] {
                (lt.create_operation)(operation, compute, scale).result()?;
                let attributes = [(TRANSPOSE_FIRST, transpose), (W_MODE, w_mode as i32), (X_MODE, VECTORS as i32)];
                for (attribute, value) in attributes {
                    (lt.set_operation)(*operation, attribute, from_ref(&value).cast(), 4).result()?;
                }
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
        let operation = match multiplied {
            Multiplied::Bf16 | Multiplied::Widened => return Ok(self.operation),
            Multiplied::Fp8 => self.fp8_operation,
            Multiplied::Fp8ByGroup => self.group_operation,
        };
        for (attribute, address) in [(W_SCALES, w), (X_SCALES, x)] {
            let address = from_ref(&address).cast();
            // SAFETY: the operation was made in `set_up_fp8`; the attribute is a pointer.
            unsafe { (self.library.functions.set_operation)(operation, attribute, address, 8) }.result()?;
        }
        Ok(operation)
    }
}
