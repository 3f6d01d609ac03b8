//! The gated delta rule for prompts.

use super::check::Check;
use super::gated_delta_rule::{run, step_flops};
use crate::choice::{self, DeltaChunks};
use crate::cpu::gated_delta::Form;
use crate::cuda;
use crate::delta::DeltaShape;
use crate::delta_operands::DeltaInputs;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{OpError, Tensor};

/// [`gated_delta_rule`](super::gated_delta_rule) in chunks of 64 tokens from the start of each segment, as GEMMs for
/// tensor cores (the WY form; arXiv 2406.06484, 2412.06464). The last chunk of a segment may be ragged.
///
/// Operands as there, and `scratch`, of which a GPU needs [`DeltaShape::chunk_scratch`] bytes and a CPU none. Equal to
/// the recurrence up to rounding, so the bits depend on how a sequence is split into segments. A CPU gains nothing from
/// chunks and serves with the recurrence.
///
/// On a CPU everything is f32. The CUDA kernels take heads of 128 elements. Their GEMMs have bf16 operands and f32
/// sums; state, gates, lengths and decays are f32, the inverse tf32. Outputs are off by 0.3 % on average, as with one
/// rounding to bf16. The kernels read `segments` and `states` while the previous kernel still runs, so no other kernel
/// of the same step may write them.
pub fn gated_delta_chunks(
    exec: &mut Exec,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    scratch: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (k, v, chunk) = (shape.key_dim, shape.value_dim, 64);
    // GEMMs of a chunk, per token: three with [chunk, chunk], two of them half empty, and three with the state.
    let flops = 2 * chunk * (2 * k + v) / 2 + 2 * chunk * (k + v) / 2 + 6 * k * v;
    let (tokens, segments) = (inputs.mixed.rows_cols().0, inputs.segments.rows_cols().0);
    let choice = choice::gpu(exec)?.map(|gpu| DeltaChunks::choose(&gpu, shape, tokens, segments));
    let flops = if choice == Some(DeltaChunks::Recurrent) { step_flops(shape) } else { flops };
    let form = (Form::Chunked, choice.as_ref().map_or("", DeltaChunks::name));
    run(Check("gated_delta_chunks"), exec, form, flops, inputs, shape, states, out)?;
    match (exec.device(), &choice) {
        (Device::Cuda, Some(choice)) => cuda::gated_delta_chunks(exec, choice, inputs, shape, states, scratch, out),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::{NO_STATE, SEGMENT_WORDS};
    use crate::ops::gated_delta_rule;
    use crate::testing::{Host, bf16s};
    use pegainfer_core::isa::Isa;
    use pegainfer_core::rng;
    use pegainfer_core::tensor::DType;

    const SHAPE: DeltaShape =
        DeltaShape { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 32, conv_width: 4, tiled_output: false };

    /// The op on a CPU.
    fn gated_delta_chunks(
        exec: &mut Exec,
        inputs: &DeltaInputs<'_>,
        shape: DeltaShape,
        states: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), OpError> {
        let mut scratch = exec.tensor("scratch", &[0], DType::U8).unwrap();
        super::gated_delta_chunks(exec, inputs, shape, states, &mut scratch, out)
    }

    type Op = fn(&mut Exec, &DeltaInputs<'_>, DeltaShape, &mut Tensor, &mut Tensor) -> Result<(), OpError>;

    /// Operands of a step of `tokens` tokens.
    struct Step {
        host: Host,
        shape: DeltaShape,
        tensors: [Tensor; 4],
        /// Two slots of values in [-1/2, 1/2).
        states: Vec<f32>,
        tokens: usize,
    }

    impl Step {
        fn new(mut host: Host, shape: DeltaShape, tokens: usize, seed: u64) -> Self {
            let f32s = |n: usize, seed: u64, scale: f32| bf16s(n, seed).iter().map(|v| v.to_f32() * scale).collect();
            let mut vector = |name: &str, values: Vec<f32>| {
                let mut tensor = host.zeros(name, &[values.len()], DType::F32);
                tensor.host_mut().copy_from_slice(&values);
                tensor
            };
            let a_log = vector("a_log", f32s(shape.value_heads, seed + 1, 0.7));
            let dt_bias = vector("dt_bias", f32s(shape.value_heads, seed + 2, 0.7));
            let mixed = bf16s(tokens * shape.channels(), seed + 3);
            let projected = bf16s(tokens * shape.projected_width(), seed + 4);
            let mixed = host.bf16("mixed", &[tokens, shape.channels()], &mixed);
            let projected = host.bf16("projected", &[tokens, shape.projected_width()], &projected);
            let states = f32s(shape.states(2).iter().product(), seed + 5, 0.25);
            Self { host, shape, tensors: [mixed, projected, a_log, dt_bias], states, tokens }
        }

        /// Output, and the states afterwards.
        fn run(&mut self, op: Op, cuts: &[[u32; 4]]) -> (Vec<f32>, Vec<f32>) {
            let Self { host, shape, tensors: [mixed, projected, a_log, dt_bias], states, tokens } = self;
            let mut segments = host.zeros("segments", &[cuts.len(), SEGMENT_WORDS], DType::U32);
            segments.host_mut::<u32>().copy_from_slice(cuts.as_flattened());
            let mut memory = host.zeros("states", &shape.states(2), DType::F32);
            memory.host_mut::<f32>().copy_from_slice(states);
            let mut out = host.zeros("out", &[*tokens, shape.v_width()], DType::F32);
            let inputs = DeltaInputs { mixed, projected, a_log, dt_bias, segments: &segments };
            op(&mut host.exec, &inputs, *shape, &mut memory, &mut out).unwrap();
            (out.host().to_vec(), memory.host().to_vec())
        }

        /// The definition in f64, from the state in slot `from`: the output, and the state afterwards.
        fn reference(&self, from: Option<usize>) -> (Vec<f64>, Vec<f64>) {
            let (shape, [mixed, projected, a_log, dt_bias]) = (self.shape, &self.tensors);
            let f64s = |t: &Tensor| t.host::<half::bf16>().iter().map(|v| v.to_f64()).collect::<Vec<_>>();
            let (mixed, projected) = (f64s(mixed), f64s(projected));
            let (kd, vd, len) = (shape.key_dim, shape.value_dim, shape.v_width() * shape.key_dim);
            let before = |slot: usize| self.states[slot * len..][..len].iter().map(|&x| f64::from(x)).collect();
            let mut state: Vec<f64> = from.map_or(vec![0.0; len], before);
            let mut out = vec![0.0; self.tokens * shape.v_width()];
            let unit = |x: &[f64]| {
                let scale = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt().recip();
                x.iter().map(|x| x * scale).collect::<Vec<_>>()
            };
            for t in 0..self.tokens {
                let (m, p) = (&mixed[t * shape.channels()..], &projected[t * shape.projected_width()..]);
                for h in 0..shape.value_heads {
                    let (q, k) = (
                        unit(&m[h / shape.group() * kd..][..kd]),
                        unit(&m[shape.k_width() + h / shape.group() * kd..][..kd]),
                    );
                    let b = p[shape.channels() + shape.v_width() + h];
                    let a = p[shape.channels() + shape.v_width() + shape.value_heads + h]
                        + f64::from(dt_bias.host::<f32>()[h]);
                    let decay = (-f64::from(a_log.host::<f32>()[h]).exp() * a.exp().ln_1p()).exp();
                    let beta = 1.0 / (1.0 + (-b).exp());
                    for i in 0..vd {
                        let row = &mut state[(h * vd + i) * kd..][..kd];
                        row.iter_mut().for_each(|x| *x *= decay);
                        let read: f64 = row.iter().zip(&k).map(|(x, k)| x * k).sum();
                        let delta = beta * (m[2 * shape.k_width() + h * vd + i] - read);
                        row.iter_mut().zip(&k).for_each(|(x, k)| *x += delta * k);
                        let read: f64 = row.iter().zip(&q).map(|(x, q)| x * q).sum();
                        out[t * shape.v_width() + h * vd + i] = read / (kd as f64).sqrt();
                    }
                }
            }
            (out, state)
        }
    }

    /// Largest difference, relative to the largest expected value.
    fn error(got: &[f32], expected: &[f64]) -> f64 {
        let (mut worst, mut size) = (0.0f64, 0.0f64);
        for (got, expected) in got.iter().zip(expected) {
            worst = worst.max((f64::from(*got) - expected).abs());
            size = size.max(expected.abs());
        }
        assert!(size > 0.0 && !worst.is_nan());
        worst / size
    }

    #[test]
    fn both_forms_are_the_definition() {
        Host::each(|host| {
            let shape = DeltaShape {
                key_heads: 2,
                value_heads: 6,
                key_dim: 32,
                value_dim: 48,
                conv_width: 4,
                tiled_output: false,
            };
            let mut step = Step::new(host, shape, 150, 7);
            for (from, cut) in [(None, [0, 150, NO_STATE, 0]), (Some(1), [0, 150, 1, 1]), (Some(1), [0, 150, 1, 0])] {
                let (expected, state) = step.reference(from);
                for op in [gated_delta_rule as Op, gated_delta_chunks] {
                    let (out, states) = step.run(op, &[cut]);
                    assert!(error(&out, &expected) < 2e-6);
                    let len = state.len();
                    assert!(error(&states[cut[3] as usize * len..][..len], &state) < 2e-6);
                }
            }
        });
    }

    #[test]
    fn chunks_equal_the_recurrence_over_random_lengths() {
        for isa in Isa::available() {
            for case in 0..12 {
                let tokens = [1, 63, 64, 65, 1000].get(case).copied();
                let tokens = tokens.unwrap_or(1 + (rng::bits(11, case as u64) % 1000) as usize);
                let host = Host { exec: Exec::cpu(isa, Some(2)).unwrap() };
                let mut step = Step::new(host, SHAPE, tokens, 100 + case as u64);
                let from = [NO_STATE, 1][case % 2];
                let cut = [[0, tokens as u32, from, 0]];
                let (recurrent, state) = step.run(gated_delta_rule, &cut);
                let (chunked, carried) = step.run(gated_delta_chunks, &cut);
                let half = state.len() / 2;
                let widen = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                assert!(error(&chunked, &widen(&recurrent)) < 1e-5, "{isa}, {tokens} tokens");
                assert!(error(&carried[..half], &widen(&state[..half])) < 1e-5, "{isa}, {tokens} tokens");
            }
        }
    }

    #[test]
    fn cuts_change_no_bit_of_the_recurrence() {
        Host::each(|host| {
            let mut step = Step::new(host, SHAPE, 100, 3);
            let whole = step.run(gated_delta_rule, &[[0, 100, NO_STATE, 1]]);
            let cuts = [[0, 1, NO_STATE, 0], [1, 30, 0, 0], [30, 30, 0, 1], [30, 99, 1, 0], [99, 100, 0, 1]];
            let (out, states) = step.run(gated_delta_rule, &cuts);
            assert!(out == whole.0);
            assert!(states[states.len() / 2..] == whole.1[states.len() / 2..]);
        });
    }

    #[test]
    fn a_state_that_is_not_kept_changes_nothing_else() {
        Host::each(|host| {
            let mut step = Step::new(host, SHAPE, 70, 9);
            for op in [gated_delta_rule as Op, gated_delta_chunks] {
                let (kept, _) = step.run(op, &[[0, 30, 1, 0], [30, 70, NO_STATE, 1]]);
                let (out, states) = step.run(op, &[[0, 30, 1, NO_STATE], [30, 70, NO_STATE, NO_STATE]]);
                assert!(out == kept);
                assert!(states == step.states);
            }
        });
    }
}
