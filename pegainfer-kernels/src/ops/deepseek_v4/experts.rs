//! The clamped SwiGLU of the routed experts and of the shared one.

use super::kv_quant::round;
use super::matmul::whole_blocks;
use super::values::{activation, cpu, read, write};
use crate::choice::DenseGemm;
use crate::cpu::deepseek_v4::experts::{ExpertWeights, Math, expert};
use crate::cpu::deepseek_v4::kv_quant::fp8;
use crate::cpu::weights::BLOCK;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::borrow::Cow;

/// Experts of one width, stacked along the rows of their matrices.
#[derive(Debug)]
pub struct Experts {
    /// `w1`, `[count * width, hidden]`.
    pub gate: Matrix,
    /// `w3`, `[count * width, hidden]`.
    pub up: Matrix,
    /// `w2`, `[count * hidden, width]`.
    pub down: Matrix,
    /// Number of experts.
    pub count: usize,
}

/// Constants of an expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertMath {
    /// Bound of gate (from above) and up values (both sides), applied before the SiLU.
    pub limit: f32,
    /// True if the input of `w2`, if that is FP8 or FP4, is rounded as by `round_activation`. The caller rounds that of
    /// `w1` and `w3`.
    pub quantize: bool,
}

impl ExpertMath {
    fn for_reference(self, dtype: DType) -> Math {
        let round: fn(&mut [f32]) = match dtype {
            DType::Bf16 => |x| round(x, DType::Bf16),
            _ => |_| {},
        };
        Math { limit: self.limit, quantize: self.quantize, round }
    }
}

impl Experts {
    /// Inner dimension.
    pub fn width(&self) -> usize {
        self.down.shape().1
    }

    pub(super) fn check(&self, check: Check, hidden: usize) -> Result<usize, OpError> {
        let (count, width) = (self.count, self.width());
        [&self.gate, &self.up, &self.down].into_iter().try_for_each(|w| whole_blocks(check, w))?;
        let fits = self.gate.shape() == (count * width, hidden)
            && self.up.shape() == (count * width, hidden)
            && self.down.shape() == (count * hidden, width);
        check.that(fits, "the experts' matrices do not fit the activation or each other")?;
        let whole = |w: &Matrix| !matches!(w, Matrix::Fp8 { .. }) || (w.shape().0 / count.max(1)).is_multiple_of(128);
        let blocks = count <= 1 || [&self.gate, &self.up, &self.down].into_iter().all(whole);
        check.that(blocks, "experts in FP8 must have whole blocks of 128 rows")?;
        Ok(width)
    }

    fn weights(&self, number: usize) -> ExpertWeights<'_> {
        let (gate, up, down) = (self.gate.weights(), self.up.weights(), self.down.weights());
        ExpertWeights { gate, up, down, number }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(Matrix::tensors)
    }
}

/// The sum of a token's experts, of those present: `out = Σ_e w2 · (weight[e] · silu(min(w1 · x, limit)) · clamp(w3 ·
/// x, ±limit)) + shared`, in the order of the experts' numbers. The routing weight is applied before `w2`, and so
/// before the rounding of its input.
///
/// `x`: `[T, hidden]` bf16 or f32; `chosen`: `[T, k]` u32; `weights`: `[T, k]` f32; `experts`: those with the numbers
/// from `first` on, others are skipped; `shared`: `[T, hidden]` of the dtype of `x`, the result of [`shared_expert`],
/// or none; `out`: `[T, hidden]` of the dtype of `x`. SwiGLU and the sum are f32, and the sum is rounded once. If `x`
/// is bf16, the output of every GEMM and the input of `w2` are rounded to bf16. If the experts are FP8 or FP4, bf16 `x`
/// must be values of `round_activation`, unless [`moe_rounds`](super::moe_rounds) says that it is rounded here.
pub fn routed_experts(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (experts, first): (&Experts, usize),
    math: ExpertMath,
    shared: Option<&Tensor>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("routed_experts");
    let (tokens, hidden) = x.rows_cols();
    let k = chosen.rows_cols().1;
    activation(check, x, &[tokens, hidden])?;
    check.is(chosen, DType::U32, &[tokens, k])?;
    check.is(weights, DType::F32, &[tokens, k])?;
    check.is(out, x.dtype(), &[tokens, hidden])?;
    if let Some(shared) = shared {
        check.is(shared, x.dtype(), &[tokens, hidden])?;
    }
    let width = experts.check(check, hidden)?;
    exec.record(|_| {
        // At most this many distinct experts are read.
        let read = experts.count.min(tokens * k);
        let all: u64 = experts.tensors().map(Tensor::bytes).sum();
        let added = shared.map_or(0, Tensor::bytes);
        let bytes = x.bytes() + out.bytes() + added + all / experts.count.max(1) as u64 * read as u64;
        let flops = 6 * (tokens * k * hidden * width) as u64;
        let reads: Vec<&Tensor> = [x, chosen, weights].into_iter().chain(shared).chain(experts.tensors()).collect();
        OpRecord::new("routed_experts", "experts", &reads, &[out], flops).with_bytes(bytes)
    });
    if exec.device() == Device::Cuda {
        return gpu::routed_experts(exec, x, (chosen, weights), (experts, first), math, shared, out);
    }
    let Some(isa) = cpu(check, exec)? else { return Ok(()) };
    let (values, mut sums) = (input(x, experts, math), vec![0.0; tokens * hidden]);
    let places: Vec<(u32, f32)> = chosen.host().iter().copied().zip(weights.host().iter().copied()).collect();
    for e in 0..experts.count {
        let mine = |(_, (number, _)): &(usize, &(u32, f32))| *number as usize == first + e;
        let (rows, weights): (Vec<usize>, Vec<f32>) =
            places.iter().enumerate().filter(mine).map(|(i, (_, weight))| (i / k, *weight)).unzip();
        let inputs: Vec<f32> = rows.iter().flat_map(|t| &values[t * hidden..][..hidden]).copied().collect();
        let outputs =
            expert(isa, &inputs, &weights, experts.weights(e), (hidden, width), math.for_reference(x.dtype()));
        for (t, output) in rows.iter().zip(outputs.chunks_exact(hidden)) {
            sums[t * hidden..][..hidden].iter_mut().zip(output).for_each(|(sum, y)| *sum += y);
        }
    }
    if let Some(shared) = shared {
        sums.iter_mut().zip(read(shared).iter()).for_each(|(sum, shared)| *sum += shared);
    }
    write(out, &sums);
    Ok(())
}

