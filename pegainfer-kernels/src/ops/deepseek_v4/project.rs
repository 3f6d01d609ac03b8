//! The first GEMMs of attention, which share their input, in one launch where a device has a kernel for that.

use super::matmul::{matmul, whole_blocks};
use super::packed::Activation;
use super::values::rows;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Weights `[n, k]` that are multiplied with the same tokens.
#[derive(Debug, Clone, Copy)]
pub struct Projections<'a> {
    /// In FP8 or bf16, with rounded activations if in FP8.
    pub low: [&'a Matrix; 2],
    /// In bf16, two of the same shape.
    pub pairs: [Option<[&'a Matrix; 2]>; 2],
    /// In bf16.
    pub last: Option<&'a Matrix>,
}

impl<'a> Projections<'a> {
    /// Every weight, in the order of the fields.
    pub fn all(&self) -> impl Iterator<Item = &'a Matrix> + use<'a> {
        let Self { low, pairs, last } = *self;
        low.into_iter().chain(pairs.into_iter().flatten().flatten()).chain(last)
    }
}

/// Outputs `[m, n]` of [`Projections`].
#[derive(Debug)]
pub struct Projected<'a> {
    /// Of the activations' dtype.
    pub low: [&'a mut Tensor; 2],
    /// f32.
    pub pairs: [Option<[&'a mut Tensor; 2]>; 2],
    /// Of the activations' dtype.
    pub last: Option<&'a mut Tensor>,
}

impl Projected<'_> {
    fn all(&self) -> impl Iterator<Item = &Tensor> {
        let pairs = self.pairs.iter().flatten().flatten();
        self.low.iter().chain(pairs).chain(&self.last).map(|tensor| &**tensor)
    }
}

/// `out = x · wᵀ` for every weight, each as [`matmul`] does it.
///
/// `x`: `[m, k]` bf16 or f32 for weights in bf16; `rounded`: the same, rounded by `round_activation`, for those in FP8, with packed rows
/// where the device takes them.
pub fn project(
    exec: &mut Exec,
    x: &Tensor,
    rounded: Activation<'_>,
    weights: Projections<'_>,
    out: &mut Projected<'_>,
) -> Result<(), OpError> {
    let check = Check("project");
    if gpu::projects(exec, x, rounded, &weights)? {
        let (m, k) = x.rows_cols();
        for (w, out) in weights.all().zip(out.all()) {
            whole_blocks(check, w)?;
            check.that(w.shape().1 == k, "x and a weight differ in k")?;
            rows(check, out, (m, w.shape().0))?;
        }
        let sums = out.pairs.iter().flatten().flatten().all(|out| out.dtype() == DType::F32);
        check.that(
            sums && out.low.iter().all(|out| out.dtype() == x.dtype()),
            "outputs of these dtypes are not fused",
        )?;
        exec.record(|_| {
            let operands = [Some(x), Some(rounded.values), rounded.packed];
            let reads: Vec<&Tensor> =
                operands.into_iter().flatten().chain(weights.all().flat_map(Matrix::tensors)).collect();
            let outputs: u64 = weights.all().map(|w| w.shape().0 as u64).sum();
            OpRecord::new(
                "project",
                "skinny_project",
                &reads,
                &out.all().collect::<Vec<_>>(),
                2 * (m * k) as u64 * outputs,
            )
        });
        return gpu::project(exec, check.0, Activation { values: x, packed: rounded.packed }, &weights, out);
    }
    let input = |w: &Matrix| if w.is_quantized() { rounded } else { x.into() };
    for (w, out) in weights.low.into_iter().zip(&mut out.low) {
        matmul(exec, input(w), w, out)?;
    }
    for (pair, out) in weights.pairs.into_iter().zip(&mut out.pairs) {
        for (w, out) in pair.into_iter().flatten().zip(out.iter_mut().flatten()) {
            matmul(exec, x, w, out)?;
        }
    }
    match (weights.last, &mut out.last) {
        (Some(w), Some(out)) => matmul(exec, x, w, out),
        _ => Ok(()),
    }
}
