//! The gated activation of the MLP.

use super::check::Check;
use crate::{cpu, cuda};
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = silu(gate) * up`, `silu(z) = z / (1 + exp(-z))`.
///
/// `gate_up`: `[rows, 2 * width]` bf16, the gate half first; `out`: `[rows, width]` bf16. silu is computed in f32 and
/// rounded to bf16, the product is rounded once more (transformers `Qwen3MLP` in bf16).
pub fn swiglu(exec: &mut Exec, gate_up: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("swiglu");
    let (rows, width) = out.rows_cols();
    check.is(gate_up, DType::Bf16, &[rows, 2 * width])?;
    check.is(out, DType::Bf16, &[rows, width])?;
    exec.record(|_| OpRecord::new("swiglu", "elementwise", &[gate_up], &[out], 5 * out.elements() as u64));
    match exec.device() {
        Device::Cpu(isa) => cpu::swiglu::swiglu(isa, gate_up.host::<bf16>(), width, out.host_mut()),
        Device::Cuda => cuda::swiglu(exec, gate_up, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};

    #[test]
    fn matches_f64_on_ragged_shapes() {
        Host::each(|mut host| {
            for (rows, width) in [(1, 1), (3, 17), (90, 896), (2, 3001)] {
                let mut x = bf16s(rows * 2 * width, 6);
                // Large values must saturate, not overflow.
                x[0] = bf16::from_f32(-200.0);
                let gate_up = host.bf16("gate_up", &[rows, 2 * width], &x);
                let mut out = host.zeros("out", &[rows, width], DType::Bf16);
                swiglu(&mut host.exec, &gate_up, &mut out).unwrap();
                let expected: Vec<f64> = x
                    .chunks(2 * width)
                    .flat_map(|row| {
                        let silu = |z: f64| z / (1.0 + (-z).exp());
                        (0..width).map(move |i| silu(row[i].to_f64()) * row[width + i].to_f64()).collect::<Vec<_>>()
                    })
                    .collect();
                close(out.host::<bf16>(), &expected, 2.0 / 256.0, 1e-6);
            }
        });
    }
}
