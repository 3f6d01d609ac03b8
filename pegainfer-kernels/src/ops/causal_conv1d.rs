//! The short convolution before the gated delta rule.

use super::check::Check;
use crate::choice::Conv;
use crate::cpu::causal_conv::{self, Inputs};
use crate::cuda;
use crate::delta::{DeltaShape, NO_STATE, SEGMENT_WORDS, Segment};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Depthwise causal convolution over the channels of q, k and v, then SiLU:
/// `out[t, c] = silu(Σ_j weight[j, c] * x[t - conv_width + 1 + j, c])` (transformers `Qwen3_5GatedDeltaNet`,
/// `causal_conv1d`).
///
/// `projected`: `[tokens, projected_width]` bf16, whose first `channels` columns are `x`; `weight`: `[conv_width,
/// channels]` f32; `segments`: `[segments, SEGMENT_WORDS]` u32, packed consecutive [`Segment`]s that cover the tokens;
/// `conv_states`: bf16, see [`DeltaShape::conv_states`], from which a segment reads the inputs before its first token
/// and to which it writes its last ones; `out`: `[tokens, channels]` bf16. Sums and SiLU are f32 with one final
/// rounding. A token's bits do not depend on how its sequence is split into segments. The CUDA kernel reads `segments`
/// and `weight` while the previous kernel still runs, so no kernel of the same step may write them.
pub fn causal_conv1d(
    exec: &mut Exec,
    projected: &Tensor,
    weight: &Tensor,
    segments: &Tensor,
    shape: DeltaShape,
    conv_states: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let c = Check("causal_conv1d");
    check(c, projected, weight, segments, shape, conv_states, out)?;
    exec.record(|device| {
        let kernel = if let Device::Cpu(isa) = device { isa.name() } else { Conv::choose(out.rows_cols().0).name() };
        let [bytes, flops] = cost(weight, segments, shape, out);
        OpRecord::new(c.0, kernel, &[projected, weight, segments, conv_states], &[out, conv_states], flops)
            .with_bytes(bytes)
    });
    dispatch(c, exec, projected, weight, segments, shape, conv_states, out)
}

pub(super) fn check(
    c: Check,
    projected: &Tensor,
    weight: &Tensor,
    segments: &Tensor,
    shape: DeltaShape,
    conv_states: &Tensor,
    out: &Tensor,
) -> Result<(), OpError> {
    let (tokens, slots, channels) = (projected.rows_cols().0, conv_states.rows_cols().0, shape.channels());
    check_layer(c, segments, shape)?;
    c.is(projected, DType::Bf16, &[tokens, shape.projected_width()])?;
    c.is(weight, DType::F32, &[shape.conv_width, channels])?;
    c.is(conv_states, DType::Bf16, &shape.conv_states(slots))?;
    c.is(out, DType::Bf16, &[tokens, channels])
}

/// Bytes and floating-point operations.
pub(super) fn cost(weight: &Tensor, segments: &Tensor, shape: DeltaShape, out: &Tensor) -> [u64; 2] {
    let (tokens, channels) = out.rows_cols();
    let conv_states = 2 * segments.rows_cols().0 * (shape.conv_width - 1) * channels * DType::Bf16.size();
    let bytes = 2 * out.bytes() + conv_states as u64 + weight.bytes() + segments.bytes();
    [bytes, (tokens * channels * (2 * shape.conv_width + 4)) as u64]
}

/// Runs the op on checked operands.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub(super) fn dispatch(
    c: Check,
    exec: &mut Exec,
    projected: &Tensor,
    weight: &Tensor,
    segments: &Tensor,
    shape: DeltaShape,
    conv_states: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    match exec.device() {
        Device::Cpu(isa) => {
            check_segments(c, segments.host(), projected.rows_cols().0, conv_states.rows_cols().0)?;
            let inputs =
                Inputs { projected: projected.host(), weight: weight.host(), segments: segments.host(), shape };
            causal_conv::run(isa, &inputs, conv_states.host_mut(), out.host_mut());
            Ok(())
        }
        Device::Cuda => cuda::causal_conv1d(
            exec,
            Conv::choose(out.rows_cols().0),
            projected,
            weight,
            segments,
            shape,
            conv_states,
            out,
        ),
        Device::Meta => Ok(()),
    }
}

