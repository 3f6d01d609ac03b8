//! RMS normalisation with one rounding.

use super::values::{self, activation, cpu, read, write};
use crate::cpu::deepseek_v4::norm as reference;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = x * rsqrt(mean(x²) + eps) * weight` over the last dimension.
///
/// `x`, `out`: `[rows, hidden]` bf16 or f32; `weight`: `[hidden]` bf16. All in f32, one rounding at the end (DeepSeek's
/// RMSNorm; Qwen's rounds before it multiplies by the weight, too).
pub fn norm(exec: &mut Exec, x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("norm");
    let (rows, hidden) = x.rows_cols();
    values::rows(check, x, (rows, hidden))?;
    check.is(weight, DType::Bf16, &[hidden])?;
    values::rows(check, out, (rows, hidden))?;
    exec.record(|_| OpRecord::new("norm", "rows", &[x, weight], &[out], 4 * x.elements() as u64));
    if exec.device() == Device::Cuda {
        return gpu::norm(exec, x, weight, eps, out);
    }
    if cpu(check, exec)?.is_some() {
        let mut values = read(x).into_owned();
        reference::norm(&mut values, &read(weight), eps);
        write(out, &values);
    }
    Ok(())
}

/// The query heads' norm, in place: each head is divided by its root mean square; there is no weight.
///
/// `x`: `[tokens, heads, head_dim]` bf16 or f32. f32 inside, as transformers and vLLM do it; DeepSeek's own code squares
/// and takes the root in bf16.
pub fn head_norm(exec: &mut Exec, x: &mut Tensor, eps: f32) -> Result<(), OpError> {
    let check = Check("head_norm");
    let &[tokens, heads, dim] = x.shape() else { return check.that(false, "x must be [tokens, heads, head_dim]") };
    activation(check, x, &[tokens, heads, dim])?;
    exec.record(|_| OpRecord::new("head_norm", "rows", &[x], &[x], 3 * x.elements() as u64));
    if exec.device() == Device::Cuda {
        return gpu::head_norm(exec, x, eps);
    }
    if cpu(check, exec)?.is_some() {
        let mut values = read(x).into_owned();
        reference::unweighted(&mut values, dim, eps);
        write(x, &values);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};
    use half::bf16;

    #[test]
    fn one_rounding_at_the_end() {
        Host::each(|mut host| {
            let (x, w) = (bf16s(3 * 64, 1), bf16s(64, 2));
            let (tx, tw) = (host.bf16("x", &[3, 64], &x), host.bf16("w", &[64], &w));
            let mut out = host.zeros("out", &[3, 64], DType::Bf16);
            norm(&mut host.exec, &tx, &tw, 1e-6, &mut out).unwrap();
            for (i, got) in out.host::<bf16>().iter().enumerate() {
                let row = &x[i / 64 * 64..][..64];
                let mean = row.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / 64.0;
                let exact = x[i].to_f64() / (mean + 1e-6).sqrt() * w[i % 64].to_f64();
                assert_eq!(*got, bf16::from_f64(exact), "{exact}");
            }
        });
    }

    #[test]
    fn trap_13_the_query_norm_is_computed_in_f32() {
        Host::each(|mut host| {
            // In bf16 the squares of 1 + 2^-7 and 1 round to values whose mean is off by 2^-9.
            let x: Vec<bf16> =
                (0..512).map(|i| bf16::from_f32(if i % 2 == 0 { 1.0 } else { 1.0 + 0.007_812_5 })).collect();
            let mut t = host.zeros("x", &[1, 1, 512], DType::F32);
            t.host_mut::<f32>().iter_mut().zip(&x).for_each(|(t, x)| *t = x.to_f32());
            head_norm(&mut host.exec, &mut t, 1e-6).unwrap();
            let mean = x.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / 512.0;
            for (got, x) in t.host::<f32>().iter().zip(&x) {
                assert!((f64::from(*got) - x.to_f64() / (mean + 1e-6).sqrt()).abs() < 1e-6);
            }
        });
    }
}
