//! From the fused projection with gates to the gated output of attention, for rows of one query.

use super::activation::{ActivationMut, compute_host};
use super::check::Check;
use super::{AttentionBatch, attention, attention_gate, gated_qkv};
use crate::choice::{self, DecodeStep, Gpu};
use crate::cuda;
use crate::heads::{Heads, KvDType};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};

/// [`gated_qk_norm_rope_write_kv`](super::gated_qk_norm_rope_write_kv), then [`attention`](super::attention) with a
/// scale of `1 / sqrt(head_dim)`, then [`attention_gate`](super::attention_gate), for rows with at most one query.
///
/// `projected`, `heads`, `k` and `v` as in the first; `batch`: the same tokens, so that row `b` has place
/// `kv_lens[b] - 1`, and its slot, unless it is `NO_SLOT`, is that place in the row's blocks; `q`: `[tokens,
/// heads * head_dim]` bf16, scratch for the queries with device-dependent contents; `out`: `[tokens, heads * head_dim]`
/// bf16, or [in FP8](super::Activation).
///
/// A GPU of compute capability 9.0 or 10.0 runs one kernel for heads of 256 and one position of a token. It reads
/// `batch`, positions, slots and the cache's older tokens while the previous kernel still runs, so no kernel of the same
/// step may write them. It does not write the output of rows with a `kv_lens` of 0.
pub fn gated_decode_attention<'o>(
    exec: &mut Exec,
    projected: &Tensor,
    heads: &Heads<'_>,
    batch: &AttentionBatch<'_>,
    (k, v): (&mut Tensor, &mut Tensor),
    q: &mut Tensor,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (check, out) = (Check("gated_decode_attention"), out.into());
    let Heads { shape, norms, rope, positions, slots, .. } = *heads;
    check.that(batch.load.max_queries == 1, "a row has more than one query")?;
    gated_qkv::check(check, exec.device(), projected, heads, q, (k, v))?;
    attention::check(check, exec.device(), q, (k, v), batch, shape, out.tensor)?;
    let rows = batch.block_tables.rows_cols().0;
    let choose = |gpu: Gpu| DecodeStep::choose_gated(&gpu, (shape, heads.axes()), KvDType::of(k), &batch.load, rows);
    let choice = choice::gpu(exec)?.map(choose);
    // The gate of separate kernels takes bf16.
    let out = out.in_format(exec, matches!(choice, Some(DecodeStep::Fused(_))))?;
    exec.record(|device| {
        let kernel = choice::name(device, &choice, DecodeStep::name);
        let tables = [batch.qo_indptr, batch.kv_lens, batch.block_tables];
        let reads = [projected, norms.0, norms.1, rope, positions, slots, k, v, tables[0], tables[1], tables[2]];
        let qkv = gated_qkv::flops(projected, heads);
        let flops = qkv + attention::flops(batch, shape) + attention_gate::flops(out);
        let bytes = gated_qkv::bytes(projected, heads, k) + attention::bytes((q, out), batch, shape, k) + q.bytes();
        OpRecord::new("gated_decode_attention", kernel, &reads, &[out, k, v], flops).with_bytes(bytes)
    });
    let scale = (shape.head_dim as f32).sqrt().recip();
    match (exec.device(), &choice) {
        (Device::Cpu(_), _) => {
            gated_qkv::on_cpu(check, exec, projected, heads, q, (k, v))?;
            compute_host(out, |out| {
                attention::on_cpu(check, exec, q, (k, v), batch, shape, scale, out)?;
                attention_gate::on_cpu(exec, projected, shape, out);
                Ok(())
            })
        }
        (Device::Cuda, Some(DecodeStep::Fused(grid))) => {
            cuda::gated_decode_fused(exec, grid, projected, heads, batch, (k, v), out)
        }
        (Device::Cuda, Some(DecodeStep::Separate(choice))) => {
            cuda::gated_qk_norm_rope_write_kv(exec, projected, heads, q, (k, v))?;
            cuda::attention(exec, choice, q, (k, v), batch, shape, scale, out)?;
            cuda::attention_gate(exec, projected, shape, out)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::BLOCK_SIZE;
    use crate::heads::{HeadShape, KvDType};
    use crate::load::AttentionLoad;
    use crate::ops::{gated_qk_norm_rope_write_kv, rope_table};
    use crate::testing::{Host, bf16s};
    use half::bf16;
    use pegainfer_core::kv::NO_SLOT;
    use pegainfer_core::tensor::DType;

    #[test]
    fn it_is_a_norm_a_rotation_attention_and_a_gate() {
        Host::each(|mut host| {
            let shape = HeadShape { heads: 4, kv_heads: 1, head_dim: 256 };
            let (tokens, blocks, lens) = (2, 4, [20, 5]);
            let rope = rope_table(&mut host.exec, 64, 64, 1e7).unwrap();
            let width = shape.gated_qkv_width();
            let projected = host.bf16("projected", &[tokens, width], &bf16s(tokens * width, 1));
            let norms = ["q_norm", "k_norm"].map(|name| {
                let mut norm = host.zeros(name, &[shape.head_dim], DType::F32);
                let values = bf16s(shape.head_dim, 2);
                norm.host_mut::<f32>().iter_mut().zip(values).for_each(|(to, w)| *to = w.to_f32());
                norm
            });
            let norms = (&norms[0], &norms[1]);
            let [k_shape, v_shape] = shape.cache(host.exec.device(), KvDType::Bf16, blocks);
            let cache = bf16s(blocks * shape.block_len(KvDType::Bf16), 3);
            let mut caches = [0, 1].map(|_| (host.bf16("k", &k_shape, &cache), host.bf16("v", &v_shape, &cache)));
            let mut tables = host.zeros("block_tables", &[tokens, 2], DType::U32);
            tables.host_mut::<u32>().copy_from_slice(&[3, 1, 2, 0]);
            let slots = [BLOCK_SIZE as u32 + 3, 2 * BLOCK_SIZE as u32 + 4];
            let (positions, slots) = (&host.u32("positions", &lens.map(|n| n - 1)), &host.u32("slots", &slots));
            let heads = &Heads { shape, norms, eps: 1e-6, rope: &rope, positions, slots };
            let batch = AttentionBatch {
                qo_indptr: &host.u32("qo_indptr", &[0, 1, 2]),
                kv_lens: &host.u32("kv_lens", &lens),
                block_tables: &tables,
                load: AttentionLoad::of([(1, 20), (1, 5)]),
            };
            let mut scratch = ["q", "apart", "fused"].map(|n| host.zeros(n, &[tokens, shape.q_width()], DType::Bf16));
            let [q, apart, fused] = &mut scratch;
            let [(k0, v0), (k1, v1)] = &mut caches;
            let exec = &mut host.exec;
            gated_qk_norm_rope_write_kv(exec, &projected, heads, q, (k0, v0)).unwrap();
            attention::attention(exec, q, (k0, v0), &batch, shape, 1.0 / 16.0, &mut *apart).unwrap();
            attention_gate::attention_gate(exec, &projected, shape, apart).unwrap();
            gated_decode_attention(exec, &projected, heads, &batch, (k1, v1), q, &mut *fused).unwrap();
            assert_eq!(apart.host::<bf16>(), fused.host::<bf16>());
            assert_eq!(k0.host::<bf16>(), k1.host::<bf16>());
            assert_eq!(v0.host::<bf16>(), v1.host::<bf16>());
            // Once the tokens are in the cache, they need not be written.
            let nowhere = host.u32("slots", &[NO_SLOT; 2]);
            let mut again = host.zeros("again", &[tokens, shape.q_width()], DType::Bf16);
            let (exec, cached) = (&mut host.exec, &Heads { slots: &nowhere, ..*heads });
            gated_decode_attention(exec, &projected, cached, &batch, (k1, v1), q, &mut again).unwrap();
            assert_eq!(apart.host::<bf16>(), again.host::<bf16>());
            assert_eq!(k0.host::<bf16>(), k1.host::<bf16>());
            let batch = AttentionBatch { load: AttentionLoad::of([(1, 20), (2, 5)]), ..batch };
            let result = gated_decode_attention(exec, &projected, heads, &batch, (k1, v1), q, &mut *fused);
            assert!(result.unwrap_err().to_string().contains("more than one query"));
        });
    }
}
