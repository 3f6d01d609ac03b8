//! The first GEMMs of attention, which share their input; one launch on devices with a kernel for it.

use super::matmul::{matmul, matmul_rounding, whole_blocks};
use super::packed::Activation;
use super::side_stream::on_side_stream;
use super::values::rows;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Weights `[n, k]` of GEMMs over the same tokens.
#[derive(Debug, Clone, Copy)]
pub struct Projections<'a> {
    /// `wq_a` and `wkv`, in FP8 (times the rounded activations) or in bf16.
    pub low: [&'a Matrix; 2],
    /// Weights of the compressors in bf16, two of the same shape each.
    pub pairs: [Option<[&'a Matrix; 2]>; 2],
    /// Weight of the indexer in bf16.
    pub last: Option<&'a Matrix>,
}

impl<'a> Projections<'a> {
    /// All weights, in the order of the fields.
    pub fn all(&self) -> impl Iterator<Item = &'a Matrix> + use<'a> {
        let Self { low, pairs, last } = *self;
        low.into_iter().chain(pairs.into_iter().flatten().flatten()).chain(last)
    }
}

/// Outputs `[m, n]` of [`Projections`], in the same places.
#[derive(Debug)]
pub struct Projected<'a> {
    /// bf16 or f32, as the activations.
    pub low: [&'a mut Tensor; 2],
    /// Outputs in f32.
    pub pairs: [Option<[&'a mut Tensor; 2]>; 2],
    /// bf16 or f32, as the activations.
    pub last: Option<&'a mut Tensor>,
}

impl Projected<'_> {
    /// All outputs, in the order of the fields.
    fn all(&self) -> impl Iterator<Item = &Tensor> {
        let pairs = self.pairs.iter().flatten().flatten();
        self.low.iter().chain(pairs).chain(&self.last).map(|tensor| &**tensor)
    }
}

/// True if [`project`] itself rounds `x`, `[m, k]` bf16 or f32, like `round_activation` for FP8 weights, and so needs
/// no rounded activation: on a GPU if its kernels for `m` tokens pack `x` in FP8 (csrc/deepseek_v4/pack.cu), on a CPU
/// always. An error if the GPU is lost.
pub fn project_rounds(
    exec: &mut Exec,
    x: &Tensor,
    weights: &Projections<'_>,
    out: &Projected<'_>,
) -> Result<bool, OpError> {
    for (w, out) in weights.low.into_iter().zip(&out.low) {
        if exec.device() == Device::Cuda && w.is_quantized() && gpu::rounds_many(exec, x, w, out)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// `out = x · wᵀ` for every weight, as in [`matmul`].
///
/// `x`: `[m, k]` bf16 or f32, for bf16 weights; `rounded`: result of `round_activation` on `x`, for FP8 weights, with
/// packed rows if the device takes them; `None` if [`project_rounds`].
pub fn project(
    exec: &mut Exec,
    x: &Tensor,
    rounded: Option<Activation<'_>>,
    weights: Projections<'_>,
    out: &mut Projected<'_>,
) -> Result<(), OpError> {
    let check = Check("project");
    if let Some(rounded) = rounded
        && gpu::projects(exec, x, rounded, &weights)?
    {
        let (m, k) = x.rows_cols();
        for (w, out) in weights.all().zip(out.all()) {
            whole_blocks(check, w)?;
            check.that(w.shape().1 == k, "x and a weight differ in k")?;
            rows(check, out, (m, w.shape().0))?;
        }
        let sums = out.pairs.iter().flatten().flatten().all(|out| out.dtype() == DType::F32);
        let same = out.low.iter().chain(&out.last).all(|out| out.dtype() == x.dtype());
        check.that(sums && same, "the outputs of pairs must be f32, and the others of the dtype of x")?;
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
    let low = |exec: &mut Exec, i: usize, out: &mut Tensor| match (rounded, weights.low[i]) {
        (Some(rounded), w) if w.is_quantized() => matmul(exec, rounded, w, out),
        (None, w) if w.is_quantized() => matmul_rounding(exec, x, w, out),
        (_, w) => matmul(exec, x, w, out),
    };
    let pair = |exec: &mut Exec, i: usize, out: &mut Option<[&mut Tensor; 2]>| {
        let mut outputs = out.iter_mut().flatten();
        weights.pairs[i].into_iter().flatten().zip(&mut outputs).try_for_each(|(w, out)| matmul(exec, x, w, out))
    };
    let (tokens, Projected { low: [first, second], pairs: [main, index], last }) = (x.rows_cols().0, out);
    on_side_stream(exec, tokens, 0, |exec| low(exec, 1, second))?;
    if weights.pairs[0].is_some() {
        on_side_stream(exec, tokens, 1, |exec| pair(exec, 0, main))?;
    }
    if weights.pairs[1].is_some() {
        on_side_stream(exec, tokens, 2, |exec| pair(exec, 1, index))?;
    }
    if let (Some(w), Some(last)) = (weights.last, last) {
        on_side_stream(exec, tokens, 2, |exec| matmul(exec, x, w, last))?;
    }
    low(exec, 0, first)?;
    exec.join_side_streams()
}

#[cfg(test)]
mod tests {
    use super::super::packed_bytes;
    use super::*;
    use crate::ops::BlockScales;

    /// The fused kernel, which a plan for Hopper has, writes the last output in bf16 for any dtype of its tensor.
    #[test]
    fn fused_outputs_have_the_dtypes_that_the_kernel_writes() {
        let mut meta = Exec::meta().unwrap();
        let mut tensor = |shape: &[usize], dtype| meta.tensor("t", shape, dtype).unwrap();
        let [x, values] = [(); 2].map(|()| tensor(&[3, 256], DType::Bf16));
        let packed = tensor(&[3, packed_bytes(256)], DType::U8);
        let [a, b] = [(); 2].map(|()| Matrix::Fp8 {
            weight: tensor(&[128, 256], DType::U8),
            scale: BlockScales::E8m0(tensor(&[1, 2], DType::U8)),
        });
        let last = Matrix::Bf16(tensor(&[64, 256], DType::Bf16));
        let weights = Projections { low: [&a, &b], pairs: [None; 2], last: Some(&last) };
        let [mut out_a, mut out_b] = [(); 2].map(|()| tensor(&[3, 128], DType::Bf16));
        for (dtype, fits) in [(DType::Bf16, true), (DType::F32, false)] {
            let mut out_last = meta.tensor("last", &[3, 64], dtype).unwrap();
            let mut out = Projected { low: [&mut out_a, &mut out_b], pairs: [None, None], last: Some(&mut out_last) };
            let rounded = Activation { values: &values, packed: Some(&packed) };
            assert_eq!(project(&mut meta, &x, Some(rounded), weights, &mut out).is_ok(), fits, "{dtype:?}");
        }
    }
}
