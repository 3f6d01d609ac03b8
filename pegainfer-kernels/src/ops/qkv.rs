//! From the fused QKV projection to rotated queries and a written KV cache.

use super::check::Check;
use crate::cpu::kv_cache::KvWriter;
use crate::cpu::qkv as cpu;
use crate::cuda;
use crate::heads::{BLOCK_SIZE, HeadShape, Heads, KvDType, RopeHeads};
use crate::rotary::RopeSpec;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Cosines and sines of every position, `[positions, head_dim]` f32: row `p` holds `cos(p * f_i)` for `i < head_dim/2`,
/// then the sines, with the frequencies `f_i` of `rope`: `theta^(-2i / head_dim)`, or YaRN's, and times its attention
/// factor (RoPE, Su et al. 2021; full rotary, half-split as in GPT-NeoX).
///
/// Angles are f32 factors multiplied in f32, as in transformers: f64 would differ at positions beyond about 1e5.
pub fn rope_table(
    exec: &mut Exec,
    positions: usize,
    head_dim: usize,
    rope: impl Into<RopeSpec>,
) -> std::io::Result<Tensor> {
    let rope = rope.into();
    let mut table = exec.tensor("rope", &[positions, head_dim], DType::F32)?;
    let mut host = vec![0f32; table.elements()];
    exec.on_host(|| cpu::fill_rope(&mut host, head_dim, &rope));
    let elements = table.elements();
    let copy = |first: usize, out: &mut [f32]| out.copy_from_slice(&host[first..][..out.len()]);
    exec.write(&mut table, 0..elements, copy).map_err(std::io::Error::other)?;
    Ok(table)
}

/// Per-head RMS norm of queries and keys, RoPE on both, and the write of keys and values to the paged cache.
///
/// `qkv`: `[tokens, (heads + 2 kv_heads) * head_dim]` bf16, queries first, then keys, then values; norms bf16; `q`:
/// `[tokens, heads * head_dim]` bf16; `k`, `v`: the cache of one layer, bf16 or FP8, see [`HeadShape`] and
/// [`KvDType`](super::KvDType).
///
/// The norm rounds as [`rms_norm`](super::rms_norm) does; the rotation is f32 with one rounding.
pub fn qk_norm_rope_write_kv(
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &Heads<'_>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let c = Check("qk_norm_rope_write_kv");
    check(c, exec.device(), qkv, heads, q, (k, v))?;
    exec.record(|_| {
        let Heads { shape, norms, rope, positions, slots, .. } = *heads;
        let reads = [qkv, norms.0, norms.1, rope, positions, slots];
        OpRecord::new(c.0, "rows", &reads, &[q, k, v], flops(qkv, shape)).with_bytes(bytes(qkv, shape, k))
    });
    match exec.device() {
        Device::Cpu(_) => on_cpu(c, exec, qkv, heads, q, (k, v)),
        Device::Cuda => cuda::qk_norm_rope_write_kv(exec, qkv, heads, q, (k, v)),
        Device::Meta => Ok(()),
    }
}

/// Checks shapes and dtypes of the operands.
pub(super) fn check(
    check: Check,
    device: Device,
    qkv: &Tensor,
    heads: &Heads<'_>,
    q: &Tensor,
    cache: (&Tensor, &Tensor),
) -> Result<(), OpError> {
    let Heads { shape, norms: (q_norm, k_norm), .. } = *heads;
    check_rope(check, device, qkv, &heads.without_norms(), q, cache)?;
    check.is(q_norm, DType::Bf16, &[shape.head_dim])?;
    check.is(k_norm, DType::Bf16, &[shape.head_dim])
}

