//! The first half of the MLP: gate and up projections and the gated activation.

use super::activation::{ActivationMut, host_values, write_host};
use super::check::Check;
use super::matrix::MatrixRef;
use crate::choice::{self, Swiglu};
use crate::cpu::linear::{LinearOut, linear_stacked};
use crate::cpu::swiglu::swiglu;
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = silu(gate) * up` with `[gate, up] = x · wᵀ` and `silu(z) = z / (1 + exp(-z))`.
///
/// `x`: `[rows, k]`, `w`: `[2 * width, k]`, the rows of the gate first, `gate_up`: `[rows, 2 * width]`, `out`: `[rows,
/// width]`, all bf16; `x` and `out` also [in FP8](super::Activation), `w` also FP8 as in [`linear`](super::linear).
/// `gate_up` is scratch for the GEMM with device-dependent contents. The GEMM is rounded to bf16, silu is computed in
/// f32 and rounded, and the result is rounded once more (transformers `Qwen3MLP` in bf16).
pub fn linear_swiglu<'w, 'o>(
    exec: &mut Exec,
    x: &Tensor,
    w: impl Into<MatrixRef<'w>>,
    gate_up: &mut Tensor,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (check, out) = (Check("linear_swiglu"), out.into());
    let (m, k) = x.rows_cols();
    let (w, width) = (w.into(), out.tensor.rows_cols().1);
    check.is_activation(x, &[m, k])?;
    w.check_dense(check, exec.device(), (2 * width, k))?;
    check.is(gate_up, DType::Bf16, &[m, 2 * width])?;
    check.is_activation(out.tensor, &[m, width])?;
    let choice = choice::gpu(exec)?.map(|gpu| Swiglu::choose(&gpu, (m, 2 * width, k), w.format()));
    // A GEMM that gates writes bf16.
    let out = out.in_format(exec, matches!(choice, Some(Swiglu::Separate(_))))?;
    exec.record(|device| {
        let kernel = choice::name(device, &choice, Swiglu::name);
        let flops = 4 * (m * width * k) as u64 + 5 * (m * width) as u64;
        OpRecord::new("linear_swiglu", kernel, &w.reads(&[x], &[]), &[out], flops)
    });
    match (exec.device(), &choice) {
        (Device::Cpu(isa), _) => {
            let gemm = LinearOut::Bf16(gate_up.host_mut());
            let path = (isa, exec.activations());
            linear_stacked(path, &host_values(x), &w.weights(), (m, k), gemm, &mut exec.scratch);
            write_host(out, |out| swiglu(isa, gate_up.host(), width, out));
        }
        (Device::Cuda, Some(choice)) => cuda::linear_swiglu(exec, choice, x, w, gate_up, out)?,
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;

    /// One column, so that the GEMM gives the rows of `w` times one number.
    #[test]
    fn matches_f64_on_ragged_shapes() {
        Host::each(|mut host| {
            for (m, width) in [(1, 1), (3, 17), (90, 896), (2, 3001)] {
                let (x, mut w) = (bf16s(m, 6), bf16s(2 * width, 7));
                // Large values must saturate, not overflow.
                w[0] = bf16::from_f32(-200.0);
                let (tx, tw) = (host.bf16("x", &[m, 1], &x), host.bf16("w", &[2 * width, 1], &w));
                let mut gate_up = host.zeros("gate_up", &[m, 2 * width], DType::Bf16);
                let mut out = host.zeros("out", &[m, width], DType::Bf16);
                linear_swiglu(&mut host.exec, &tx, &tw, &mut gate_up, &mut out).unwrap();
                let rounded = |x: bf16, w: bf16| bf16::from_f32(x.to_f32() * w.to_f32()).to_f64();
                let silu = |z: f64| z / (1.0 + (-z).exp());
                let value = |row: usize, i: usize| silu(rounded(x[row], w[i])) * rounded(x[row], w[width + i]);
                let expected: Vec<f64> = (0..m * width).map(|i| value(i / width, i % width)).collect();
                close(out.host::<bf16>(), &expected, 2.0 / 256.0, 1e-6);
            }
        });
    }
}
