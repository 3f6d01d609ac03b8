//! The gated MLPs of the experts, and their weighted sum.

use super::expert_stack::Experts;
use crate::choice::{self, GroupedGemm};
use crate::cpu::moe::experts::Expert;
use crate::cpu::weights::Weights;
use crate::cuda;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = Σ_e w2[e] · (weight[e] · silu(w1[e] · x) · (w3[e] · x))` over the experts of a token, in the order of their
/// numbers, where `gate_up` has the rows of `w1` and `w3`, and `down` those of `w2`.
///
/// `x`: `[T, hidden]` bf16; `chosen`: `[T, k]` u32, numbers below `experts.count`, each at most once in a row;
/// `weights`: `[T, k]` f32; `out`: `[T, hidden]` bf16. The outputs of all GEMMs and the input of `w2` are rounded to
/// bf16; SwiGLU and the sum are f32. The weight is applied before `w2`; transformers, which applies it after, differs
/// by rounding. Weights are taken as by [`linear`](crate::ops::linear); with FP8, Hopper rounds `x` and the input of `w2`
/// to FP8 where an expert has many rows, as [`quantize_fp8`](crate::ops::quantize_fp8) does.
///
/// A GPU takes bf16 and FP8, up to 1,024 experts and 32 of a token, and `hidden` and `width` in multiples of 8, in FP8
/// of 16; `gate_up` and `down` in parts of the same experts. The number of rows chooses the kernel, and with it the
/// order of the sums.
pub fn experts(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    experts: &Experts,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("experts");
    let ((tokens, hidden), k) = (x.rows_cols(), chosen.rows_cols().1);
    check.is(x, DType::Bf16, &[tokens, hidden])?;
    check.is(chosen, DType::U32, &[tokens, k])?;
    check.is(weights, DType::F32, &[tokens, k])?;
    check.is(out, DType::Bf16, &[tokens, hidden])?;
    experts.check(check, exec.device(), hidden)?;
    let gemm = choice::gpu(exec)?.map(|gpu| GroupedGemm::choose(&gpu, tokens * k, experts.shape()));
    exec.record(|device| record(choice::name(device, &gemm, GroupedGemm::name), (x, chosen, weights), experts, out));
    match (exec.device(), gemm) {
        (Device::Cpu(isa), _) => {
            let path = (isa, exec.activations());
            let mut sums = vec![0.0; tokens * hidden];
            for (e, (rows, weights)) in by_expert(chosen.host(), weights.host(), k, experts.count).iter().enumerate() {
                if rows.is_empty() {
                    continue;
                }
                let row = |t: &usize| &x.host::<bf16>()[t * hidden..][..hidden];
                let inputs: Vec<bf16> = rows.iter().flat_map(row).copied().collect();
                let outputs = expert(experts, e, hidden).run(path, &inputs, weights, &mut exec.scratch);
                for (t, output) in rows.iter().zip(outputs.chunks_exact(hidden)) {
                    let sums = &mut sums[t * hidden..][..hidden];
                    sums.iter_mut().zip(output).for_each(|(sum, y)| *sum += y.to_f32());
                }
            }
            out.host_mut::<bf16>().iter_mut().zip(sums).for_each(|(out, sum)| *out = bf16::from_f32(sum));
        }
        (Device::Cuda, Some(gemm)) => cuda::moe::experts(exec, gemm, x, (chosen, weights), experts, out)?,
        _ => {}
    }
    Ok(())
}

/// The rows of each expert and their weights.
fn by_expert(chosen: &[u32], weights: &[f32], k: usize, count: usize) -> Vec<(Vec<usize>, Vec<f32>)> {
    let mut lists = vec![(Vec::new(), Vec::new()); count];
    for (i, (e, weight)) in chosen.iter().zip(weights).enumerate() {
        let (rows, weights) = &mut lists[*e as usize];
        rows.push(i / k);
        weights.push(*weight);
    }
    lists
}

/// The matrices of expert number `e`.
fn expert(experts: &Experts, e: usize, hidden: usize) -> Expert<'_> {
    let width = experts.width();
    let (gate_up, down) = (rows_of(&experts.gate_up, e, 2 * width), rows_of(&experts.down, e, hidden));
    Expert { gate_up, down, hidden, width }
}

/// Rows `e * n` to `(e + 1) * n` of `w`, all in one part.
fn rows_of(w: &Matrix, e: usize, n: usize) -> Weights<'_> {
    let (k, mut first) = (w.shape().1, e * n);
    for part in w.as_ref().weights() {
        let rows = part.rows(k);
        if first < rows {
            return part.row_range(first..first + n, k);
        }
        first -= rows;
    }
    unreachable!("the op checked the number of experts")
}

fn record(
    kernel: &'static str,
    (x, chosen, weights): (&Tensor, &Tensor, &Tensor),
    experts: &Experts,
    out: &Tensor,
) -> OpRecord {
    let ((tokens, hidden), k) = (x.rows_cols(), chosen.rows_cols().1);
    let tensors: Vec<&Tensor> = experts.gate_up.tensors().into_iter().chain(experts.down.tensors()).collect();
    let all: u64 = tensors.iter().map(|tensor| tensor.bytes()).sum();
    let read = all as f64 * experts.expected_hits(tokens, k) / experts.count.max(1) as f64;
    let bytes = x.bytes() + out.bytes() + read.round() as u64;
    let flops = 6 * (tokens * k * hidden * experts.width()) as u64;
    let reads: Vec<&Tensor> = [x, chosen, weights].into_iter().chain(tensors).collect();
    OpRecord::new("experts", kernel, &reads, &[out], flops).with_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::matrix::BlockScales;
    use crate::testing::{Host, bf16s};

    const HIDDEN: usize = 128;
    const WIDTH: usize = 64;
    const COUNT: usize = 3;

    /// Three experts, as one matrix or with the last one as a part of its own.
    fn make(host: &mut Host, stacked: bool) -> Experts {
        let scaled =
            |n: usize, seed| -> Vec<bf16> { bf16s(n, seed).iter().map(|v| bf16::from_f32(v.to_f32() * 0.1)).collect() };
        let (first, second) = (scaled(COUNT * 2 * WIDTH * HIDDEN, 1), scaled(COUNT * HIDDEN * WIDTH, 2));
        let mut matrix = |values: &[bf16], k: usize| {
            let mut part = |values: &[bf16]| Matrix::Bf16(host.bf16("w", &[values.len() / k, k], values));
            let (most, last) = values.split_at(values.len() / COUNT * 2);
            if stacked { Matrix::Stacked(vec![part(most), part(last)]) } else { part(values) }
        };
        Experts { gate_up: matrix(&first, HIDDEN), down: matrix(&second, WIDTH), count: COUNT, shared: false }
    }

    /// The formula in f64.
    fn reference(x: &[bf16], choice: &[(usize, f32)], experts: &Experts) -> Vec<f64> {
        let (first, second) = (experts.gate_up.dequantize(), experts.down.dequantize());
        let mut out = vec![0.0; HIDDEN];
        for (e, weight) in choice {
            let dot = |row: usize| -> f64 {
                first[row * HIDDEN..][..HIDDEN].iter().zip(x).map(|(w, x)| f64::from(*w) * x.to_f64()).sum()
            };
            let inner = |i: usize| {
                let (gate, up) = (dot(e * 2 * WIDTH + i), dot(e * 2 * WIDTH + WIDTH + i));
                f64::from(*weight) * gate / (1.0 + (-gate).exp()) * up
            };
            let h: Vec<f64> = (0..WIDTH).map(inner).collect();
            for (j, out) in out.iter_mut().enumerate() {
                let row = &second[(e * HIDDEN + j) * WIDTH..][..WIDTH];
                *out += row.iter().zip(&h).map(|(w, h)| f64::from(*w) * h).sum::<f64>();
            }
        }
        out
    }

    /// Experts and weights of each of these tokens, `k` each.
    fn choose(host: &mut Host, choices: &[&[(usize, f32)]]) -> (Tensor, Tensor) {
        let shape = [choices.len(), choices[0].len()];
        let (mut chosen, mut weights) =
            (host.zeros("chosen", &shape, DType::U32), host.zeros("weights", &shape, DType::F32));
        for (i, (e, weight)) in choices.iter().copied().flatten().enumerate() {
            chosen.host_mut::<u32>()[i] = *e as u32;
            weights.host_mut::<f32>()[i] = *weight;
        }
        (chosen, weights)
    }

    fn run(host: &mut Host, x: &[bf16], choices: &[&[(usize, f32)]], stack: &Experts) -> Vec<bf16> {
        let (chosen, weights) = choose(host, choices);
        let x = host.bf16("x", &[choices.len(), HIDDEN], x);
        let mut out = host.zeros("out", &[choices.len(), HIDDEN], DType::Bf16);
        experts(&mut host.exec, &x, (&chosen, &weights), stack, &mut out).unwrap();
        out.host().to_vec()
    }

    const CHOICES: [&[(usize, f32)]; 4] =
        [&[(0, 0.75), (2, 0.25)], &[(2, 0.5), (0, 0.5)], &[(2, 0.9), (0, 0.1)], &[(0, 0.3), (2, 0.7)]];

    #[test]
    fn matches_f64_and_skips_experts_without_tokens() {
        Host::each(|mut host| {
            for stacked in [false, true] {
                let (stack, x) = (make(&mut host, stacked), bf16s(4 * HIDDEN, 3));
                let out = run(&mut host, &x, &CHOICES, &stack);
                for ((x, choice), out) in x.chunks(HIDDEN).zip(CHOICES).zip(out.chunks(HIDDEN)) {
                    let expected = reference(x, choice, &stack);
                    let size = expected.iter().fold(0f64, |max, v| max.max(v.abs()));
                    let close = |(got, expected): (&bf16, &f64)| (got.to_f64() - expected).abs() < 0.02 * size;
                    assert!(out.iter().zip(&expected).all(close), "{out:?}\n{expected:?}");
                }
            }
        });
    }

    #[test]
    fn a_token_gives_the_same_bits_alone_and_in_any_order_of_its_experts() {
        Host::each(|mut host| {
            let (stack, x) = (make(&mut host, false), bf16s(4 * HIDDEN, 4));
            let all = run(&mut host, &x, &CHOICES, &stack);
            for (i, choice) in CHOICES.iter().enumerate() {
                let reversed: Vec<_> = choice.iter().rev().copied().collect();
                for choice in [choice, &reversed[..]] {
                    let alone = run(&mut host, &x[i * HIDDEN..][..HIDDEN], &[choice], &stack);
                    assert_eq!(alone, all[i * HIDDEN..][..HIDDEN], "token {i}");
                }
            }
        });
    }

    #[test]
    fn experts_in_fp8_have_scales_of_their_own() {
        Host::each(|mut host| {
            let mut fp8 = |rows: usize, k: usize, seed: u64| {
                let values = bf16s(rows * k, seed);
                let (blocks, columns) = (rows / 128, k.div_ceil(128));
                let (mut weight, mut scale) =
                    (host.zeros("w", &[rows, k], DType::U8), host.zeros("s", &[blocks, columns], DType::F32));
                let codes = weight.host_mut::<u8>().iter_mut().zip(&values);
                codes.for_each(|(code, v)| *code = crate::cpu::formats::encode_e4m3(v.to_f32() * 0.1));
                scale.host_mut::<f32>().iter_mut().enumerate().for_each(|(i, s)| *s = 0.5 + i as f32);
                Matrix::Fp8 { weight, scale: BlockScales::F32(scale) }
            };
            let stack = Experts {
                gate_up: fp8(COUNT * 2 * WIDTH, HIDDEN, 5),
                down: fp8(COUNT * HIDDEN, WIDTH, 6),
                count: COUNT,
                shared: false,
            };
            let x = bf16s(HIDDEN, 7);
            let choice: &[(usize, f32)] = &[(1, 0.4), (2, 0.6)];
            let out = run(&mut host, &x, &[choice], &stack);
            let expected = reference(&x, choice, &stack);
            let size = expected.iter().fold(0f64, |max, v| max.max(v.abs()));
            assert!(out.iter().zip(&expected).all(|(got, e)| (got.to_f64() - e).abs() < 0.02 * size));
        });
    }

    #[test]
    fn half_an_expert_in_a_part_is_refused() {
        Host::each(|mut host| {
            let mut part = |rows: usize, k: usize| Matrix::Bf16(host.zeros("w", &[rows, k], DType::Bf16));
            let gate_up = Matrix::Stacked(vec![part(WIDTH, HIDDEN), part(3 * WIDTH, HIDDEN)]);
            let stack = Experts { gate_up, down: part(2 * HIDDEN, WIDTH), count: 2, shared: false };
            let (chosen, weights) = choose(&mut host, &[&[(0, 1.0)]]);
            let x = host.zeros("x", &[1, HIDDEN], DType::Bf16);
            let mut out = host.zeros("out", &[1, HIDDEN], DType::Bf16);
            let error = experts(&mut host.exec, &x, (&chosen, &weights), &stack, &mut out).unwrap_err();
            assert!(error.to_string().contains("half an expert"), "{error}");
        });
    }
}
