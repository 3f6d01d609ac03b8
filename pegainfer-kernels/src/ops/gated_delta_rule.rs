//! The gated delta rule, token by token.

use super::causal_conv1d::{check_layer, check_segments};
use super::check::Check;
use crate::cpu::gated_delta::{self, Form, Inputs};
use crate::cuda;
use crate::delta::DeltaShape;
use crate::delta_operands::DeltaInputs;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Reads and updates a memory matrix `S` per head with every token (Yang et al., arXiv 2412.06464; transformers
/// `torch_recurrent_gated_delta_rule`):
///
/// ```text
/// S = exp(g) S        g = -exp(a_log) softplus(a + dt_bias)
/// S = S + beta (v - S k) k^T        beta = sigmoid(b)
/// out = S q
/// ```
///
/// where `q` and `k` are first divided by their lengths (`x * rsqrt(Σ x² + 1e-6)`) and `q` is multiplied by
/// `key_dim^-1/2`.
///
/// `inputs`: see [`DeltaInputs`]; `states`: f32, see [`DeltaShape::states`]; `out`: `[tokens, v_width]` f32, read once
/// by the following norm. All f32. On the CPU a token's bits do not depend on how its sequence is split into segments,
/// nor on other sequences. The CUDA kernel is for few tokens per sequence. It reads `segments` and `states` while the
/// previous kernel still runs, so no other kernel of the same step may write them.
pub fn gated_delta_rule(
    exec: &mut Exec,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let form = (Form::Recurrent, "recurrent");
    run(Check("gated_delta_rule"), exec, form, step_flops(shape), inputs, shape, states, out)
}

/// Operations per token and head: decay, S k, update, S q.
pub(super) fn step_flops(shape: DeltaShape) -> usize {
    7 * shape.key_dim * shape.value_dim
}

/// [`gated_delta_rule`] in the given form, by a GPU's kernel of this name, at `flops` operations per token and head.
#[expect(clippy::too_many_arguments, reason = "the operands of the op, and what two ops differ in")]
pub(super) fn run(
    c: Check,
    exec: &mut Exec,
    (form, kernel): (Form, &'static str),
    flops: usize,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let DeltaInputs { mixed, projected, a_log, dt_bias, segments } = *inputs;
    check(c, inputs, shape, states, out)?;
    exec.record(|device| {
        let kernel = if let Device::Cpu(isa) = device { isa.name() } else { kernel };
        let reads = [mixed, projected, a_log, dt_bias, segments, states];
        let flops = (mixed.rows_cols().0 * shape.value_heads * flops) as u64;
        OpRecord::new(c.0, kernel, &reads, &[out, states], flops).with_bytes(bytes(inputs, shape, out))
    });
    dispatch(c, exec, form, inputs, shape, states, out)
}

pub(super) fn check(
    c: Check,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &Tensor,
    out: &Tensor,
) -> Result<(), OpError> {
    let (tokens, slots) = (inputs.mixed.rows_cols().0, states.rows_cols().0);
    check_layer(c, inputs.segments, shape)?;
    c.is(inputs.mixed, DType::Bf16, &[tokens, shape.channels()])?;
    c.is(inputs.projected, DType::Bf16, &[tokens, shape.projected_width()])?;
    c.is(inputs.a_log, DType::F32, &[shape.value_heads])?;
    c.is(inputs.dt_bias, DType::F32, &[shape.value_heads])?;
    c.is(states, DType::F32, &shape.states(slots))?;
    c.is(out, DType::F32, &[tokens, shape.v_width()])
}

/// Bytes that the rule reads and writes.
pub(super) fn bytes(inputs: &DeltaInputs<'_>, shape: DeltaShape, out: &Tensor) -> u64 {
    let gates = 2 * out.rows_cols().0 * shape.value_heads * DType::Bf16.size();
    inputs.mixed.bytes() + out.bytes() + (state_bytes(inputs.segments, shape) + gates) as u64
}

/// Bytes of the segments, and of the matrices that they read and write.
pub(super) fn state_bytes(segments: &Tensor, shape: DeltaShape) -> usize {
    let matrices = 2 * segments.rows_cols().0 * shape.v_width() * shape.key_dim * DType::F32.size();
    matrices + segments.bytes() as usize
}

/// Runs the op on checked operands.
pub(super) fn dispatch(
    c: Check,
    exec: &mut Exec,
    form: Form,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    match (exec.device(), form) {
        (Device::Cpu(isa), _) => {
            let DeltaInputs { mixed, projected, a_log, dt_bias, segments } = *inputs;
            check_segments(c, segments.host(), mixed.rows_cols().0, states.rows_cols().0)?;
            let inputs = Inputs {
                mixed: mixed.host(),
                projected: projected.host(),
                a_log: a_log.host(),
                dt_bias: dt_bias.host(),
                segments: segments.host(),
                shape,
            };
            gated_delta::run(isa, form, &inputs, &mut exec.scratch, states.host_mut(), out.host_mut());
            Ok(())
        }
        (Device::Cuda, Form::Recurrent) => cuda::delta_recurrent(exec, inputs, shape, states, out, usize::MAX),
        // `gated_delta_chunks` launches its kernels itself, because they need scratch.
        (Device::Meta, _) | (Device::Cuda, Form::Chunked) => Ok(()),
    }
}