/// Variant of [`check`] for a model without QK norm.
pub(super) fn check_rope(
    check: Check,
    device: Device,
    qkv: &Tensor,
    heads: &RopeHeads<'_>,
    q: &Tensor,
    (k, v): (&Tensor, &Tensor),
) -> Result<(), OpError> {
    let RopeHeads { shape, rope, positions, slots } = *heads;
    let tokens = qkv.rows_cols().0;
    let head_dim = shape.head_dim;
    check.that(shape.is_supported(), "heads do not group, or head_dim is not a multiple of 16 from 32 to 256")?;
    check.is(qkv, DType::Bf16, &[tokens, shape.qkv_width()])?;
    check.is(rope, DType::F32, &[rope.rows_cols().0, head_dim])?;
    check.is(positions, DType::U32, &[tokens])?;
    check.is(slots, DType::U32, &[tokens])?;
    check.is(q, DType::Bf16, &[tokens, shape.q_width()])?;
    check.is_cache(device, shape, (k, v))
}

/// Floating-point operations of the call.
pub(super) fn flops(qkv: &Tensor, shape: HeadShape) -> u64 {
    10 * (qkv.rows_cols().0 * (shape.heads + shape.kv_heads) * shape.head_dim) as u64
}

/// Bytes of the call: every element of qkv is read once and written once, keys and values in the format of the cache
/// `k`; one row of the RoPE table is read per token.
pub(super) fn bytes(qkv: &Tensor, shape: HeadShape, k: &Tensor) -> u64 {
    let written = shape.q_width() * DType::Bf16.size() + shape.kv_bytes_per_token(KvDType::of(k));
    qkv.bytes() + (qkv.rows_cols().0 * (written + shape.head_dim * DType::F32.size())) as u64
}

