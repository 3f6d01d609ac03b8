//! GEMMs with weights in bf16, FP8 or FP4.

use super::kv_quant::round_activation;
use super::packed::Activation;
use super::values::{cpu, read, rows, write};
use crate::choice::DenseGemm;
use crate::cpu::deepseek_v4::kv_quant::fp8;
use crate::cpu::deepseek_v4::matmul as reference;
use crate::cpu::weights::{BLOCK, FP4_BLOCK};
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::ops::matrix::{BlockScales, Matrix};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};

/// `out = x · wᵀ`.
///
/// `x`: `[m, k]`; `w`: `[n, k]`; `out`: `[m, n]`, possibly with several dimensions of columns; activations bf16 or f32.
/// If `w` is FP8 or FP4, bf16 activations must be values of `round_activation`, because a GPU may multiply them in FP8.
///
/// Computed in f32: each block along `k` (128 for FP8, 32 for FP4, all of it for bf16) is summed without the weight's
/// scale, multiplied by it, and added to the rest, with one final rounding. Hopper's FP8 tensor cores sum within a
/// block of 128 with about 14 bits. On a GPU, from 33 rows on, up to three rows of memory after the last row of `out`
/// may be overwritten. Up to 32 rows a row's result does not depend on the other rows; on a CPU it never does.
pub fn matmul<'a>(exec: &mut Exec, x: impl Into<Activation<'a>>, w: &Matrix, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("matmul");
    let input = x.into();
    let x = input.values;
    let (m, k) = x.rows_cols();
    let n = w.shape().0;
    whole_blocks(check, w)?;
    check.that(w.shape().1 == k, "x and w differ in k")?;
    rows(check, x, (m, k))?;
    rows(check, out, (m, n))?;
    let large = gpu::choose_large(exec, x, true, (w, 1), out)?;
    record(exec, (check.0, large), x, w, out, 2 * (m * n * k) as u64);
    if exec.device() == Device::Cuda {
        return gpu::matmul(exec, check.0, large, input, w, out);
    }
    if let Some(isa) = cpu(check, exec)? {
        let mut result = vec![0.0; m * n];
        reference::matmul(isa, &read(x), w.weights(), 0..n, k, &mut result);
        write(out, &result);
    }
    Ok(())
}

/// [`matmul`] of `x` rounded as `round_activation` does, in place or by [`matmul_rounding`]: `x` is undefined
/// afterwards.
pub fn matmul_dynamic(exec: &mut Exec, x: &mut Tensor, w: &Matrix, out: &mut Tensor) -> Result<(), OpError> {
    if gpu::rounds_few(exec, x, w)? || gpu::rounds_many(exec, x, w, out)?.is_some() {
        return matmul_rounding(exec, x, w, out);
    }
    round_activation(exec, x)?;
    matmul(exec, &*x, w, out)
}

/// Variant of [`matmul`] that rounds its input by `round_activation`'s formula while loading it. Among GPUs, only
/// Hopper has kernels for it; see [`matmul_dynamic`], which calls it only there.
///
/// `x`: `[m, k]` bf16; `w`: `[n, k]` FP8; `out`: `[m, n]` bf16 or f32.
pub fn matmul_rounding(exec: &mut Exec, x: &Tensor, w: &Matrix, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("matmul_rounding");
    let ((m, k), n) = (x.rows_cols(), w.shape().0);
    whole_blocks(check, w)?;
    check.that(w.shape().1 == k, "x and w differ in k")?;
    rows(check, x, (m, k))?;
    rows(check, out, (m, n))?;
    let large = gpu::rounds_many(exec, x, w, out)?;
    record(exec, (check.0, large), x, w, out, 2 * (m * n * k) as u64);
    if exec.device() == Device::Cuda {
        return gpu::matmul(exec, check.0, large, x.into(), w, out);
    }
    if let Some(isa) = cpu(check, exec)? {
        let mut values = read(x).into_owned();
        fp8(&mut values, BLOCK);
        let mut result = vec![0.0; m * n];
        reference::matmul(isa, &values, w.weights(), 0..n, k, &mut result);
        write(out, &result);
    }
    Ok(())
}

/// Plans the cuBLASLt GEMMs that ran so far for all numbers of tokens from 33 to `max_rows`, so that no step waits for
/// a plan. No effect without a GPU. Not allowed while a graph is captured.
pub fn plan_gemms(exec: &mut Exec, max_rows: usize) {
    if exec.device() == Device::Cuda {
        crate::cuda::plan_row_counts(exec, max_rows);
    }
}

