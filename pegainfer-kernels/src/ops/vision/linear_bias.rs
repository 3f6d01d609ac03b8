//! GEMMs with a bias.

use super::add_bias::{Gelu, add_bias, add_bias_residual, bias_gelu};
use super::linear_f32;
use crate::choice;
use crate::cpu::vision::bias::After;
use crate::cuda;
use crate::ops;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// A matrix, `[n, k]` bf16, and its bias, `[n]` f32.
pub type Affine<'a> = (&'a Tensor, &'a Tensor);

/// What happens to `x · wᵀ + bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It replaces the output.
    Store,
    /// It is added to the output.
    Add,
    /// Its GELU replaces the output.
    Gelu(Gelu),
}

impl Then {
    /// Name of the op.
    fn name(self) -> &'static str {
        match self {
            Self::Store => "linear_bias",
            Self::Add => "linear_bias_residual",
            Self::Gelu(Gelu::Tanh) => "linear_bias_gelu_tanh",
            Self::Gelu(Gelu::Erf) => "linear_bias_gelu_erf",
        }
    }

    fn after(self) -> After {
        match self {
            Self::Store => After::Store,
            Self::Add => After::Add,
            Self::Gelu(Gelu::Tanh) => After::GeluTanh,
            Self::Gelu(Gelu::Erf) => After::GeluErf,
        }
    }
}

/// `out = then(x · wᵀ + bias)`: a GEMM, then [`add_bias`](super::add_bias()), [`add_bias_residual`](
/// super::add_bias_residual()) or [`bias_gelu`](super::bias_gelu()).
///
/// `x`: `[m, k]` bf16 or f32; `out`: `[m, n]` of the same type; `sums`: memory for `[m, n]` f32. On Hopper many rows
/// take one kernel, which rounds `x · wᵀ + bias` to bf16 before what follows, as transformers does.
///
/// # Errors
/// Wrong shapes or dtypes; those of the ops.
pub fn linear_bias(
    exec: &mut Exec,
    x: &Tensor,
    (w, bias): Affine<'_>,
    then: Then,
    sums: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (check, (m, k), n) = (Check(then.name()), x.rows_cols(), w.rows_cols().0);
    if !choice::gpu(exec)?.is_some_and(|gpu| choice::fuses_bias(&gpu, m, k)) {
        return separate(exec, x, (w, bias), then, sums, out);
    }
    check.is(x, DType::Bf16, &[m, k])?;
    check.is(w, DType::Bf16, &[n, k])?;
    check.is(bias, DType::F32, &[n])?;
    check.is(out, DType::Bf16, &[m, n])?;
    check.that(n.is_multiple_of(8) && k.is_multiple_of(8), "rows and columns are no multiples of 8")?;
    exec.record(|_| {
        let record = OpRecord::new(check.0, "wgmma_bias", &[x, w, bias], &[out], 2 * (m * n * k) as u64);
        let bytes = record.bytes + if then == Then::Add { out.bytes() } else { 0 };
        record.with_bytes(bytes)
    });
    if exec.device() == Device::Cuda {
        cuda::linear_bias_wgmma(exec.gpu()?, check.0, (x, w, bias), then.after(), out)?;
    }
    Ok(())
}

/// A GEMM, and what follows it.
fn separate(
    exec: &mut Exec,
    x: &Tensor,
    (w, bias): Affine<'_>,
    then: Then,
    sums: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let shape = [x.rows_cols().0, w.rows_cols().0];
    sums.as_shape(&shape, DType::F32, |sums| {
        match x.dtype() {
            DType::F32 => linear_f32(exec, x, w, sums)?,
            _ => ops::linear(exec, x, w, sums)?,
        }
        match then {
            Then::Store => add_bias(exec, sums, bias, out),
            Then::Add => add_bias_residual(exec, sums, bias, out),
            Then::Gelu(form) => bias_gelu(exec, sums, bias, form, out),
        }
    })
}
