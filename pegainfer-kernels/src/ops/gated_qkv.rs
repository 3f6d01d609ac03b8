//! From the fused projection with gates to rotated queries and a written KV cache.

use super::check::Check;
use super::qkv::distinct;
use crate::cpu::gated_qkv::{self, Inputs};
use crate::cpu::kv_cache::KvWriter;
use crate::cuda;
use crate::heads::{BLOCK_SIZE, Heads, KvDType};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Per-head RMS norm of queries and keys, RoPE on their leading elements, and the write of keys and values to the paged
/// cache (transformers `Qwen3_5Attention`).
///
/// `projected`: `[tokens, gated_qkv_width]` bf16: for each head its query, then its gate (for
/// [`attention_gate`](super::attention_gate)), then keys, then values; norms f32. The RoPE table has `rotary_dim`
/// columns, a multiple of 32, at most `head_dim`; later elements are not rotated. `heads.positions` may be
/// `[tokens, 3]`: frequency `i` then rotates by component `i % 3` (interleaved M-RoPE, `apply_interleaved_mrope` of
/// transformers). `q`, `k`, `v`: as in
/// [`qk_norm_rope_write_kv`](super::qk_norm_rope_write_kv). f32 with one final rounding. On a GPU `head_dim` is a
/// multiple of 64.
pub fn gated_qk_norm_rope_write_kv(
    exec: &mut Exec,
    projected: &Tensor,
    heads: &Heads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let c = Check("gated_qk_norm_rope_write_kv");
    check(c, exec.device(), projected, heads, q, (k, v))?;
    exec.record(|_| {
        let Heads { norms, rope, positions, slots, .. } = *heads;
        let reads = [projected, norms.0, norms.1, rope, positions, slots];
        OpRecord::new(c.0, "rows", &reads, &[q, k, v], flops(projected, heads)).with_bytes(bytes(projected, heads, k))
    });
    match exec.device() {
        Device::Cpu(_) => on_cpu(c, exec, projected, heads, q, (k, v)),
        Device::Cuda => cuda::gated_qk_norm_rope_write_kv(exec, projected, heads, q, (k, v)),
        Device::Meta => Ok(()),
    }
}

/// Checks shapes and dtypes of the operands.
pub(super) fn check(
    check: Check,
    device: Device,
    projected: &Tensor,
    heads: &Heads<'_>,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
) -> Result<(), OpError> {
    let Heads { shape, norms, rope, positions, slots, .. } = *heads;
    let (tokens, (max_position, rotary_dim)) = (projected.rows_cols().0, rope.rows_cols());
    check.that(shape.is_supported(), "heads do not group, or head_dim is not a multiple of 16 from 32 to 256")?;
    let rotates = rotary_dim.is_multiple_of(32) && rotary_dim <= shape.head_dim;
    check.that(rotates, "the rotated elements are not a multiple of 32, or more than a head has")?;
    check.is(projected, DType::Bf16, &[tokens, shape.gated_qkv_width()])?;
    for norm in [norms.0, norms.1] {
        check.is(norm, DType::F32, &[shape.head_dim])?;
    }
    check.is(rope, DType::F32, &[max_position, rotary_dim])?;
    check.is(positions, DType::U32, &[tokens, 3][..if heads.axes() == 1 { 1 } else { 2 }])?;
    check.is(slots, DType::U32, &[tokens])?;
    check.is(q, DType::Bf16, &[tokens, shape.q_width()])?;
    check.is_cache(device, shape, (k, v))
}

/// Floating-point operations of the call.
pub(super) fn flops(projected: &Tensor, heads: &Heads<'_>) -> u64 {
    let Heads { shape, rope, .. } = heads;
    let normed = projected.rows_cols().0 * (shape.heads + shape.kv_heads);
    (normed * (4 * shape.head_dim + 3 * rope.rows_cols().1)) as u64
}

/// Bytes of the call: everything except the gates is read once and written once, keys and values in the format of the
/// cache `k`; one row of the RoPE table is read per token.
pub(super) fn bytes(projected: &Tensor, heads: &Heads<'_>, k: &Tensor) -> u64 {
    let Heads { shape, rope, .. } = heads;
    let moved = (shape.qkv_width() + shape.q_width()) * DType::Bf16.size();
    let token = moved + shape.kv_bytes_per_token(KvDType::of(k)) + rope.rows_cols().1 * DType::F32.size();
    (projected.rows_cols().0 * token) as u64
}