/// Checks shared by the ops of a gated delta rule layer.
pub(super) fn check_layer(check: Check, segments: &Tensor, shape: DeltaShape) -> Result<(), OpError> {
    check.that(
        shape.is_supported(),
        "heads do not group, a head is not a multiple of 16, or the convolution's width is not 2 to 8",
    )?;
    check.is(segments, DType::U32, &[segments.rows_cols().0, SEGMENT_WORDS])
}

/// Segments follow each other, cover the tokens, and have slots. Tasks write to rows and slots by them.
pub(super) fn check_segments(check: Check, words: &[u32], tokens: usize, slots: usize) -> Result<(), OpError> {
    let mut end = 0;
    for segment in Segment::unpack(words) {
        check.that(segment.first == end && segment.end >= end, "segments do not follow each other")?;
        let known = |slot: u32| slot == NO_STATE || (slot as usize) < slots;
        check.that(known(segment.from) && known(segment.to), "a slot is out of range")?;
        end = segment.end;
    }
    check.that(end as usize == tokens, "segments do not cover the tokens")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;

    const SHAPES: [DeltaShape; 2] = [
        DeltaShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 48, conv_width: 4, tiled_output: false },
        DeltaShape { key_heads: 1, value_heads: 1, key_dim: 16, value_dim: 16, conv_width: 2, tiled_output: false },
    ];

    fn weight(host: &mut Host, shape: DeltaShape) -> Tensor {
        let mut weight = host.zeros("weight", &[shape.conv_width, shape.channels()], DType::F32);
        let values = bf16s(weight.elements(), 5);
        weight.host_mut::<f32>().iter_mut().zip(values).for_each(|(to, value)| *to = value.to_f32() + 0.001);
        weight
    }

    fn segments(host: &mut Host, segments: &[[u32; 4]]) -> Tensor {
        let mut tensor = host.zeros("segments", &[segments.len(), SEGMENT_WORDS], DType::U32);
        tensor.host_mut::<u32>().copy_from_slice(segments.as_flattened());
        tensor
    }

    #[test]
    fn matches_f64_with_and_without_a_past() {
        Host::each(|mut host| {
            for shape in SHAPES {
                let (tokens, channels, width) = (9, shape.channels(), shape.projected_width());
                let x = bf16s(tokens * width, 1);
                let past = bf16s(3 * (shape.conv_width - 1) * channels, 2);
                let (projected, w) = (host.bf16("projected", &[tokens, width], &x), weight(&mut host, shape));
                let mut conv_states = host.bf16("conv_states", &shape.conv_states(3), &past);
                // The second sequence continues from slot 2; the state of the first one is left in slot 0.
                let cut = segments(&mut host, &[[0, 5, NO_STATE, 0], [5, 9, 2, 1]]);
                let mut out = host.zeros("out", &[tokens, channels], DType::Bf16);
                causal_conv1d(&mut host.exec, &projected, &w, &cut, shape, &mut conv_states, &mut out).unwrap();
                let input = |t: i64, c: usize, second: bool| match (t, second) {
                    (0.., _) => x[t as usize * width + c].to_f64(),
                    (_, false) => 0.0,
                    (_, true) => past[(3 * (shape.conv_width - 1)) * channels - (-t as usize) * channels + c].to_f64(),
                };
                let value = |i: usize| {
                    let (t, c) = ((i / channels) as i64, i % channels);
                    let (start, second) = if t < 5 { (0, false) } else { (5, true) };
                    let tap = |j: usize| {
                        let local = t - start - (shape.conv_width as i64 - 1) + j as i64;
                        let x = if local >= 0 { input(local + start, c, second) } else { input(local, c, second) };
                        f64::from(w.host::<f32>()[j * channels + c]) * x
                    };
                    let sum: f64 = (0..shape.conv_width).map(tap).sum();
                    sum / (1.0 + (-sum).exp())
                };
                let expected: Vec<f64> = (0..tokens * channels).map(value).collect();
                close(out.host::<bf16>(), &expected, 1.01 / 256.0, 1e-5);
                for (slot, end) in [(0, 5), (1, 9)] {
                    for i in 0..shape.conv_width - 1 {
                        let t = end + 1 - shape.conv_width + i;
                        let kept =
                            &conv_states.host::<bf16>()[(slot * (shape.conv_width - 1) + i) * channels..][..channels];
                        assert_eq!(kept, &x[t * width..][..channels]);
                    }
                }
            }
        });
    }

    #[test]
    fn cuts_change_no_bit() {
        Host::each(|mut host| {
            let (shape, tokens) = (SHAPES[0], 12);
            let (channels, width) = (shape.channels(), shape.projected_width());
            let projected = host.bf16("projected", &[tokens, width], &bf16s(tokens * width, 3));
            let w = weight(&mut host, shape);
            let mut run = |cuts: &[[u32; 4]]| {
                let mut conv_states = host.zeros("conv_states", &shape.conv_states(2), DType::Bf16);
                let mut out = host.zeros("out", &[tokens, channels], DType::Bf16);
                let cuts = segments(&mut host, cuts);
                causal_conv1d(&mut host.exec, &projected, &w, &cuts, shape, &mut conv_states, &mut out).unwrap();
                let tail = conv_states.host::<bf16>()[(shape.conv_width - 1) * channels..].to_vec();
                (out.host::<bf16>().to_vec(), tail)
            };
            let whole = run(&[[0, 12, NO_STATE, 1]]);
            assert!(run(&[[0, 1, NO_STATE, 0], [1, 3, 0, 0], [3, 3, 0, 1], [3, 10, 1, 0], [10, 12, 0, 1]]) == whole);
        });
    }

    #[test]
    fn bad_segments_are_refused() {
        Host::each(|mut host| {
            let (shape, tokens) = (SHAPES[1], 3);
            let (channels, width) = (shape.channels(), shape.projected_width());
            let projected = host.zeros("projected", &[tokens, width], DType::Bf16);
            let w = weight(&mut host, shape);
            let mut conv_states = host.zeros("conv_states", &shape.conv_states(2), DType::Bf16);
            let mut out = host.zeros("out", &[tokens, channels], DType::Bf16);
            for (cut, message) in [
                ([0, 2, 0, 0], "segments do not cover the tokens"),
                ([1, 3, 0, 0], "segments do not follow each other"),
                ([0, 3, 2, 0], "a slot is out of range"),
                ([0, 3, NO_STATE, 2], "a slot is out of range"),
            ] {
                let cut = segments(&mut host, &[cut]);
                let result = causal_conv1d(&mut host.exec, &projected, &w, &cut, shape, &mut conv_states, &mut out);
                assert_eq!(result.unwrap_err().message, message);
            }
        });
    }

    #[test]
    fn a_tail_that_is_not_kept_changes_nothing_else() {
        Host::each(|mut host| {
            let (shape, tokens) = (SHAPES[0], 6);
            let (channels, width) = (shape.channels(), shape.projected_width());
            let projected = host.bf16("projected", &[tokens, width], &bf16s(tokens * width, 3));
            let (w, past) = (weight(&mut host, shape), bf16s(2 * (shape.conv_width - 1) * channels, 4));
            let mut run = |to: [u32; 2]| {
                let mut conv_states = host.bf16("conv_states", &shape.conv_states(2), &past);
                let mut out = host.zeros("out", &[tokens, channels], DType::Bf16);
                let cuts = segments(&mut host, &[[0, 4, 0, to[0]], [4, 6, NO_STATE, to[1]]]);
                causal_conv1d(&mut host.exec, &projected, &w, &cuts, shape, &mut conv_states, &mut out).unwrap();
                (out.host::<bf16>().to_vec(), conv_states.host::<bf16>().to_vec())
            };
            let (out, conv_states) = run([NO_STATE; 2]);
            assert_eq!(conv_states, past);
            assert!(out == run([0, 1]).0);
        });
    }
}
