//! RMS normalisation with one rounding.

use super::packed::{Rounded, check_packed, pack_host};
use super::values::{self, cpu, read, write};
use crate::cpu::deepseek_v4::kv_quant::fp8;
use crate::cpu::deepseek_v4::norm as reference;
use crate::cpu::weights::BLOCK;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = x * rsqrt(mean(x²) + eps) * weight` over the last dimension.
///
/// `x`, `out`: `[rows, hidden]` bf16 or f32; `weight`: `[hidden]` bf16. f32 with one final rounding (DeepSeek's
/// RMSNorm; Qwen's also rounds before multiplying by the weight). `low`, of the dtype of `x`: result of
/// `round_activation` on `out`, with its packed rows, see [`pack_rows`](super::pack_rows).
pub fn norm(
    exec: &mut Exec,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
    low: Option<Rounded<'_>>,
) -> Result<(), OpError> {
    let check = Check("norm");
    let (rows, hidden) = x.rows_cols();
    values::rows(check, x, (rows, hidden))?;
    check.is(weight, DType::Bf16, &[hidden])?;
    values::rows(check, out, (rows, hidden))?;
    check.that(out.dtype() == x.dtype(), "x and out must have the same dtype")?;
    check_rounded(check, out, low.as_ref())?;
    exec.record(|_| {
        let writes: Vec<&Tensor> = std::iter::once(&*out).chain(low.as_ref().map(|low| &*low.values)).collect();
        OpRecord::new("norm", "rows", &[x, weight], &writes, 4 * x.elements() as u64)
    });
    if exec.device() == Device::Cuda {
        return gpu::norm(exec, x, weight, eps, out, low);
    }
    if cpu(check, exec)?.is_some() {
        norm_host(read(x).into_owned(), weight, eps, out, low);
    }
    Ok(())
}

/// The rounded form of `out` must have its dtype and shape, and the GPU's kernels take vectors of four.
pub(super) fn check_rounded(check: Check, out: &Tensor, low: Option<&Rounded<'_>>) -> Result<(), OpError> {
    check.that(out.rows_cols().1.is_multiple_of(4), "the width of rows must be a multiple of four")?;
    let Some(low) = low else { return Ok(()) };
    check.is(low.values, out.dtype(), out.shape())?;
    low.packed.as_deref().map_or(Ok(()), |packed| check_packed(check, out, packed))
}

/// [`norm`] of `values` on the host.
pub(super) fn norm_host(mut values: Vec<f32>, weight: &Tensor, eps: f32, out: &mut Tensor, low: Option<Rounded<'_>>) {
    reference::norm(&mut values, &read(weight), eps);
    write(out, &values);
    if let Some(low) = low {
        let mut values = read(out).into_owned();
        values.chunks_exact_mut(weight.elements()).for_each(|row| fp8(row, BLOCK));
        write(low.values, &values);
        if let Some(packed) = low.packed {
            pack_host(&mut values, weight.elements(), packed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};
    use half::bf16;

    #[test]
    fn the_second_output_is_the_first_one_rounded_to_fp8() {
        Host::each(|mut host| {
            let (x, w) = (bf16s(3 * 192, 1), bf16s(192, 2));
            let (tx, tw) = (host.bf16("x", &[3, 192], &x), host.bf16("w", &[192], &w));
            let [mut out, mut low] = ["out", "low"].map(|name| host.zeros(name, &[3, 192], DType::Bf16));
            norm(&mut host.exec, &tx, &tw, 1e-6, &mut out, Some((&mut low).into())).unwrap();
            for (got, row) in low.host::<bf16>().chunks(192).zip(out.host::<bf16>().chunks(192)) {
                assert_ne!(got, row);
                // A group of 128 and the rest, separately.
                for (got, group) in [(&got[..128], &row[..128]), (&got[128..], &row[128..])] {
                    let mut expected = bf16s(128, 9);
                    expected[..group.len()].copy_from_slice(group);
                    expected[group.len()..].fill(bf16::ZERO);
                    let mut alone = host.bf16("alone", &[1, 128], &expected);
                    super::super::round_activation(&mut host.exec, &mut alone).unwrap();
                    assert_eq!(*got, alone.host::<bf16>()[..group.len()]);
                }
            }
        });
    }

    #[test]
    fn one_rounding_at_the_end() {
        Host::each(|mut host| {
            let (x, w) = (bf16s(3 * 64, 1), bf16s(64, 2));
            let (tx, tw) = (host.bf16("x", &[3, 64], &x), host.bf16("w", &[64], &w));
            let mut out = host.zeros("out", &[3, 64], DType::Bf16);
            norm(&mut host.exec, &tx, &tw, 1e-6, &mut out, None).unwrap();
            for (i, got) in out.host::<bf16>().iter().enumerate() {
                let row = &x[i / 64 * 64..][..64];
                let mean = row.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / 64.0;
                let exact = x[i].to_f64() / (mean + 1e-6).sqrt() * w[i % 64].to_f64();
                assert_eq!(*got, bf16::from_f64(exact), "{exact}");
            }
        });
    }
}