/// The reference kernel, on operands with checked shapes.
pub(super) fn on_cpu(
    check: Check,
    exec: &mut Exec,
    projected: &Tensor,
    heads: &Heads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let Heads { shape, norms, eps, rope, positions, slots } = *heads;
    let Device::Cpu(isa) = exec.device() else { return Ok(()) };
    let ((max_position, rotary_dim), max_slot) = (rope.rows_cols(), k.rows_cols().0 * BLOCK_SIZE);
    let (axes, positions, slots) = (heads.axes(), positions.host::<u32>(), slots.host::<u32>());
    check.that(positions.iter().all(|&p| (p as usize) < max_position), "a position is beyond the RoPE table")?;
    let inside = |&s: &u32| (s as usize) < max_slot || s == NO_SLOT;
    check.that(slots.iter().all(inside), "a slot is outside the KV cache")?;
    // Sound because the slots differ: threads write to their tokens' slots concurrently.
    check.that(distinct(slots), "two tokens share a slot")?;
    let norms = (norms.0.host::<f32>(), norms.1.host::<f32>());
    let (projected, rope) = (projected.host(), rope.host());
    let inputs = Inputs { projected, norms, rope, rotary_dim, positions, axes, slots, shape, eps };
    gated_qkv::run(isa, &inputs, q.host_mut(), &KvWriter::of((k, v)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::{HeadShape, KvDType};
    use crate::ops::rope_table;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;

    /// f64 norm and rotation of one head; pair `i` rotates by position `i` modulo the number of positions.
    fn reference(x: &[bf16], weight: &[f32], rotary_dim: usize, positions: &[u32]) -> Vec<f64> {
        let mean = x.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / x.len() as f64;
        let scale = (mean + 1e-6).sqrt().recip();
        let n: Vec<f64> = x.iter().zip(weight).map(|(v, w)| v.to_f64() * scale * f64::from(*w)).collect();
        let half = rotary_dim / 2;
        let rotated = (0..rotary_dim).map(|i| {
            let position = positions[i % half % positions.len()];
            let angle = f64::from(position) * 1e7f64.powf(-2.0 * (i % half) as f64 / rotary_dim as f64);
            let (sin, cos) = angle.sin_cos();
            if i < half { n[i] * cos - n[i + half] * sin } else { n[i] * cos + n[i - half] * sin }
        });
        rotated.chain(n[rotary_dim..].iter().copied()).collect()
    }

    #[test]
    fn matches_f64_and_writes_each_token_to_its_slot() {
        Host::each(|mut host| {
            for (heads, kv_heads, head_dim, rotary_dim) in
                [(4, 2, 256, 64), (5, 1, 64, 32), (2, 2, 80, 64), (1, 1, 32, 32)]
            {
                let shape = HeadShape { heads, kv_heads, head_dim };
                let (tokens, blocks, width) = (7, 3, shape.gated_qkv_width());
                let row = bf16s(tokens * width, 1);
                let projected = host.bf16("projected", &[tokens, width], &row);
                let norms = ["q_norm", "k_norm"].map(|name| {
                    let mut norm = host.zeros(name, &[head_dim], DType::F32);
                    let values = bf16s(head_dim, name.len() as u64 + u64::from(name == "q_norm"));
                    norm.host_mut::<f32>().iter_mut().zip(values).for_each(|(to, w)| *to = w.to_f32() + 1.001);
                    norm
                });
                let rope = rope_table(&mut host.exec, 50, rotary_dim, 1e7).unwrap();
                let (at, places) = ([0, 1, 2, 30, 31, 48, 49], [47, 0, 1, 17, 18, 31, 30]);
                let (positions, slots) = (host.u32("positions", &at), host.u32("slots", &places));
                let mut q = host.zeros("q", &[tokens, shape.q_width()], DType::Bf16);
                let [k_shape, v_shape] = shape.cache(host.exec.device(), KvDType::Bf16, blocks);
                let mut k = host.zeros("k", &k_shape, DType::Bf16);
                let mut v = host.zeros("v", &v_shape, DType::Bf16);
                let norms = (&norms[0], &norms[1]);
                let made = Heads { shape, norms, eps: 1e-6, rope: &rope, positions: &positions, slots: &slots };
                let exec = &mut host.exec;
                gated_qk_norm_rope_write_kv(exec, &projected, &made, &mut q, (&mut k, &mut v)).unwrap();
                for t in 0..tokens {
                    let row = &row[t * width..][..width];
                    for h in 0..heads {
                        let query = &row[2 * h * head_dim..][..head_dim];
                        let got = &q.host::<bf16>()[(t * heads + h) * head_dim..][..head_dim];
                        close(got, &reference(query, norms.0.host(), rotary_dim, &at[t..=t]), 1.01 / 256.0, 1e-4);
                    }
                    for h in 0..kv_heads {
                        let key = &row[(2 * heads + h) * head_dim..][..head_dim];
                        let first = shape.key(KvDType::Bf16, places[t] as usize, h);
                        let got: Vec<bf16> = (0..head_dim).map(|d| k.host::<bf16>()[first + d * BLOCK_SIZE]).collect();
                        close(&got, &reference(key, norms.1.host(), rotary_dim, &at[t..=t]), 1.01 / 256.0, 1e-4);
                        let value = &row[(2 * heads + kv_heads + h) * head_dim..][..head_dim];
                        let got = &v.host::<bf16>()[shape.value(KvDType::Bf16, places[t] as usize, h)..][..head_dim];
                        assert_eq!(got, value);
                    }
                }
                let before = v.host::<bf16>().to_vec();
                let nowhere = host.u32("slots", &[NO_SLOT; 7]);
                let unwritten = Heads { slots: &nowhere, ..made };
                let exec = &mut host.exec;
                gated_qk_norm_rope_write_kv(exec, &projected, &unwritten, &mut q, (&mut k, &mut v)).unwrap();
                assert_eq!(v.host::<bf16>(), before, "a token without a slot is not written");
                let twice = host.u32("slots", &[47, 0, 1, 17, 18, 31, 17]);
                let (made, exec) = (Heads { slots: &twice, ..made }, &mut host.exec);
                let error = gated_qk_norm_rope_write_kv(exec, &projected, &made, &mut q, (&mut k, &mut v));
                assert!(error.unwrap_err().to_string().contains("share a slot"));
            }
        });
    }

    #[test]
    fn three_positions_take_turns_and_equal_ones_are_one() {
        Host::each(|mut host| {
            let shape = HeadShape { heads: 2, kv_heads: 1, head_dim: 128 };
            let (tokens, width, rotary_dim) = (5, shape.gated_qkv_width(), 64);
            let row = bf16s(tokens * width, 1);
            let projected = host.bf16("projected", &[tokens, width], &row);
            let mut norm = host.zeros("norm", &[128], DType::F32);
            norm.host_mut::<f32>().fill(1.5);
            let rope = rope_table(&mut host.exec, 50, rotary_dim, 1e7).unwrap();
            let slots = host.u32("slots", &[0, 1, 2, 3, 4]);
            let [k, v] = shape.cache(host.exec.device(), KvDType::Bf16, 1);
            let (mut k, mut v) = (host.zeros("k", &k, DType::Bf16), host.zeros("v", &v, DType::Bf16));
            let mut run = |host: &mut Host, positions: &Tensor| {
                let heads = Heads { shape, norms: (&norm, &norm), eps: 1e-6, rope: &rope, positions, slots: &slots };
                let mut q = host.zeros("q", &[tokens, shape.q_width()], DType::Bf16);
                gated_qk_norm_rope_write_kv(&mut host.exec, &projected, &heads, &mut q, (&mut k, &mut v))
                    .map(|()| (q.host::<bf16>().to_vec(), k.host::<bf16>().to_vec()))
            };
            let mut three = host.zeros("positions", &[tokens, 3], DType::U32);
            let at = [[4, 4, 9], [4, 49, 0], [7, 7, 7], [0, 1, 2], [30, 20, 10]];
            three.host_mut::<u32>().copy_from_slice(at.as_flattened());
            let (q, _) = run(&mut host, &three).unwrap();
            for (t, at) in at.iter().enumerate() {
                for h in 0..2 {
                    let query = &row[t * width + 2 * h * 128..][..128];
                    let got = &q[(2 * t + h) * 128..][..128];
                    close(got, &reference(query, &[1.5; 128], rotary_dim, at), 1.01 / 256.0, 1e-4);
                }
            }
            let one = host.u32("positions", &[4, 9, 7, 0, 30]);
            three.host_mut::<u32>().copy_from_slice([[4; 3], [9; 3], [7; 3], [0; 3], [30; 3]].as_flattened());
            let equal = run(&mut host, &three).unwrap();
            assert!(equal == run(&mut host, &one).unwrap(), "the bits of one position");
            three.host_mut::<u32>()[7] = 50;
            assert!(run(&mut host, &three).is_err());
        });
    }
}
