//! From the input of attention to rotated queries and a written KV cache.

use super::activation::host_values;
use super::check::Check;
use super::matrix::MatrixRef;
use super::qkv as rest;
use crate::choice::{self, Qkv};
use crate::cpu::linear::{LinearOut, linear_stacked};
use crate::cuda;
use crate::heads::{Heads, KvDType};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// [`linear`](super::linear) of the fused QKV projection, then
/// [`qk_norm_rope_write_kv`](super::qk_norm_rope_write_kv).
///
/// `x`: `[tokens, k]` bf16, or [in FP8](super::Activation); `w`: `[(heads + 2 kv_heads) * head_dim, k]` bf16, or FP8 as
/// in [`linear`](super::linear), queries first, then keys, then values; `qkv`:
/// `[tokens, (heads + 2 kv_heads) * head_dim]` bf16, scratch for the GEMM, what it holds afterwards depends on the
/// device; `heads`, `q` and the cache as there. The GEMM is rounded to bf16.
///
/// A GPU of compute capability 9.0 runs one kernel for many rows if `head_dim` is 128.
pub fn linear_qkv<'w>(
    exec: &mut Exec,
    (x, w): (&Tensor, impl Into<MatrixRef<'w>>),
    heads: &Heads<'_>,
    qkv: &mut Tensor,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let check = Check("linear_qkv");
    let Heads { shape, norms, rope, positions, slots, .. } = *heads;
    let ((m, columns), n) = (x.rows_cols(), shape.qkv_width());
    check.is_activation(x, &[m, columns])?;
    let w = w.into();
    w.check_dense(check, exec.device(), (n, columns))?;
    check.is(qkv, DType::Bf16, &[m, n])?;
    rest::check(check, exec.device(), qkv, heads, q, (k, v))?;
    let formats = (w.format(), KvDType::of(k));
    let choice = choice::gpu(exec)?.map(|gpu| Qkv::choose(&gpu, (m, columns), shape, formats));
    exec.record(|device| {
        let kernel = choice::name(device, &choice, Qkv::name);
        let flops = 2 * (m * n * columns) as u64 + rest::flops(qkv, shape);
        // The GEMM's results need not go through memory.
        let bytes = x.bytes() + w.bytes() + rest::bytes(qkv, shape, k) - qkv.bytes();
        let reads = w.reads(&[x], &[norms.0, norms.1, rope, positions, slots]);
        OpRecord::new(check.0, kernel, &reads, &[q, k, v], flops).with_bytes(bytes)
    });
    match (exec.device(), &choice) {
        (Device::Cpu(isa), _) => {
            let gemm = LinearOut::Bf16(qkv.host_mut());
            linear_stacked(isa, &host_values(x), &w.weights(), (m, columns), gemm, &mut exec.scratch);
            rest::on_cpu(check, exec, qkv, heads, q, (k, v))
        }
        (Device::Cuda, Some(choice)) => cuda::linear_qkv(exec, choice, (x, w), heads, qkv, q, (k, v)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::{HeadShape, KvDType};
    use crate::ops::{linear, qk_norm_rope_write_kv, rope_table};
    use crate::testing::{Host, bf16s};
    use half::bf16;
    use pegainfer_core::kv::NO_SLOT;

    #[test]
    fn it_is_a_gemm_and_what_follows_it() {
        Host::each(|mut host| {
            for (heads, kv_heads, head_dim) in [(4, 2, 128), (3, 1, 64)] {
                let shape = HeadShape { heads, kv_heads, head_dim };
                let (tokens, columns, blocks) = (5, 96, 3);
                let x = host.bf16("x", &[tokens, columns], &bf16s(tokens * columns, 1));
                let n = shape.qkv_width();
                let w = host.bf16("w", &[n, columns], &bf16s(n * columns, 2));
                let norms = [3, 4].map(|seed| host.bf16("norm", &[head_dim], &bf16s(head_dim, seed)));
                let rope = rope_table(&mut host.exec, 64, head_dim, 1e6).unwrap();
                let at = (host.u32("positions", &[9, 0, 63, 8, 1]), host.u32("slots", &[40, 3, NO_SLOT, 41, 16]));
                let [k_shape, v_shape] = shape.cache(host.exec.device(), KvDType::Bf16, blocks);
                let cache = bf16s(blocks * shape.block_len(KvDType::Bf16), 5);
                let mut caches = [0, 1].map(|_| (host.bf16("k", &k_shape, &cache), host.bf16("v", &v_shape, &cache)));
                let mut q = ["apart", "one"].map(|name| host.zeros(name, &[tokens, shape.q_width()], DType::Bf16));
                let mut qkv = host.zeros("qkv", &[tokens, n], DType::Bf16);
                let norms = (&norms[0], &norms[1]);
                let made = Heads { shape, norms, eps: 1e-6, rope: &rope, positions: &at.0, slots: &at.1 };
                let exec = &mut host.exec;
                let ([(k0, v0), (k1, v1)], [q0, q1]) = (&mut caches, &mut q);
                linear(exec, &x, &w, &mut qkv).unwrap();
                qk_norm_rope_write_kv(exec, &qkv, &made, q0, (k0, v0)).unwrap();
                linear_qkv(exec, (&x, &w), &made, &mut qkv, q1, (k1, v1)).unwrap();
                for (apart, one) in [(&*q0, &*q1), (k0, k1), (v0, v1)] {
                    assert_eq!(apart.host::<bf16>(), one.host::<bf16>());
                }
                assert_ne!(k0.host::<bf16>(), cache, "something was written");
                let result = linear_qkv(exec, (&x, &x), &made, &mut qkv, q1, (k1, v1));
                assert!(result.unwrap_err().to_string().contains("linear_qkv"));
            }
        });
    }
}