/// The output of the shared expert: `out = w2 · (silu(min(w1 · x, limit)) · clamp(w3 · x, ±limit))`.
///
/// `x`: `[T, hidden]` bf16 or f32; `out`: the same. Clamped like the routed experts. As in [`matmul`](super::matmul),
/// bf16 activations must be values of `round_activation` if the experts are FP8 or FP4, unless
/// [`moe_rounds`](super::moe_rounds) says otherwise; and from 33 rows on a GPU may overwrite up to three rows of memory
/// after the last row of `out`.
pub fn shared_expert(
    exec: &mut Exec,
    x: &Tensor,
    experts: &Experts,
    math: ExpertMath,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("shared_expert");
    let (tokens, hidden) = x.rows_cols();
    activation(check, x, &[tokens, hidden])?;
    check.is(out, x.dtype(), &[tokens, hidden])?;
    let width = experts.check(check, hidden)?;
    check.that(experts.count == 1, "there is one shared expert")?;
    let large = gpu::is_large_expert(exec, x, experts, math, out)?;
    exec.record(|_| {
        let reads: Vec<&Tensor> = [x].into_iter().chain(experts.tensors()).collect();
        let kernel = if large { DenseGemm::Fp8CublasLt.name() } else { "experts" };
        OpRecord::new("shared_expert", kernel, &reads, &[out], 6 * (tokens * hidden * width) as u64)
    });
    if exec.device() == Device::Cuda {
        return gpu::shared_expert(exec, x, experts, math, (large, out));
    }
    let Some(isa) = cpu(check, exec)? else { return Ok(()) };
    let (x, math) = (input(x, experts, math), math.for_reference(x.dtype()));
    write(out, &expert(isa, &x, &vec![1.0; tokens], experts.weights(0), (hidden, width), math));
    Ok(())
}

