//! What a norm gives to the GEMMs behind it.

use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{Matrix, deepseek_v4 as ops};

/// An activation behind a norm, as it is and as the reference rounds it for its FP8 and FP4 matrices.
#[derive(Debug)]
pub(crate) struct Normed {
    /// `[tokens, width]`.
    pub exact: Tensor,
    /// Of the same shape and dtype; none where activations are not rounded.
    low: Option<Tensor>,
}

impl Normed {
    pub fn new(
        exec: &mut Exec,
        name: &str,
        (tokens, width): (usize, usize),
        dtype: DType,
        quantize: bool,
    ) -> std::io::Result<Self> {
        let exact = exec.tensor(name, &[tokens, width], dtype)?;
        let low = quantize.then(|| exec.tensor(&format!("{name}.fp8"), &[tokens, width], dtype)).transpose()?;
        Ok(Self { exact, low })
    }

    pub fn set_rows(&mut self, tokens: usize) {
        std::iter::once(&mut self.exact).chain(&mut self.low).for_each(|tensor| tensor.set_rows(tokens));
    }

    /// Writes both from `x`.
    pub fn norm(&mut self, exec: &mut Exec, x: &Tensor, weight: &Tensor, eps: f32) -> Result<(), OpError> {
        ops::norm(exec, x, weight, eps, &mut self.exact, self.low.as_mut())
    }

    /// Both, for an op that writes them.
    pub fn outputs(&mut self) -> (&mut Tensor, Option<&mut Tensor>) {
        (&mut self.exact, self.low.as_mut())
    }

    /// The input of a GEMM with `w` whose precision follows the matrix.
    pub fn input(&self, w: &Matrix) -> &Tensor {
        self.low.as_ref().filter(|_| w.is_quantized()).unwrap_or(&self.exact)
    }
}
