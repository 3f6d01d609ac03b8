//! Manifold-constrained hyper-connections (mHC): four residual streams instead of one.

use super::values::{activation, cpu, read, write};
use crate::cpu::deepseek_v4::hyper::{self as reference, MIXES, STREAMS};
use crate::cuda::deepseek_v4 as gpu;
use crate::hyper_operands::{HyperSpec, HyperWeights};
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::isa::Isa;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// The input of a block, and the weights that its output will have in the streams.
///
/// `streams`: `[tokens, 4, hidden]`, `mixed`: `[tokens, hidden]`, bf16 or f32; `post`: `[tokens, 4]` and `comb`:
/// `[tokens, 4, 4]` f32. With `x` all streams of a token and `m = (function · x) * rsqrt(mean(x²) + norm_eps)`:
///
/// - `pre[j] = sigmoid(m[j] * scale[0] + base[j]) + eps`, `mixed = Σ_j pre[j] · stream[j]`
/// - `post[j] = 2 sigmoid(m[4 + j] * scale[1] + base[4 + j])`
/// - `comb[j][k]`: `m[8 + 4j + k] * scale[2] + base[8 + 4j + k]` made doubly stochastic (Sinkhorn)
///
/// All f32, with one rounding of `mixed`. `hidden` is a multiple of 8.
pub fn hyper_mix(
    exec: &mut Exec,
    streams: &Tensor,
    weights: &HyperWeights,
    spec: HyperSpec,
    mixed: &mut Tensor,
    (post, comb): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let check = Check("hyper_mix");
    let (tokens, hidden) = shapes(check, streams, weights, MIXES, 3)?;
    activation(check, mixed, &[tokens, hidden])?;
    check.is(post, DType::F32, &[tokens, STREAMS])?;
    check.is(comb, DType::F32, &[tokens, STREAMS, STREAMS])?;
    record(exec, "hyper_mix", (streams, weights), &[mixed, post, comb], MIXES);
    if exec.device() == Device::Cuda {
        return gpu::hyper_mix(exec, streams, weights, spec, mixed, (post, comb));
    }
    if let Some(isa) = cpu(check, exec)? {
        let values = mix_host(isa, &read(streams), weights, spec, (post, comb));
        write(mixed, &values);
    }
    Ok(())
}

/// [`hyper_mix`] on the host. Returns `mixed`, not rounded yet.
pub(super) fn mix_host(
    isa: Isa,
    streams: &[f32],
    weights: &HyperWeights,
    spec: HyperSpec,
    (post, comb): (&mut Tensor, &mut Tensor),
) -> Vec<f32> {
    let (base, scale) = (weights.base.host::<f32>(), weights.scale.host::<f32>());
    let (post, comb) = (post.host_mut::<f32>(), comb.host_mut::<f32>());
    let width = weights.function.rows_cols().1;
    let hidden = width / STREAMS;
    let mut out = vec![0.0; streams.len() / STREAMS];
    let mut m = [0.0; MIXES];
    for (t, x) in streams.chunks_exact(width).enumerate() {
        reference::mixes(isa, x, weights.function.host(), spec.norm_eps, &mut m);
        let pre: [f32; STREAMS] = std::array::from_fn(|j| reference::input_weight(m[j], scale[0], base[j], spec.eps));
        reference::weighted_sum(x, &pre, &mut out[t * hidden..][..hidden]);
        for j in 0..STREAMS {
            post[t * STREAMS + j] = reference::output_weight(m[STREAMS + j], scale[1], base[STREAMS + j]);
        }
        let comb = &mut comb[t * STREAMS * STREAMS..][..STREAMS * STREAMS];
        for (i, c) in comb.iter_mut().enumerate() {
            *c = m[2 * STREAMS + i] * scale[2] + base[2 * STREAMS + i];
        }
        reference::sinkhorn(comb, spec.iters, spec.eps);
    }
    out
}

/// Adds a block's output to the streams, which are mixed, in place: `stream'[k] = post[k] · f + Σ_j comb[j][k] ·
/// stream[j]`. The sum runs over the first index of `comb`.
///
/// `streams`: `[tokens, 4, hidden]` bf16 or f32; `f`: `[tokens, hidden]` of the same dtype; `post`: `[tokens, 4]`,
/// `comb`: `[tokens, 4, 4]` f32. f32 with one final rounding.
pub fn hyper_merge(
    exec: &mut Exec,
    f: &Tensor,
    (post, comb): (&Tensor, &Tensor),
    streams: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("hyper_merge");
    merge_shapes(check, f, (post, comb), streams)?;
    let flops = (2 * STREAMS + 2) * streams.elements();
    exec.record(|_| OpRecord::new("hyper_merge", "rows", &[streams, f, post, comb], &[streams], flops as u64));
    if exec.device() == Device::Cuda {
        return gpu::hyper_merge(exec, f, (post, comb), streams);
    }
    if cpu(check, exec)?.is_some() {
        merge_host(f, (post, comb), streams);
    }
    Ok(())
}