/// Values of `x` in the form that the experts' first GEMMs take. Rounding rounded values changes nothing.
fn input<'x>(x: &'x Tensor, experts: &Experts, math: ExpertMath) -> Cow<'x, [f32]> {
    let mut values = read(x);
    if math.quantize && experts.gate.is_quantized() {
        fp8(values.to_mut(), BLOCK);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};
    use half::bf16;

    const HIDDEN: usize = 128;
    const WIDTH: usize = 32;

    fn values(seed: u64, factor: f32) -> Vec<bf16> {
        bf16s(WIDTH * HIDDEN, seed).iter().map(|v| bf16::from_f32(v.to_f32() * factor)).collect()
    }

    fn make(host: &mut Host, seed: u64, factor: f32) -> Experts {
        let mut matrix =
            |seed, rows: usize| Matrix::Bf16(host.bf16("w", &[rows, WIDTH * HIDDEN / rows], &values(seed, factor)));
        Experts { gate: matrix(seed, WIDTH), up: matrix(seed + 1, WIDTH), down: matrix(seed + 2, HIDDEN), count: 1 }
    }

    /// The formula in f64, without the clamp if `limit` is infinite.
    fn reference(x: &[bf16], seed: u64, factor: f32, limit: f64) -> Vec<f64> {
        let (w1, w3, w2) = (values(seed, factor), values(seed + 1, factor), values(seed + 2, factor));
        let dot = |row: &[bf16]| row.iter().zip(x).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>();
        let inner = |(g, u): (&[bf16], &[bf16])| {
            let gate = dot(g).min(limit);
            gate / (1.0 + (-gate).exp()) * dot(u).clamp(-limit, limit)
        };
        let h: Vec<f64> = w1.chunks(HIDDEN).zip(w3.chunks(HIDDEN)).map(inner).collect();
        w2.chunks(WIDTH).map(|row| row.iter().zip(&h).map(|(a, b)| a.to_f64() * b).sum()).collect()
    }

    #[test]
    fn trap_06_routed_and_shared_experts_are_clamped_and_gates_only_from_above() {
        Host::each(|mut host| {
            let x = bf16s(HIDDEN, 1);
            let math = ExpertMath { limit: 10.0, quantize: false };
            let mut chosen = host.zeros("chosen", &[1, 1], DType::U32);
            chosen.host_mut::<u32>()[0] = 3;
            let mut weights = host.zeros("weights", &[1, 1], DType::F32);
            weights.host_mut::<f32>()[0] = 0.5;
            // Gate and up values up to ±60: far beyond the limit, with gates far below -10 as well.
            let experts = make(&mut host, 10, 1.0);
            let mut tx32 = host.zeros("x", &[1, HIDDEN], DType::F32);
            tx32.host_mut::<f32>().iter_mut().zip(&x).for_each(|(t, x)| *t = x.to_f32());
            let mut routed = host.zeros("routed", &[1, HIDDEN], DType::F32);
            let choice = (&chosen, &weights);
            routed_experts(&mut host.exec, &tx32, choice, (&experts, 3), math, None, &mut routed).unwrap();
            let (clamped, free) = (reference(&x, 10, 1.0, 10.0), reference(&x, 10, 1.0, f64::INFINITY));
            let size = clamped.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            assert!(clamped.iter().zip(&free).any(|(a, b)| (a - b).abs() > size), "the clamp is not tested");
            for (got, expected) in routed.host::<f32>().iter().zip(&clamped) {
                assert!((f64::from(*got) - 0.5 * expected).abs() < 1e-5 * size);
            }
            let [mut shared, mut out] = ["shared", "out"].map(|name| host.zeros(name, &[1, HIDDEN], DType::F32));
            shared_expert(&mut host.exec, &tx32, &experts, math, &mut shared).unwrap();
            routed_experts(&mut host.exec, &tx32, choice, (&experts, 3), math, Some(&shared), &mut out).unwrap();
            for (got, expected) in out.host::<f32>().iter().zip(&clamped) {
                assert!((f64::from(*got) - 1.5 * expected).abs() < 1e-5 * size);
            }
            // An expert of another rank adds nothing.
            routed_experts(&mut host.exec, &tx32, choice, (&experts, 4), math, None, &mut routed).unwrap();
            assert!(routed.host::<f32>().iter().all(|v| *v == 0.0));
        });
    }

    #[test]
    fn trap_07_the_routing_weight_is_applied_before_the_last_product() {
        Host::each(|mut host| {
            // bf16 rounds the input of w2: with a weight of 1/3 before it the bits differ from 1/3 after it.
            let x = bf16s(HIDDEN, 1);
            let tx = host.bf16("x", &[1, HIDDEN], &x);
            let math = ExpertMath { limit: 10.0, quantize: false };
            let chosen = host.zeros("chosen", &[1, 1], DType::U32);
            let experts = make(&mut host, 20, 0.1);
            let mut run = |weight: f32| {
                let mut weights = host.zeros("weights", &[1, 1], DType::F32);
                weights.host_mut::<f32>()[0] = weight;
                let mut out = host.zeros("out", &[1, HIDDEN], DType::Bf16);
                routed_experts(&mut host.exec, &tx, (&chosen, &weights), (&experts, 0), math, None, &mut out).unwrap();
                out.host::<bf16>().iter().map(|v| v.to_f32()).collect::<Vec<_>>()
            };
            let (third, whole) = (run(1.0 / 3.0), run(1.0));
            let after = |v: &f32| bf16::from_f32(v / 3.0).to_f32();
            assert!(third.iter().zip(&whole).any(|(third, whole)| *third != after(whole)));
            assert!(
                third.iter().zip(&whole).all(|(third, whole)| (third - whole / 3.0).abs() < 0.02 * whole.abs() + 1e-3)
            );
        });
    }
}
