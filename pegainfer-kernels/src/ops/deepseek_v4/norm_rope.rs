//! Norm and rotary embedding of queries and keys on the host. Each step rounds to the dtype, as ops of their own would.

use super::kv_quant::round;
use super::rope::{RopeTable, rotate};
use super::values::{read, write};
use crate::cpu::deepseek_v4::kv_quant::{KEY_GROUP, fp8};
use crate::cpu::deepseek_v4::norm as reference;
use crate::ops::check::Check;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Queries, in place: each head is divided by its root mean square, without a weight, and rotated. `x`: `[tokens,
/// heads, dim]`. f32 inside the norm, as in transformers and vLLM; DeepSeek's own code squares and takes the root in
/// bf16.
pub(super) fn queries_host(x: &mut Tensor, (positions, table): (&Tensor, &RopeTable), eps: f32) {
    let (heads, dim) = (x.shape()[1], x.shape()[2]);
    let mut values = read(x).into_owned();
    reference::unweighted(&mut values, dim, eps);
    round(&mut values, x.dtype());
    rotate(&mut values, (heads, dim), positions, table, false);
    write(x, &values);
}

/// Keys, which are also values: norm with its weight, then rotation, then, with `quantize`, the part that is not
/// rotated in FP8: groups of 64 values, each with the scale `2^ceil(log2(max(amax, 1e-4) / 448))`, e4m3, to nearest
/// even. `x`, `out`: `[tokens, dim]`.
pub(super) fn keys_host(
    (x, weight): (&Tensor, &Tensor),
    (positions, table): (&Tensor, &RopeTable),
    eps: f32,
    quantize: bool,
    out: &mut Tensor,
) {
    let dim = x.rows_cols().1;
    let mut values = read(x).into_owned();
    reference::norm(&mut values, &read(weight), eps);
    round(&mut values, x.dtype());
    rotate(&mut values, (1, dim), positions, table, false);
    round(&mut values, x.dtype());
    if quantize {
        let still = dim - 2 * table.frequencies.elements();
        values.chunks_exact_mut(dim).for_each(|key| fp8(&mut key[..still], KEY_GROUP));
    }
    write(out, &values);
}

/// Checks that the table fits rows of `dim` elements, and that the unrotated part is whole groups if it is rounded.
pub(super) fn check_rope(check: Check, table: &RopeTable, dim: usize, quantize: bool) -> Result<(), OpError> {
    check.that(dim.is_multiple_of(2), "the width of rows must be even")?;
    check.that(2 * table.frequencies.elements() <= dim, "more frequencies than pairs")?;
    check.is(&table.frequencies, DType::F32, &[table.frequencies.elements()])?;
    let still = dim - 2 * table.frequencies.elements();
    check.that(!quantize || still.is_multiple_of(KEY_GROUP), "the part that is not rotated must be groups of 64")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};
    use half::bf16;

    fn tensor(host: &mut Host, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = host.zeros("x", shape, DType::F32);
        tensor.host_mut::<f32>().copy_from_slice(values);
        tensor
    }

    #[test]
    fn trap_13_the_query_norm_is_computed_in_f32() {
        Host::each(|mut host| {
            // In bf16 the squares of 1 + 2^-7 and 1 round to values whose mean is off by 2^-9.
            let x: Vec<bf16> =
                (0..512).map(|i| bf16::from_f32(if i % 2 == 0 { 1.0 } else { 1.0 + 0.007_812_5 })).collect();
            let mut t = host.zeros("x", &[1, 1, 512], DType::F32);
            t.host_mut::<f32>().iter_mut().zip(&x).for_each(|(t, x)| *t = x.to_f32());
            let table = RopeTable::new(&mut host.exec, 64, 1e4, None).unwrap();
            let positions = host.u32("positions", &[0]);
            queries_host(&mut t, (&positions, &table), 1e-6);
            let mean = x.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / 512.0;
            for (got, x) in t.host::<f32>().iter().zip(&x) {
                assert!((f64::from(*got) - x.to_f64() / (mean + 1e-6).sqrt()).abs() < 1e-6);
            }
        });
    }

    #[test]
    fn trap_16_keys_are_really_rounded_to_fp8() {
        Host::each(|mut host| {
            let values: Vec<f32> = bf16s(2 * 512, 1).iter().map(|v| v.to_f32()).collect();
            let x = tensor(&mut host, &[2, 512], &values);
            let weight = host.bf16("weight", &[512], &bf16s(512, 2));
            let (positions, table) =
                (host.u32("positions", &[3, 5]), RopeTable::new(&mut host.exec, 64, 1e4, None).unwrap());
            let mut run = |quantize| {
                let mut kv = host.zeros("kv", &[2, 1, 512], DType::F32);
                let at = (&positions, &table);
                keys_host((&x, &weight), at, 1e-6, quantize, &mut kv);
                kv.host::<f32>().to_vec()
            };
            let (values, kv) = (run(false), run(true));
            let mut changed = 0;
            for (got, value) in kv.chunks(512).zip(values.chunks(512)) {
                assert_eq!(got[448..], value[448..], "the rotated part stays");
                for (got, value) in got.iter().zip(value).take(448) {
                    // Four significant bits, or the spacing of the smallest codes of a group of values up to 2.
                    assert!((got - value).abs() <= (value.abs() / 16.0).max(2f32.powi(-17)));
                    assert_eq!(got.to_bits() << 12, 0, "{got} has more than 4 significant bits");
                    changed += usize::from(got != value);
                }
            }
            assert!(changed > 700, "only {changed} of 896 values were rounded");
        });
    }

    #[test]
    fn every_step_rounds_to_the_dtype() {
        Host::each(|mut host| {
            let (x, w) = (bf16s(2 * 192, 1), bf16s(192, 2));
            let (mut q, kv) = (host.bf16("q", &[2, 1, 192], &x), host.bf16("kv", &[2, 192], &x));
            let weight = host.bf16("weight", &[192], &w);
            let (positions, table) =
                (host.u32("positions", &[3, 70]), RopeTable::new(&mut host.exec, 64, 1e4, None).unwrap());
            // As separate ops: a norm, with a weight of 1 for queries, and a rotation.
            let ones = host.bf16("ones", &[192], &[bf16::ONE; 192]);
            let mut apart = |weight: &Tensor| {
                let mut out = host.zeros("out", &[2, 1, 192], DType::Bf16);
                super::super::norm(&mut host.exec, &kv, weight, 1e-6, &mut out, None).unwrap();
                let mut values = read(&out).into_owned();
                rotate(&mut values, (1, 192), &positions, &table, false);
                write(&mut out, &values);
                out.host::<bf16>().to_vec()
            };
            let (queries, keys) = (apart(&ones), apart(&weight));
            queries_host(&mut q, (&positions, &table), 1e-6);
            assert_eq!(q.host::<bf16>(), queries);
            let mut out = host.zeros("out", &[2, 1, 192], DType::Bf16);
            keys_host((&kv, &weight), (&positions, &table), 1e-6, false, &mut out);
            assert_eq!(out.host::<bf16>(), keys);
        });
    }
}
