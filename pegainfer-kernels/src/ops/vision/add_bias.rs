//! The bias of a GEMM, and what follows it.

use super::operands::is_values;
use crate::cpu::vision::bias::{self as cpu, After};
use crate::cuda;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Form of the Gaussian error linear unit (Hendrycks and Gimpel 2016).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gelu {
    /// `x/2 (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`: `gelu_pytorch_tanh`.
    Tanh,
    /// `x/2 (1 + erf(x / sqrt 2))`: `gelu`.
    Erf,
}

/// `out = x + bias`.
///
/// `x`: `[rows, width]` f32, the sums of a GEMM; `bias`: `[width]` f32; `out`: `[rows, width]` bf16 or f32. One
/// rounding.
///
/// # Errors
/// Wrong shapes or dtypes.
pub fn add_bias(exec: &mut Exec, x: &Tensor, bias: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    run(exec, Check("add_bias"), (x, bias), After::Store, out)
}

/// `residual += x + bias`; otherwise as [`add_bias`], with `residual` as `out`.
///
/// # Errors
/// As [`add_bias`].
pub fn add_bias_residual(exec: &mut Exec, x: &Tensor, bias: &Tensor, residual: &mut Tensor) -> Result<(), OpError> {
    run(exec, Check("add_bias_residual"), (x, bias), After::Add, residual)
}

/// `out = gelu(x + bias)`, within 2e-7 times the larger of 1 and the result before rounding; otherwise as [`add_bias`].
///
/// # Errors
/// As [`add_bias`].
pub fn bias_gelu(exec: &mut Exec, x: &Tensor, bias: &Tensor, form: Gelu, out: &mut Tensor) -> Result<(), OpError> {
    let (name, after) = match form {
        Gelu::Tanh => ("bias_gelu_tanh", After::GeluTanh),
        Gelu::Erf => ("bias_gelu_erf", After::GeluErf),
    };
    run(exec, Check(name), (x, bias), after, out)
}

fn run(
    exec: &mut Exec,
    check: Check,
    (x, bias): (&Tensor, &Tensor),
    after: After,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, width) = x.rows_cols();
    check.is(x, DType::F32, &[rows, width])?;
    check.is(bias, DType::F32, &[width])?;
    is_values(check, out, &[rows, width])?;
    exec.record(|_| {
        let (flops, read_again) = match after {
            After::Store => (1, 0),
            After::Add => (2, out.bytes()),
            After::GeluTanh | After::GeluErf => (12, 0),
        };
        let record = OpRecord::new(check.0, "rows", &[x, bias], &[out], (flops * x.elements()) as u64);
        let bytes = record.bytes + read_again;
        record.with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(isa) => match out.dtype() {
            DType::F32 => cpu::bias::<f32>(isa, x.host(), bias.host(), after, out.host_mut()),
            _ => cpu::bias::<bf16>(isa, x.host(), bias.host(), after, out.host_mut()),
        },
        Device::Cuda => cuda::vision::after_sums(exec, check.0, (x, bias), after, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    /// `erf(x)` by its Taylor series for small and a continued fraction for large arguments.
    fn erf(x: f64) -> f64 {
        if x.abs() < 2.5 {
            let (mut term, mut sum) = (x, x);
            for n in 1..80 {
                term *= -x * x / n as f64;
                sum += term / (2 * n + 1) as f64;
            }
            return sum * 2.0 / std::f64::consts::PI.sqrt();
        }
        let size = x.abs();
        let fraction = (1..60).rev().fold(size, |tail, n| size + 0.5 * n as f64 / tail);
        (1.0 - (-size * size).exp() / (fraction * std::f64::consts::PI.sqrt())).copysign(x)
    }

    fn gelu(form: Gelu, x: f64) -> f64 {
        match form {
            Gelu::Tanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
            Gelu::Erf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        }
    }

    #[test]
    fn gelu_matches_f64_from_one_tail_to_the_other() {
        assert!(
            (erf(0.5) - 0.520_499_877_813_046_5).abs() < 1e-14 && (erf(3.0) - 0.999_977_909_503_001_4).abs() < 1e-14
        );
        Host::each(|mut host| {
            let values: Vec<f32> = (-1000..=1000).map(|i| i as f32 * 0.013).collect();
            let width = values.len();
            let (mut x, mut bias) = (host.zeros("x", &[1, width], DType::F32), host.zeros("b", &[width], DType::F32));
            x.host_mut::<f32>().copy_from_slice(&values);
            bias.host_mut::<f32>().fill(0.25);
            for form in [Gelu::Tanh, Gelu::Erf] {
                let mut out = host.zeros("out", &[1, width], DType::F32);
                bias_gelu(&mut host.exec, &x, &bias, form, &mut out).unwrap();
                for (x, got) in values.iter().zip(out.host::<f32>()) {
                    let expected = gelu(form, f64::from(x + 0.25));
                    let error = (f64::from(*got) - expected).abs();
                    assert!(error <= 4e-7 * expected.abs().max(1.0), "{form:?} {x}: {got} {expected}");
                }
            }
        });
    }

    #[test]
    fn sums_are_rounded_once_on_ragged_shapes() {
        Host::each(|mut host| {
            for (rows, width) in [(1, 1), (3, 7), (5, 64), (40, 1000)] {
                let [x, b, r] = [(rows * width, 1), (width, 2), (rows * width, 3)].map(|(n, seed)| bf16s(n, seed));
                let (mut tx, mut tb) =
                    (host.zeros("x", &[rows, width], DType::F32), host.zeros("bias", &[width], DType::F32));
                tx.host_mut::<f32>().iter_mut().zip(&x).for_each(|(to, x)| *to = x.to_f32() / 3.0);
                tb.host_mut::<f32>().iter_mut().zip(&b).for_each(|(to, x)| *to = x.to_f32());
                let mut out = host.zeros("out", &[rows, width], DType::Bf16);
                let mut residual = host.bf16("residual", &[rows, width], &r);
                add_bias(&mut host.exec, &tx, &tb, &mut out).unwrap();
                add_bias_residual(&mut host.exec, &tx, &tb, &mut residual).unwrap();
                for i in 0..rows * width {
                    let sum = x[i].to_f32() / 3.0 + b[i % width].to_f32();
                    assert_eq!(out.host::<bf16>()[i], bf16::from_f32(sum));
                    assert_eq!(residual.host::<bf16>()[i], bf16::from_f32(r[i].to_f32() + sum));
                }
            }
        });
    }
}
