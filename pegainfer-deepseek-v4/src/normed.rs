//! What a norm gives to the GEMMs behind it.

use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{self as ops, Activation, Rounded};

/// An activation behind a norm, as it is and as the reference rounds it for its FP8 and FP4 matrices.
#[derive(Debug)]
pub(crate) struct Normed {
    /// `[tokens, width]`.
    pub exact: Tensor,
    /// The rounded activation; `None` if activations are not rounded.
    low: Option<Low>,
}

/// A rounded activation.
#[derive(Debug)]
struct Low {
    /// `[tokens, width]`, of the dtype of [`Normed::exact`].
    values: Tensor,
    /// The values as packed rows (`pack_rows`); `None` if no kernel of the device takes them.
    packed: Option<Tensor>,
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
        if !quantize {
            return Ok(Self { exact, low: None });
        }
        let values = exec.tensor(&format!("{name}.fp8"), &[tokens, width], dtype)?;
        let packs = ops::takes_packed_rows(exec, dtype, width).map_err(std::io::Error::other)?;
        let shape = [tokens, ops::packed_bytes(width)];
        let packed = packs.then(|| exec.tensor(&format!("{name}.packed"), &shape, DType::U8)).transpose()?;
        Ok(Self { exact, low: Some(Low { values, packed }) })
    }

    pub fn set_rows(&mut self, tokens: usize) {
        self.exact.set_rows(tokens);
        if let Some(Low { values, packed }) = &mut self.low {
            std::iter::once(values).chain(packed).for_each(|tensor| tensor.set_rows(tokens));
        }
    }

    /// RMSNorm of `x`: writes the activation, and its rounded and packed forms.
    pub fn norm(&mut self, exec: &mut Exec, x: &Tensor, weight: &Tensor, eps: f32) -> Result<(), OpError> {
        let (exact, low) = self.outputs();
        ops::norm(exec, x, weight, eps, exact, low)
    }

    /// The activation and its rounded and packed forms, for an op that writes them.
    pub fn outputs(&mut self) -> (&mut Tensor, Option<Rounded<'_>>) {
        let low = self.low.as_mut().map(|Low { values, packed }| Rounded { values, packed: packed.as_mut() });
        (&mut self.exact, low)
    }

    /// The input of GEMMs with FP8 and FP4 matrices: the rounded activation if activations are rounded, else the exact one.
    pub fn rounded(&self) -> Activation<'_> {
        match &self.low {
            Some(Low { values, packed }) => Activation { values, packed: packed.as_ref() },
            None => (&self.exact).into(),
        }
    }

    /// The input of a GEMM with `w`: as [`rounded`](Self::rounded) if `w` is FP8 or FP4, else the exact activation.
    pub fn input(&self, w: &Matrix) -> Activation<'_> {
        if w.is_quantized() { self.rounded() } else { (&self.exact).into() }
    }
}
