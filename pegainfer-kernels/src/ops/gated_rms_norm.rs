//! The norm and gate at the end of a gated delta rule layer.

use super::activation::{ActivationMut, write_host};
use super::check::Check;
use crate::cpu::gated_norm::{self, Inputs};
use crate::cuda;
use crate::delta::DeltaShape;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = x * rsqrt(mean(x²) + eps) * weight * silu(z)`, the mean over each head (transformers `Qwen3_5RMSNormGated`).
///
/// `x`: `[tokens, v_width]` f32; `projected`: `[tokens, projected_width]` bf16, which contains `z`; `weight`:
/// `[value_dim]` f32, the same for every head; `out`: `[tokens, v_width]` bf16, or [in FP8](super::Activation), its heads
/// in the order of [`DeltaShape::output_head`]. f32 with one final rounding.
pub fn gated_rms_norm<'o>(
    exec: &mut Exec,
    x: &Tensor,
    projected: &Tensor,
    weight: &Tensor,
    shape: DeltaShape,
    eps: f32,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (c, out) = (Check("gated_rms_norm"), out.into());
    check(c, x, projected, weight, shape, out.tensor)?;
    let out = out.in_norm_format(exec)?;
    exec.record(|_| {
        let [bytes, flops] = cost(x, weight, out);
        OpRecord::new(c.0, "rows", &[x, projected, weight], &[out], flops).with_bytes(bytes)
    });
    dispatch(exec, x, projected, weight, shape, eps, out)
}

pub(super) fn check(
    c: Check,
    x: &Tensor,
    projected: &Tensor,
    weight: &Tensor,
    shape: DeltaShape,
    out: &Tensor,
) -> Result<(), OpError> {
    let tokens = x.rows_cols().0;
    c.that(shape.is_supported(), "heads do not group, or a head is not a multiple of 16")?;
    c.is(x, DType::F32, &[tokens, shape.v_width()])?;
    c.is(projected, DType::Bf16, &[tokens, shape.projected_width()])?;
    c.is(weight, DType::F32, &[shape.value_dim])?;
    c.is_activation(out, &[tokens, shape.v_width()])
}

/// Bytes and floating-point operations.
pub(super) fn cost(x: &Tensor, weight: &Tensor, out: &Tensor) -> [u64; 2] {
    // z has half of the bytes of x.
    [x.bytes() + x.bytes() / 2 + out.bytes() + weight.bytes(), 10 * x.elements() as u64]
}

/// Runs the op on checked operands.
pub(super) fn dispatch(
    exec: &mut Exec,
    x: &Tensor,
    projected: &Tensor,
    weight: &Tensor,
    shape: DeltaShape,
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    match exec.device() {
        Device::Cpu(isa) => {
            let inputs = Inputs { x: x.host(), projected: projected.host(), weight: weight.host(), shape, eps };
            write_host(out, |out| gated_norm::run(isa, &inputs, out));
            Ok(())
        }
        Device::Cuda => cuda::gated_rms_norm(exec, x, projected, weight, shape, eps, out),
        Device::Meta => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;

    #[test]
    fn matches_f64() {
        Host::each(|mut host| {
            for (tokens, value_heads, value_dim) in [(1, 1, 16), (3, 4, 48), (40, 6, 128)] {
                let shape = DeltaShape {
                    key_heads: 1,
                    value_heads,
                    key_dim: 16,
                    value_dim,
                    conv_width: 4,
                    tiled_output: false,
                };
                let (width, columns) = (shape.v_width(), shape.projected_width());
                let mut f32s = |name: &str, shape: &[usize], seed: u64| {
                    let mut tensor = host.zeros(name, shape, DType::F32);
                    let values = bf16s(tensor.elements(), seed);
                    tensor.host_mut::<f32>().iter_mut().zip(values).for_each(|(to, x)| *to = x.to_f32() * 1.001);
                    tensor
                };
                let (x, weight) = (f32s("x", &[tokens, width], 1), f32s("weight", &[value_dim], 2));
                let gates = bf16s(tokens * columns, 3);
                let projected = host.bf16("projected", &[tokens, columns], &gates);
                let mut out = host.zeros("out", &[tokens, width], DType::Bf16);
                gated_rms_norm(&mut host.exec, &x, &projected, &weight, shape, 1e-6, &mut out).unwrap();
                let x: Vec<f64> = x.host::<f32>().iter().map(|&x| f64::from(x)).collect();
                let value = |i: usize| {
                    let (t, column) = (i / width, i % width);
                    let head = &x[i / value_dim * value_dim..][..value_dim];
                    let mean = head.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                    let z = gates[t * columns + shape.channels() + column].to_f64();
                    let weight = f64::from(weight.host::<f32>()[i % value_dim]);
                    x[i] / (mean + 1e-6).sqrt() * weight * z / (1.0 + (-z).exp())
                };
                let expected: Vec<f64> = (0..tokens * width).map(value).collect();
                close(out.host::<bf16>(), &expected, 1.01 / 256.0, 1e-6);
            }
        });
    }

    #[test]
    fn a_tiled_output_has_the_same_heads_in_another_order() {
        Host::each(|mut host| {
            let (tokens, dim) = (3, 16);
            let shape = DeltaShape {
                key_heads: 2,
                value_heads: 6,
                key_dim: 16,
                value_dim: dim,
                conv_width: 4,
                tiled_output: false,
            };
            let tiled = DeltaShape { tiled_output: true, ..shape };
            let (width, columns) = (shape.v_width(), shape.projected_width());
            let mut x = host.zeros("x", &[tokens, width], DType::F32);
            x.host_mut::<f32>().iter_mut().zip(bf16s(tokens * width, 1)).for_each(|(to, x)| *to = x.to_f32());
            let mut weight = host.zeros("weight", &[dim], DType::F32);
            weight.host_mut::<f32>().fill(1.0);
            let projected = host.bf16("projected", &[tokens, columns], &bf16s(tokens * columns, 3));
            let [in_order, in_tiles] = [shape, tiled].map(|shape| {
                let mut out = host.zeros("out", &[tokens, width], DType::Bf16);
                gated_rms_norm(&mut host.exec, &x, &projected, &weight, shape, 1e-6, &mut out).unwrap();
                out.host::<bf16>().to_vec()
            });
            // Heads 0, 1, 2 of key head 0 alternate with heads 3, 4, 5 of key head 1.
            let order = [0, 3, 1, 4, 2, 5];
            for (in_order, in_tiles) in in_order.chunks(width).zip(in_tiles.chunks(width)) {
                for (place, head) in order.into_iter().enumerate() {
                    assert_eq!(in_tiles[place * dim..][..dim], in_order[head * dim..][..dim], "{place}");
                    assert_eq!((shape.output_head(head), tiled.output_head(head)), (head, place));
                }
            }
        });
    }
}
