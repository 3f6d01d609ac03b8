//! GEMM of f32 activations.

use crate::cpu::vision::linear as cpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = x · wᵀ` without rounding of the activations, for an encoder in f32.
///
/// `x`: `[rows, k]` f32; `w`: `[n, k]` bf16, row-major; `out`: `[rows, n]` f32. Each value of `x` is split into three
/// bf16 values; which a weight multiplies exactly, and sums are f32. Takes three times as long as
/// [`linear`](crate::ops::linear()).
///
/// # Errors
/// Wrong shapes or dtypes; a GPU.
pub fn linear_f32(exec: &mut Exec, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("linear_f32");
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    check.is(x, DType::F32, &[m, k])?;
    check.is(w, DType::Bf16, &[n, k])?;
    check.is(out, DType::F32, &[m, n])?;
    exec.record(|_| OpRecord::new(check.0, "split", &[x, w], &[out], 2 * (m * n * k) as u64));
    match exec.device() {
        Device::Cpu(isa) => cpu::linear_f32(isa, x.host(), w.host(), (m, n, k), out.host_mut()),
        Device::Cuda => check.that(false, "activations in f32 have no GPU kernel")?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn the_activations_are_not_rounded() {
        Host::each(|mut host| {
            for (m, n, k) in [(1, 1, 1), (3, 5, 64), (18, 33, 200)] {
                let x: Vec<f32> = bf16s(m * k, 1).iter().map(|x| x.to_f32() * 1.000_123_4).collect();
                let w = bf16s(n * k, 2);
                let (mut tx, tw) = (host.zeros("x", &[m, k], DType::F32), host.bf16("w", &[n, k], &w));
                tx.host_mut::<f32>().copy_from_slice(&x);
                let mut out = host.zeros("out", &[m, n], DType::F32);
                linear_f32(&mut host.exec, &tx, &tw, &mut out).unwrap();
                for (i, got) in out.host::<f32>().iter().enumerate() {
                    let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                    let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w.to_f64());
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                    assert!((f64::from(*got) - sum).abs() <= 1e-6 * size, "{got} {sum}");
                }
            }
        });
    }
}