/// Checks the operands of a merge: a block's output `f`, how it goes back to the streams, and the streams.
pub(super) fn merge_shapes(
    check: Check,
    f: &Tensor,
    (post, comb): (&Tensor, &Tensor),
    streams: &Tensor,
) -> Result<(), OpError> {
    let (tokens, hidden) = f.rows_cols();
    activation(check, streams, &[tokens, STREAMS, hidden])?;
    check.is(f, streams.dtype(), &[tokens, hidden])?;
    check.is(post, DType::F32, &[tokens, STREAMS])?;
    check.is(comb, DType::F32, &[tokens, STREAMS, STREAMS])
}

/// [`hyper_merge`] on the host.
pub(super) fn merge_host(f: &Tensor, (post, comb): (&Tensor, &Tensor), streams: &mut Tensor) {
    let hidden = f.rows_cols().1;
    let mut values = read(streams).into_owned();
    let f = read(f);
    let tokens = values.chunks_exact_mut(STREAMS * hidden).zip(f.chunks_exact(hidden));
    let mixing = post.host().chunks_exact(STREAMS).zip(comb.host().chunks_exact(STREAMS * STREAMS));
    tokens.zip(mixing).for_each(|((streams, f), (post, comb))| reference::merge(streams, f, post, comb));
    write(streams, &values);
}

/// The end of the residual streams: `out = Σ_j (sigmoid(m[j] * scale + base[j]) + eps) · stream[j]`, `m` as in
/// [`hyper_mix`]. `streams`: `[tokens, 4, hidden]`; `out`: `[tokens, hidden]`; f32 inside, one rounding at the end.
pub fn hyper_head(
    exec: &mut Exec,
    streams: &Tensor,
    weights: &HyperWeights,
    spec: HyperSpec,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("hyper_head");
    let (tokens, hidden) = shapes(check, streams, weights, STREAMS, 1)?;
    activation(check, out, &[tokens, hidden])?;
    record(exec, "hyper_head", (streams, weights), &[out], STREAMS);
    if exec.device() == Device::Cuda {
        return gpu::hyper_head(exec, streams, weights, spec, out);
    }
    let Some(isa) = cpu(check, exec)? else { return Ok(()) };
    let (x, base, scale) = (read(streams), weights.base.host::<f32>(), weights.scale.host::<f32>());
    let mut values = vec![0.0; tokens * hidden];
    let mut m = [0.0; STREAMS];
    for (x, out) in x.chunks_exact(STREAMS * hidden).zip(values.chunks_exact_mut(hidden)) {
        reference::mixes(isa, x, weights.function.host(), spec.norm_eps, &mut m);
        let pre: [f32; STREAMS] = std::array::from_fn(|j| reference::input_weight(m[j], scale[0], base[j], spec.eps));
        reference::weighted_sum(x, &pre, out);
    }
    write(out, &values);
    Ok(())
}

/// Checks streams and weights of `mixes` values with `scales` scales; `(tokens, hidden)`.
pub(super) fn shapes(
    check: Check,
    streams: &Tensor,
    weights: &HyperWeights,
    mixes: usize,
    scales: usize,
) -> Result<(usize, usize), OpError> {
    let (tokens, width) = streams.rows_cols();
    activation(check, streams, &[tokens, STREAMS, width / STREAMS])?;
    check.that(width.is_multiple_of(32), "hidden must be a multiple of 8")?;
    check.is(&weights.function, DType::F32, &[mixes, width])?;
    check.is(&weights.base, DType::F32, &[mixes])?;
    check.is(&weights.scale, DType::F32, &[scales])?;
    Ok((tokens, width / STREAMS))
}