/// Checks that `w` is not a stack, its dtypes and shapes fit each other, and `k` is a multiple of the kernels' block.
pub(super) fn whole_blocks(check: Check, w: &Matrix) -> Result<(), OpError> {
    let k = w.shape().1;
    match w {
        Matrix::Bf16(_) => check.that(k.is_multiple_of(FP4_BLOCK), "k must be a multiple of 32")?,
        Matrix::Fp8 { scale: BlockScales::F32(_), .. } => check.that(false, "the scales of w must be E8M0")?,
        Matrix::Fp8 { .. } | Matrix::Fp4 { .. } => {
            check.that(k.is_multiple_of(BLOCK), "k must be a multiple of 128")?;
        }
        Matrix::Grouped { .. } => check.that(false, "w must be bf16, FP8 or FP4")?,
        Matrix::Stacked(_) => check.that(false, "w must be one matrix")?,
    }
    w.as_ref().check(check)
}

/// The first half of the output projection: group `g` of the heads has its own weight, rows `g · r` to `(g + 1) · r` of
/// `w`. `out[t, g, :] = w[g] · x[t, g, :]`.
///
/// `x`: `[tokens, heads, dim]`, `heads · dim = groups · k`; `w`: `[groups · r, k]`; `out`: `[tokens, groups · r]`. f32
/// sums with one final rounding. The activation is not quantised, as in the reference, which computes this GEMM in
/// bf16. `x` may be packed; see [`split_bytes`](super::split_bytes).
pub fn grouped_matmul<'a>(
    exec: &mut Exec,
    x: impl Into<Activation<'a>>,
    w: &Matrix,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("grouped_matmul");
    let (input, (n, k)) = (x.into(), w.shape());
    let x = input.values;
    let (tokens, width) = x.rows_cols();
    let groups = width / k;
    whole_blocks(check, w)?;
    check.that(groups > 0 && width == groups * k, "x must have whole groups of heads")?;
    check.that(n.is_multiple_of(groups), "w must have the same rows for each group")?;
    rows(check, x, (tokens, width))?;
    rows(check, out, (tokens, n))?;
    let large = gpu::choose_large(exec, x, false, (w, groups), out)?;
    record(exec, (check.0, large), x, w, out, 2 * (tokens * n * k) as u64);
    if exec.device() == Device::Cuda {
        return gpu::grouped_matmul(exec, check.0, large, input, (w, groups), out);
    }
    if let Some(isa) = cpu(check, exec)? {
        let (x, rank) = (read(x), n / groups);
        let mut result = vec![0.0; tokens * n];
        let mut part = vec![0.0; tokens * rank];
        for g in 0..groups {
            let own: Vec<f32> = x.chunks_exact(k).skip(g).step_by(groups).flatten().copied().collect();
            reference::matmul(isa, &own, w.weights(), g * rank..(g + 1) * rank, k, &mut part);
            for (row, part) in result.chunks_exact_mut(n).zip(part.chunks_exact(rank)) {
                row[g * rank..][..rank].copy_from_slice(part);
            }
        }
        write(out, &result);
    }
    Ok(())
}

