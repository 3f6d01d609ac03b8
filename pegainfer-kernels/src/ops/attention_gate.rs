//! The gate on the output of attention.

use super::check::Check;
use crate::cpu::gate;
use crate::cuda;
use crate::heads::HeadShape;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `attended *= sigmoid(gate)`, elementwise (transformers `Qwen3_5Attention`).
///
/// `projected`: `[tokens, gated_qkv_width]` bf16, where each head has `head_dim` columns of query, then as many of
/// gate; `attended`: `[tokens, heads * head_dim]` bf16. f32 with one final rounding. On a GPU `head_dim` is a multiple
/// of 64.
pub fn attention_gate(
    exec: &mut Exec,
    projected: &Tensor,
    shape: HeadShape,
    attended: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("attention_gate");
    let tokens = attended.rows_cols().0;
    check.that(shape.is_supported(), "heads do not group, or head_dim is not a multiple of 16 from 32 to 256")?;
    check.is(projected, DType::Bf16, &[tokens, shape.gated_qkv_width()])?;
    check.is(attended, DType::Bf16, &[tokens, shape.q_width()])?;
    exec.record(|_| {
        let reads = [projected, attended];
        OpRecord::new("attention_gate", "rows", &reads, &[attended], flops(attended)).with_bytes(3 * attended.bytes())
    });
    match exec.device() {
        Device::Cpu(_) => {
            on_cpu(exec, projected, shape, attended);
            Ok(())
        }
        Device::Cuda => cuda::attention_gate(exec, projected, shape, attended),
        Device::Meta => Ok(()),
    }
}

/// Floating-point operations of the call.
pub(super) fn flops(attended: &Tensor) -> u64 {
    5 * attended.elements() as u64
}

/// The reference kernel, on operands with checked shapes.
pub(super) fn on_cpu(exec: &Exec, projected: &Tensor, shape: HeadShape, attended: &mut Tensor) {
    if let Device::Cpu(isa) = exec.device() {
        gate::run(isa, projected.host(), shape, attended.host_mut());
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
            for (tokens, heads, kv_heads, head_dim) in [(1, 1, 1, 32), (3, 4, 2, 48), (30, 8, 2, 256)] {
                let shape = HeadShape { heads, kv_heads, head_dim };
                let (width, columns) = (shape.q_width(), shape.gated_qkv_width());
                let (row, x) = (bf16s(tokens * columns, 1), bf16s(tokens * width, 2));
                let projected = host.bf16("projected", &[tokens, columns], &row);
                let mut attended = host.bf16("attended", &[tokens, width], &x);
                attention_gate(&mut host.exec, &projected, shape, &mut attended).unwrap();
                let value = |i: usize| {
                    let (t, head, d) = (i / width, i % width / head_dim, i % head_dim);
                    let gate = row[t * columns + (2 * head + 1) * head_dim + d].to_f64();
                    x[i].to_f64() / (1.0 + (-gate).exp())
                };
                let expected: Vec<f64> = (0..tokens * width).map(value).collect();
                close(attended.host::<bf16>(), &expected, 1.01 / 256.0, 0.0);
            }
        });
    }
}
