//! A gated delta rule layer between its two GEMMs, for rows of one token.

use super::activation::ActivationMut;
use super::check::Check;
use super::gated_delta_rule;
use super::{causal_conv1d, gated_rms_norm};
use crate::choice::DecodeDelta;
use crate::cpu::gated_delta::Form;
use crate::cuda;
use crate::delta::DeltaShape;
use crate::delta_operands::{DeltaInputs, DeltaWeights};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};

/// [`causal_conv1d`](super::causal_conv1d), [`gated_delta_rule`](super::gated_delta_rule) and
/// [`gated_rms_norm`](super::gated_rms_norm) for rows of one token each.
///
/// `projected`: `[rows, projected_width]` bf16; `segments`: `[rows, SEGMENT_WORDS]` u32, where segment `b` is token
/// `b`, and none continues from another; `states` and `conv_states` as in these ops; `mixed`: `[rows, channels]` bf16
/// and `read`: `[rows, v_width]` f32, scratch for intermediates with device-dependent contents; `out`: `[rows,
/// v_width]` bf16, or [in FP8](super::Activation). Rounding is that of the three ops.
///
/// A GPU runs one kernel, which reads segments, states and convolution states while the previous kernel still runs, so
/// no other kernel of the same step may write them.
#[expect(clippy::too_many_arguments, reason = "three ops in one")]
pub fn decode_delta<'o>(
    exec: &mut Exec,
    projected: &Tensor,
    weights: &DeltaWeights<'_>,
    segments: &Tensor,
    shape: DeltaShape,
    eps: f32,
    (states, conv_states): (&mut Tensor, &mut Tensor),
    (mixed, read): (&mut Tensor, &mut Tensor),
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (c, out) = (Check("decode_delta"), out.into());
    let (rows, DeltaWeights { conv, a_log, dt_bias, norm }) = (projected.rows_cols().0, *weights);
    let inputs = DeltaInputs { mixed: &*mixed, projected, a_log, dt_bias, segments };
    causal_conv1d::check(c, projected, conv, segments, shape, conv_states, mixed)?;
    gated_delta_rule::check(c, &inputs, shape, states, read)?;
    gated_rms_norm::check(c, read, projected, norm, shape, out.tensor)?;
    c.that(segments.rows_cols().0 == rows, "a row has no segment, or more than one token")?;
    c.that(states.rows_cols().0 == conv_states.rows_cols().0, "there are not as many convolution states as states")?;
    let choice = DecodeDelta::choose(shape, rows);
    let out = out.in_norm_format(exec)?;
    exec.record(|device| {
        let kernel = if let Device::Cpu(isa) = device { isa.name() } else { choice.name() };
        let reads = [projected, conv, a_log, dt_bias, norm, segments, states, conv_states];
        // Intermediates stay inside the kernel.
        let parts = [causal_conv1d::cost(conv, segments, shape, mixed), gated_rms_norm::cost(read, norm, out)];
        let steps = (rows * shape.value_heads * gated_delta_rule::step_flops(shape)) as u64;
        let bytes = parts[0][0] + gated_delta_rule::state_bytes(segments, shape) as u64 + parts[1][0];
        let bytes = bytes - mixed.bytes() - read.bytes();
        OpRecord::new(c.0, kernel, &reads, &[out, states, conv_states], parts[0][1] + steps + parts[1][1])
            .with_bytes(bytes)
    });
    match (exec.device(), choice) {
        (Device::Cuda, DecodeDelta::Fused) => {
            cuda::decode_delta(exec, projected, weights, segments, shape, eps, (states, conv_states), out)
        }
        _ => {
            causal_conv1d::dispatch(c, exec, projected, conv, segments, shape, conv_states, mixed)?;
            let inputs = DeltaInputs { mixed, projected, a_log, dt_bias, segments };
            gated_delta_rule::dispatch(c, exec, Form::Recurrent, &inputs, shape, states, read)?;
            gated_rms_norm::dispatch(exec, read, projected, norm, shape, eps, out)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::{NO_STATE, SEGMENT_WORDS};
    use crate::ops;
    use crate::testing::{Host, bf16s};
    use half::bf16;
    use pegainfer_core::tensor::DType;

    const SHAPE: DeltaShape =
        DeltaShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 48, conv_width: 4, tiled_output: false };

    /// Seeded values of a shape.
    fn f32s(host: &mut Host, name: &str, shape: &[usize]) -> Tensor {
        let mut tensor = host.zeros(name, shape, DType::F32);
        let values = bf16s(tensor.elements(), name.len() as u64);
        tensor.host_mut::<f32>().iter_mut().zip(values).for_each(|(to, x)| *to = 0.5 * x.to_f32());
        tensor
    }

    fn segments(host: &mut Host, cuts: &[[u32; 4]]) -> Tensor {
        let mut segments = host.zeros("segments", &[cuts.len(), SEGMENT_WORDS], DType::U32);
        segments.host_mut::<u32>().copy_from_slice(cuts.as_flattened());
        segments
    }

    #[test]
    fn it_is_a_convolution_the_rule_and_a_norm() {
        Host::each(|mut host| {
            // In place, from the start, to another slot, and two that are not kept.
            let cuts =
                [[0, 1, 2, 2], [1, 2, NO_STATE, 0], [2, 3, 1, 3], [3, 4, 4, NO_STATE], [4, 5, NO_STATE, NO_STATE]];
            let (shape, eps, rows, slots) = (SHAPE, 1e-6, cuts.len(), 5);
            let width = shape.projected_width();
            let projected = host.bf16("projected", &[rows, width], &bf16s(rows * width, 1));
            let [conv, a_log, dt_bias, norm] = [
                ("conv", &[shape.conv_width, shape.channels()][..]),
                ("a_log", &[shape.value_heads]),
                ("dt_bias", &[shape.value_heads]),
                ("norm", &[shape.value_dim]),
            ]
            .map(|(name, shape)| f32s(&mut host, name, shape));
            let weights = DeltaWeights { conv: &conv, a_log: &a_log, dt_bias: &dt_bias, norm: &norm };
            let segments = segments(&mut host, &cuts);
            let past = bf16s(shape.conv_states(slots).iter().product(), 2);
            let mut memory = [0, 1].map(|_| {
                (
                    f32s(&mut host, "states", &shape.states(slots)),
                    host.bf16("conv_states", &shape.conv_states(slots), &past),
                )
            });
            let [(states, conv_states), (fused_states, fused_tails)] = &mut memory;
            let before = states.host::<f32>().to_vec();
            let mut mixed = host.zeros("mixed", &[rows, shape.channels()], DType::Bf16);
            let mut read = host.zeros("read", &[rows, shape.v_width()], DType::F32);
            let [mut apart, mut fused] =
                ["apart", "fused"].map(|n| host.zeros(n, &[rows, shape.v_width()], DType::Bf16));
            let exec = &mut host.exec;
            ops::causal_conv1d(exec, &projected, &conv, &segments, shape, conv_states, &mut mixed).unwrap();
            let (a_log, dt_bias) = (&a_log, &dt_bias);
            let inputs = DeltaInputs { mixed: &mixed, projected: &projected, a_log, dt_bias, segments: &segments };
            ops::gated_delta_rule(exec, &inputs, shape, states, &mut read).unwrap();
            ops::gated_rms_norm(exec, &read, &projected, &norm, shape, eps, &mut apart).unwrap();
            let (memory, scratch) = ((&mut *fused_states, &mut *fused_tails), (&mut mixed, &mut read));
            decode_delta(exec, &projected, &weights, &segments, shape, eps, memory, scratch, &mut fused).unwrap();
            assert_eq!(apart.host::<bf16>(), fused.host::<bf16>());
            assert_eq!(states.host::<f32>(), fused_states.host::<f32>());
            assert_eq!(conv_states.host::<bf16>(), fused_tails.host::<bf16>());
            // States that are not kept leave no trace.
            let len = shape.v_width() * shape.key_dim;
            assert_eq!(states.host::<f32>()[4 * len..], before[4 * len..]);
            assert_ne!(states.host::<f32>()[..len], before[..len]);
        });
    }

    #[test]
    fn a_row_has_one_token() {
        Host::each(|mut host| {
            let (shape, rows) = (SHAPE, 2);
            let projected = host.zeros("projected", &[rows, shape.projected_width()], DType::Bf16);
            let conv = f32s(&mut host, "conv", &[shape.conv_width, shape.channels()]);
            let heads = f32s(&mut host, "heads", &[shape.value_heads]);
            let norm = f32s(&mut host, "norm", &[shape.value_dim]);
            let weights = DeltaWeights { conv: &conv, a_log: &heads, dt_bias: &heads, norm: &norm };
            let segments = segments(&mut host, &[[0, 2, NO_STATE, 0]]);
            let mut states = host.zeros("states", &shape.states(1), DType::F32);
            let mut conv_states = host.zeros("conv_states", &shape.conv_states(1), DType::Bf16);
            let mut mixed = host.zeros("mixed", &[rows, shape.channels()], DType::Bf16);
            let mut read = host.zeros("read", &[rows, shape.v_width()], DType::F32);
            let mut out = host.zeros("out", &[rows, shape.v_width()], DType::Bf16);
            let (memory, scratch) = ((&mut states, &mut conv_states), (&mut mixed, &mut read));
            let exec = &mut host.exec;
            let result = decode_delta(exec, &projected, &weights, &segments, shape, 1e-6, memory, scratch, &mut out);
            assert!(result.unwrap_err().to_string().contains("more than one token"));
        });
    }
}
