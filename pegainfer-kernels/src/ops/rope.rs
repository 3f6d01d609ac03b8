//! From the fused QKV projection of a model without QK norm to rotated queries and a written KV cache.

use super::check::Check;
use super::qkv;
use crate::cuda;
use crate::heads::RopeHeads;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};

/// RoPE on queries and keys, and the write of keys and values to the paged cache:
/// [`qk_norm_rope_write_kv`](super::qk_norm_rope_write_kv) without its norms. The rotation is f32 with one rounding.
///
/// `qkv`: `[tokens, (heads + 2 kv_heads) * head_dim]` bf16, queries first, then keys, then values; `q`:
/// `[tokens, heads * head_dim]` bf16; `k`, `v`: the cache of one layer, see [`HeadShape`](super::HeadShape).
pub fn rope_write_kv(
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &RopeHeads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let check = Check("rope_write_kv");
    qkv::check_rope(check, exec.device(), qkv, heads, q, (k, v))?;
    exec.record(|_| {
        let RopeHeads { shape, rope, positions, slots } = *heads;
        // A multiplication and an addition, twice for each pair.
        let flops = 3 * (qkv.rows_cols().0 * (shape.heads + shape.kv_heads) * shape.head_dim) as u64;
        let reads = [qkv, rope, positions, slots];
        OpRecord::new(check.0, "rows", &reads, &[q, k, v], flops).with_bytes(qkv::bytes(qkv, shape, k))
    });
    match exec.device() {
        Device::Cpu(_) => qkv::rotate_on_cpu(check, exec, qkv, heads, None, q, (k, v)),
        Device::Cuda => cuda::rope_write_kv(exec, qkv, heads, q, (k, v)),
        Device::Meta => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::{BLOCK_SIZE, HeadShape, KvDType};
    use crate::ops::rope_table;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;
    use pegainfer_core::tensor::DType;

    /// f64 rotation of one head.
    fn reference(x: &[bf16], position: u32, theta: f64) -> Vec<f64> {
        let d = x.len();
        let rotated = |i: usize| {
            let angle = f64::from(position) * theta.powf(-2.0 * (i % (d / 2)) as f64 / d as f64);
            let (sin, cos) = angle.sin_cos();
            let other = if i < d / 2 { -x[i + d / 2].to_f64() } else { x[i - d / 2].to_f64() };
            x[i].to_f64() * cos + other * sin
        };
        (0..d).map(rotated).collect()
    }

    #[test]
    fn heads_are_rotated_as_they_are() {
        Host::each(|mut host| {
            for (heads, kv_heads, head_dim) in [(4, 2, 128), (2, 1, 80), (8, 8, 32)] {
                let shape = HeadShape { heads, kv_heads, head_dim };
                let (positions, slots) = ([0, 1, 300], [17, 2, 31]);
                let x = bf16s(3 * shape.qkv_width(), 21);
                let qkv = host.bf16("qkv", &[3, shape.qkv_width()], &x);
                let rope = rope_table(&mut host.exec, 512, head_dim, 1e4).unwrap();
                let at = (host.u32("positions", &positions), host.u32("slots", &slots));
                let mut q = host.zeros("q", &[3, shape.q_width()], DType::Bf16);
                let mut k = host.zeros("k", &[2, kv_heads, head_dim, BLOCK_SIZE], DType::Bf16);
                let mut v = host.zeros("v", &[2, kv_heads, BLOCK_SIZE, head_dim], DType::Bf16);
                let made = RopeHeads { shape, rope: &rope, positions: &at.0, slots: &at.1 };
                rope_write_kv(&mut host.exec, &qkv, &made, &mut q, (&mut k, &mut v)).unwrap();
                for t in 0..3 {
                    let row = &x[t * shape.qkv_width()..][..shape.qkv_width()];
                    for h in 0..heads {
                        let expected = reference(&row[h * head_dim..][..head_dim], positions[t], 1e4);
                        close(
                            &q.host::<bf16>()[t * shape.q_width() + h * head_dim..][..head_dim],
                            &expected,
                            0.005,
                            1e-4,
                        );
                    }
                    let slot = slots[t] as usize;
                    for h in 0..kv_heads {
                        let expected = reference(&row[(heads + h) * head_dim..][..head_dim], positions[t], 1e4);
                        let first = shape.key(KvDType::Bf16, slot, h);
                        let key: Vec<bf16> = (0..head_dim).map(|d| k.host::<bf16>()[first + d * BLOCK_SIZE]).collect();
                        close(&key, &expected, 0.005, 1e-4);
                        let value = &row[(heads + kv_heads + h) * head_dim..][..head_dim];
                        assert_eq!(&v.host::<bf16>()[shape.value(KvDType::Bf16, slot, h)..][..head_dim], value);
                    }
                }
            }
        });
    }
}