/// The reference kernel, on operands with checked shapes.
pub(super) fn on_cpu(
    check: Check,
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &Heads<'_>,
    q: &mut Tensor,
    cache: (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    rotate_on_cpu(check, exec, qkv, &heads.without_norms(), Some((heads.norms, heads.eps)), q, cache)
}

/// Variant of [`on_cpu`]. `norms`: weights of the norms of queries and of keys, and their epsilon, if the model has QK
/// norm.
pub(super) fn rotate_on_cpu(
    check: Check,
    exec: &mut Exec,
    qkv: &Tensor,
    heads: &RopeHeads<'_>,
    norms: Option<((&Tensor, &Tensor), f32)>,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let RopeHeads { shape, rope, positions, slots } = *heads;
    let Device::Cpu(isa) = exec.device() else { return Ok(()) };
    let (max_position, max_slot) = (rope.rows_cols().0, k.rows_cols().0 * BLOCK_SIZE);
    let (positions, slots) = (positions.host::<u32>(), slots.host::<u32>());
    check.that(positions.iter().all(|&p| (p as usize) < max_position), "a position is beyond the RoPE table")?;
    let inside = |&s: &u32| (s as usize) < max_slot || s == NO_SLOT;
    check.that(slots.iter().all(inside), "a slot is outside the KV cache")?;
    // Sound because the slots differ: threads write to their tokens' slots concurrently.
    check.that(distinct(slots), "two tokens share a slot")?;
    let norms = norms.map(|((q, k), eps)| cpu::Norms { q: q.host(), k: k.host(), eps });
    let inputs = cpu::Inputs { qkv: qkv.host(), norms, rope: rope.host(), positions, slots, shape };
    cpu::run(isa, &inputs, q.host_mut(), &KvWriter::of((k, v)));
    Ok(())
}

/// True when no slot occurs twice.
pub(super) fn distinct(slots: &[u32]) -> bool {
    let mut sorted: Vec<u32> = slots.iter().copied().filter(|&s| s != NO_SLOT).collect();
    sorted.sort_unstable();
    sorted.is_sorted_by(|a, b| a < b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;

    /// f64 norm and rotation of one head.
    fn reference(x: &[bf16], weight: &[bf16], position: u32, theta: f64) -> Vec<f64> {
        let d = x.len();
        let mean = x.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / d as f64;
        let scale = (mean + 1e-6).sqrt().recip();
        let n: Vec<f64> = x.iter().zip(weight).map(|(v, w)| v.to_f64() * scale * w.to_f64()).collect();
        (0..d)
            .map(|i| {
                let pair = i % (d / 2);
                let angle = f64::from(position) * theta.powf(-2.0 * pair as f64 / d as f64);
                let (sin, cos) = angle.sin_cos();
                if i < d / 2 { n[i] * cos - n[i + d / 2] * sin } else { n[i] * cos + n[i - d / 2] * sin }
            })
            .collect()
    }

    #[test]
    fn matches_f64_and_writes_each_token_to_its_slot() {
        Host::each(|mut host| {
            for (heads, kv_heads, head_dim) in [(4, 2, 128), (5, 1, 64), (8, 8, 32), (2, 1, 80), (1, 1, 256)] {
                let shape = HeadShape { heads, kv_heads, head_dim };
                let (tokens, blocks) = (7, 3);
                let positions = [0, 1, 2, 300, 301, 5, 6];
                let slots = [47, 0, 1, 17, 18, 31, 5];
                let x = bf16s(tokens * shape.qkv_width(), 11);
                let (wq, wk) = (bf16s(head_dim, 12), bf16s(head_dim, 13));
                let qkv = host.bf16("qkv", &[tokens, shape.qkv_width()], &x);
                let norms = (host.bf16("q_norm", &[head_dim], &wq), host.bf16("k_norm", &[head_dim], &wk));
                let rope = rope_table(&mut host.exec, 512, head_dim, 1e6).unwrap();
                let at = (host.u32("positions", &positions), host.u32("slots", &slots));
                let mut q = host.zeros("q", &[tokens, shape.q_width()], DType::Bf16);
                let mut k = host.zeros("k", &[blocks, kv_heads, head_dim, BLOCK_SIZE], DType::Bf16);
                let mut v = host.zeros("v", &[blocks, kv_heads, BLOCK_SIZE, head_dim], DType::Bf16);
                let (norms, (positions_of, slots_of)) = ((&norms.0, &norms.1), (&at.0, &at.1));
                let made = Heads { shape, norms, eps: 1e-6, rope: &rope, positions: positions_of, slots: slots_of };
                qk_norm_rope_write_kv(&mut host.exec, &qkv, &made, &mut q, (&mut k, &mut v)).unwrap();
                for t in 0..tokens {
                    let row = &x[t * shape.qkv_width()..][..shape.qkv_width()];
                    let (block, offset) = (slots[t] as usize / BLOCK_SIZE, slots[t] as usize % BLOCK_SIZE);
                    for h in 0..heads {
                        let expected = reference(&row[h * head_dim..][..head_dim], &wq, positions[t], 1e6);
                        let got = &q.host::<bf16>()[t * shape.q_width() + h * head_dim..][..head_dim];
                        // Roundings of the norm (two, to bf16) enter a sum, so the bound is on the head's scale.
                        close(got, &expected, 1.0 / 64.0, 0.06);
                    }
                    for h in 0..kv_heads {
                        let key = &row[(heads + h) * head_dim..][..head_dim];
                        let expected = reference(key, &wk, positions[t], 1e6);
                        let head = &k.host::<bf16>()[(block * kv_heads + h) * head_dim * BLOCK_SIZE..];
                        let got: Vec<bf16> = (0..head_dim).map(|d| head[d * BLOCK_SIZE + offset]).collect();
                        close(&got, &expected, 1.0 / 64.0, 0.06);
                        let head = &v.host::<bf16>()[((block * kv_heads + h) * BLOCK_SIZE + offset) * head_dim..];
                        let value = &row[(heads + kv_heads + h) * head_dim..][..head_dim];
                        assert_eq!(&head[..head_dim], value);
                    }
                }
                let twice = host.u32("slots", &[47, 0, 1, 17, 18, 31, 17]);
                let made = Heads { slots: &twice, ..made };
                let error = qk_norm_rope_write_kv(&mut host.exec, &qkv, &made, &mut q, (&mut k, &mut v));
                assert!(error.unwrap_err().to_string().contains("share a slot"));
            }
        });
    }
}
