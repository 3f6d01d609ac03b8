//! Plans of GEMMs, and their layouts.

use super::{BlasLt, GemmSize, Multiplied};
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use pegainfer_core::tensor::DType;
use std::ptr::{from_ref, null_mut};

/// Layouts and algorithm of a GEMM.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) x: sys::cublasLtMatrixLayout_t,
    pub(super) w: sys::cublasLtMatrixLayout_t,
    pub(super) out: sys::cublasLtMatrixLayout_t,
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
    pub(super) multiplied: Multiplied,
}

impl BlasLt {
    /// Destroys the layouts of a plan that is no longer used.
    pub(super) fn release(&self, plan: &Plan) {
        for layout in [plan.x, plan.w, plan.out] {
            // SAFETY: created with the plan, destroyed once.
            unsafe { (self.library.functions.destroy_layout)(layout) };
        }
    }

    pub(super) fn layouts(&self, gemm: GemmSize) -> Result<Plan, CublasError> {
        let GemmSize { m, n, k, out, pitch, x_pitch, multiplied, .. } = gemm;
        let out_type = if out == DType::F32 { sys::cudaDataType::CUDA_R_32F } else { sys::cudaDataType::CUDA_R_16BF };
        // A row-major matrix is column-major with rows and columns swapped.
        let layout = |dtype, rows: usize, cols: usize, pitch: usize, next_group: usize| {
            let mut layout = null_mut();
            // SAFETY: `layout` is a valid place for the handle.
            unsafe {
                (self.library.functions.create_layout)(&mut layout, dtype, cols as u64, rows as u64, pitch as i64)
            }
            .result()?;
            self.set_groups(layout, gemm.groups, next_group)?;
            Ok(layout)
        };
        let operand = match multiplied {
            Multiplied::Fp8 | Multiplied::Fp8ByGroup => sys::cudaDataType::CUDA_R_8F_E4M3,
            Multiplied::Bf16 | Multiplied::Widened => sys::cudaDataType::CUDA_R_16BF,
        };
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let (x, w) = (layout(operand, m, k, x_pitch, k)?, layout(operand, n, k, k, n * k)?);
        Ok(Plan { x, w, out: layout(out_type, m, n, pitch, n)?, algorithm, multiplied })
    }

    /// Makes a layout one of `groups` matrices, each `next` elements after the previous one.
    fn set_groups(&self, layout: sys::cublasLtMatrixLayout_t, groups: usize, next: usize) -> Result<(), CublasError> {
        use sys::cublasLtMatrixLayoutAttribute_t::{
            CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as OFFSET,
        };
        if groups == 1 {
            return Ok(());
        }
        let (count, offset, lt) = (groups as i32, next as i64, &self.library.functions);
        // SAFETY: the layout is alive; the attributes are an int32 and an int64.
        unsafe {
            (lt.set_layout)(layout, COUNT, from_ref(&count).cast(), 4).result()?;
            (lt.set_layout)(layout, OFFSET, from_ref(&offset).cast(), 8).result()
        }
    }
}