fn record(exec: &mut Exec, op: &'static str, reads: (&Tensor, &HyperWeights), writes: &[&Tensor], mixes: usize) {
    let (streams, HyperWeights { function, base, scale }) = reads;
    let flops = 2 * (mixes + 2) * streams.elements();
    exec.record(|_| OpRecord::new(op, "rows", &[streams, function, base, scale], writes, flops as u64));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    fn f32s(n: usize, seed: u64) -> Vec<f32> {
        bf16s(n, seed).iter().map(|v| v.to_f32() * 1.000_3).collect()
    }

    fn tensor(host: &mut Host, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = host.zeros("x", shape, DType::F32);
        tensor.host_mut::<f32>().copy_from_slice(values);
        tensor
    }

    fn weights(host: &mut Host, mixes: usize, scales: usize, hidden: usize) -> HyperWeights {
        HyperWeights {
            function: tensor(host, &[mixes, 4 * hidden], &f32s(mixes * 4 * hidden, 2)),
            base: tensor(host, &[mixes], &f32s(mixes, 3)),
            scale: tensor(host, &[scales], &f32s(scales, 4)),
        }
    }

    /// The mixing values by their formula in f64.
    fn mixes(x: &[f32], function: &[f32]) -> Vec<f64> {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let dot = |row: &[f32]| x.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        function.chunks(x.len()).map(|row| dot(row) / (mean + 1e-6).sqrt()).collect()
    }

    const SPEC: HyperSpec = HyperSpec { iters: 20, eps: 1e-6, norm_eps: 1e-6 };

    #[test]
    fn trap_12_the_mixing_gemm_is_true_f32() {
        Host::each(|mut host| {
            let hidden = 256;
            let x = f32s(4 * hidden, 1);
            let (tx, w) = (tensor(&mut host, &[1, 4, hidden], &x), weights(&mut host, 4, 1, hidden));
            let mut out = host.zeros("out", &[1, hidden], DType::F32);
            hyper_head(&mut host.exec, &tx, &w, SPEC, &mut out).unwrap();
            let (base, scale) = (f32s(4, 3), f64::from(f32s(1, 4)[0]));
            let m = mixes(&x, w.function.host());
            let pre = |j: usize| 1.0 / (1.0 + (-(m[j] * scale + f64::from(base[j]))).exp()) + 1e-6;
            for (i, got) in out.host::<f32>().iter().enumerate() {
                let expected: f64 = (0..4).map(|j| pre(j) * f64::from(x[j * hidden + i])).sum();
                // With weights in TF32 or bf16 the error is above 1e-3.
                assert!((f64::from(*got) - expected).abs() < 2e-5, "{got} but {expected}");
            }
        });
    }

    #[test]
    fn mixing_is_doubly_stochastic() {
        Host::each(|mut host| {
            let (tokens, hidden) = (3, 64);
            let streams = tensor(&mut host, &[tokens, 4, hidden], &f32s(tokens * 4 * hidden, 1));
            let w = weights(&mut host, 24, 3, hidden);
            let mut mixed = host.zeros("mixed", &[tokens, hidden], DType::F32);
            let mut post = host.zeros("post", &[tokens, 4], DType::F32);
            let mut comb = host.zeros("comb", &[tokens, 4, 4], DType::F32);
            hyper_mix(&mut host.exec, &streams, &w, SPEC, &mut mixed, (&mut post, &mut comb)).unwrap();
            assert!(post.host::<f32>().iter().all(|p| (0.0..=2.0).contains(p)));
            for c in comb.host::<f32>().chunks(16) {
                for k in 0..4 {
                    let column: f32 = (0..4).map(|j| c[4 * j + k]).sum();
                    assert!((column - 1.0).abs() < 1e-5, "columns are normalised last: {column}");
                }
            }
        });
    }

    #[test]
    fn trap_04_comb_is_applied_transposed() {
        Host::each(|mut host| {
            // Stream 0 goes to stream 3 alone, and nothing else anywhere.
            let mut comb = [0.0; 16];
            comb[3] = 1.0;
            let comb = tensor(&mut host, &[1, 4, 4], &comb);
            let post = tensor(&mut host, &[1, 4], &[0.0, 0.0, 10.0, 0.0]);
            let (f, mut streams) = (
                tensor(&mut host, &[1, 2], &[1.0, 2.0]),
                tensor(&mut host, &[1, 4, 2], &[1., 2., 3., 4., 5., 6., 7., 8.]),
            );
            hyper_merge(&mut host.exec, &f, (&post, &comb), &mut streams).unwrap();
            assert_eq!(streams.host::<f32>(), [0., 0., 0., 0., 10., 20., 1., 2.]);
        });
    }

    /// All streams of the first layer are equal; the op has no special case for it.
    #[test]
    fn trap_17_equal_streams_see_the_sum_of_the_function() {
        Host::each(|mut host| {
            let hidden = 64;
            let one = f32s(hidden, 9);
            let streams = tensor(&mut host, &[1, 4, hidden], &one.repeat(4));
            let w = weights(&mut host, 4, 1, hidden);
            let mut out = host.zeros("out", &[1, hidden], DType::F32);
            hyper_head(&mut host.exec, &streams, &w, SPEC, &mut out).unwrap();
            let summed =
                |row: &[f32]| (0..hidden).map(|i| (0..4).map(|j| row[j * hidden + i]).sum()).collect::<Vec<f32>>();
            let function: Vec<f32> = w.function.host::<f32>().chunks(4 * hidden).flat_map(summed).collect();
            let (m, base, scale) = (mixes(&one, &function), f32s(4, 3), f64::from(f32s(1, 4)[0]));
            let total: f64 = (0..4).map(|j| 1.0 / (1.0 + (-(m[j] * scale + f64::from(base[j]))).exp()) + 1e-6).sum();
            for (got, x) in out.host::<f32>().iter().zip(&one) {
                assert!((f64::from(*got) - total * f64::from(*x)).abs() < 2e-5);
            }
        });
    }
}