fn record(
    exec: &mut Exec,
    (op, large): (&'static str, Option<DenseGemm>),
    x: &Tensor,
    w: &Matrix,
    out: &Tensor,
    flops: u64,
) {
    exec.record(|_| {
        let reads: Vec<&Tensor> = std::iter::once(x).chain(w.tensors()).collect();
        OpRecord::new(op, large.map_or("blocks", |kernel| kernel.name()), &reads, &[out], flops)
    });
}

#[cfg(test)]
mod tests {
    use super::super::round_activation;
    use super::*;
    use crate::cpu::formats::{e2m1, e4m3, e8m0};
    use crate::testing::{Host, bf16s};
    use half::bf16;
    use pegainfer_core::tensor::DType;

    /// Bytes that are no NaN as e4m3, and scales around 1.
    fn bytes(n: usize, seed: u64) -> Vec<u8> {
        bf16s(n, seed).iter().map(|v| (v.to_bits() as u8) & 0xf7).collect()
    }

    fn scales(n: usize, seed: u64) -> Vec<u8> {
        bytes(n, seed).iter().map(|b| 120 + b % 8).collect()
    }

    fn u8s(host: &mut Host, shape: &[usize], values: &[u8]) -> Tensor {
        let mut tensor = host.zeros("bytes", shape, DType::U8);
        tensor.host_mut::<u8>().copy_from_slice(values);
        tensor
    }

    fn fp8(host: &mut Host, n: usize, k: usize) -> (Matrix, Vec<f64>) {
        let (codes, bytes) = (bytes(n * k, 3), scales(n.div_ceil(128) * (k / 128), 4));
        let value = |i: usize| {
            let (row, col) = (i / k, i % k);
            f64::from(e4m3(codes[i])) * f64::from(e8m0(bytes[row / 128 * (k / 128) + col / 128]))
        };
        let values = (0..n * k).map(value).collect();
        let weight = u8s(host, &[n, k], &codes);
        let scale = BlockScales::E8m0(u8s(host, &[n.div_ceil(128), k / 128], &bytes));
        (Matrix::Fp8 { weight, scale }, values)
    }

    fn fp4(host: &mut Host, n: usize, k: usize) -> (Matrix, Vec<f64>) {
        let (pairs, bytes) = (bytes(n * k / 2, 5), scales(n * k / 32, 6));
        let value = |i: usize| {
            let pair = pairs[i / 2];
            f64::from(e2m1(if i.is_multiple_of(2) { pair & 15 } else { pair >> 4 })) * f64::from(e8m0(bytes[i / 32]))
        };
        let values = (0..n * k).map(value).collect();
        (Matrix::Fp4 { weight: u8s(host, &[n, k / 2], &pairs), scale: u8s(host, &[n, k / 32], &bytes) }, values)
    }

    /// The reference's rounding of an activation, by its formula in f64.
    fn quantized(x: &[f64]) -> Vec<f64> {
        let group = |group: &[f64]| {
            let amax = group.iter().fold(1e-4f64, |max, v| max.max(v.abs()));
            let scale = (amax / 448.0).log2().ceil().exp2();
            let nearest = |v: f64| {
                let codes = (0..0x7fu8).map(|c| f64::from(e4m3(c))).enumerate();
                let away = |v: f64, c: f64| (v.abs() - c).abs();
                let best = codes.min_by(|a, b| away(v, a.1).total_cmp(&away(v, b.1)).then((a.0 % 2).cmp(&(b.0 % 2))));
                best.unwrap().1.copysign(v)
            };
            group.iter().map(|v| nearest(v / scale) * scale).collect::<Vec<_>>()
        };
        x.chunks(128).flat_map(group).collect()
    }

    #[test]
    fn fp8_and_fp4_products_match_f64_with_and_without_rounded_activations() {
        Host::each(|mut host| {
            for (m, n, k) in [(1, 5, 128), (3, 130, 256), (7, 16, 384)] {
                let x = bf16s(m * k, 1);
                let exact: Vec<f64> = x.iter().map(|v| v.to_f64()).collect();
                for (w, values) in [fp8(&mut host, n, k), fp4(&mut host, n, k)] {
                    for quantize in [false, true] {
                        let mut out = host.zeros("out", &[m, n], DType::F32);
                        let mut tx = host.bf16("x", &[m, k], &x);
                        if quantize {
                            round_activation(&mut host.exec, &mut tx).unwrap();
                        }
                        matmul(&mut host.exec, &tx, &w, &mut out).unwrap();
                        let x = if quantize { quantized(&exact) } else { exact.clone() };
                        for (i, got) in out.host::<f32>().iter().enumerate() {
                            let terms = x[i / n * k..][..k].iter().zip(&values[i % n * k..]).map(|(x, w)| x * w);
                            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                            assert!((f64::from(*got) - sum).abs() <= 1e-5 * size, "{i}: {got} but {sum}");
                        }
                    }
                }
            }
        });
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_batch() {
        Host::each(|mut host| {
            let (m, n, k) = (9, 40, 256);
            let (x, values) = (bf16s(m * k, 1), bf16s(n * k, 2));
            let w = Matrix::Bf16(host.bf16("w", &[n, k], &values));
            let tx = host.bf16("x", &[m, k], &x);
            let mut whole = host.zeros("out", &[m, n], DType::F32);
            matmul(&mut host.exec, &tx, &w, &mut whole).unwrap();
            for (x, expected) in x.chunks(k).zip(whole.host::<f32>().chunks(n)) {
                let x = host.bf16("x", &[1, k], x);
                let mut alone = host.zeros("out", &[1, n], DType::F32);
                matmul(&mut host.exec, &x, &w, &mut alone).unwrap();
                assert_eq!(alone.host::<f32>(), expected);
            }
        });
    }

    #[test]
    fn a_group_sees_its_own_heads_and_rows_only() {
        Host::each(|mut host| {
            let (tokens, groups, rank, k) = (2, 2, 3, 64);
            let (x, w) = (bf16s(tokens * groups * k, 1), bf16s(groups * rank * k, 2));
            let tx = host.bf16("x", &[tokens, groups, k], &x);
            let mut out = host.zeros("out", &[tokens, groups * rank], DType::F32);
            let matrix = Matrix::Bf16(host.bf16("w", &[groups * rank, k], &w));
            grouped_matmul(&mut host.exec, &tx, &matrix, &mut out).unwrap();
            let sum = |a: &[bf16], b: &[bf16]| a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>();
            for (i, got) in out.host::<f32>().iter().enumerate() {
                let (t, row) = (i / (groups * rank), i % (groups * rank));
                let expected = sum(&x[(t * groups + row / rank) * k..][..k], &w[row * k..][..k]);
                assert!((f64::from(*got) - expected).abs() < 1e-4, "{i}: {got} but {expected}");
            }
        });
    }
}
