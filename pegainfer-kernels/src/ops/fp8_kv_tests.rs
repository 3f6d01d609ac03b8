//! Tests of an FP8 KV cache: every op that writes one writes the codes and scales of what it would write to a bf16
//! cache, only to the slots of its tokens; and decode attention equals the write followed by attention over such a
//! cache.

use super::*;
use crate::cpu::kv_cache::quantize;
use crate::testing::{Host, bf16s};
use half::bf16;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const BLOCKS: usize = 3;
const POSITIONS: [u32; 5] = [9, 0, 63, 8, 1];
const SLOTS: [u32; 5] = [40, 3, NO_SLOT, 41, 16];

/// A cache with all bytes 255.
fn cache(host: &mut Host, shape: HeadShape, format: KvDType) -> [Tensor; 2] {
    let device = host.exec.device();
    shape.cache(device, format, BLOCKS).map(|dims| {
        let mut tensor = host.zeros("kv", &dims, format.dtype());
        match format {
            KvDType::Bf16 => tensor.host_mut::<bf16>().fill(bf16::from_bits(u16::MAX)),
            KvDType::Fp8 => tensor.host_mut::<u8>().fill(u8::MAX),
        }
        tensor
    })
}

/// The FP8 cache that holds the tokens of a bf16 one.
fn rounded(shape: HeadShape, cache: &[Tensor; 2]) -> [Vec<u8>; 2] {
    let mut out = [0, 1].map(|_| vec![u8::MAX; BLOCKS * shape.block_len(KvDType::Fp8)]);
    for slot in SLOTS.into_iter().filter(|slot| *slot != NO_SLOT).map(|slot| slot as usize) {
        for head in 0..shape.kv_heads {
            for (keys, (out, cache)) in [true, false].into_iter().zip(out.iter_mut().zip(cache)) {
                // Place of element `i`.
                let place = |format: KvDType, i: usize| match keys {
                    true => shape.key(format, slot, head) + i * BLOCK_SIZE,
                    false => shape.value(format, slot, head) + i,
                };
                let element = |i: usize| cache.host::<bf16>()[place(KvDType::Bf16, i)];
                let row: Vec<bf16> = (0..shape.head_dim).map(element).collect();
                let mut codes = vec![0; shape.head_dim];
                let scale = quantize(&row, &mut codes);
                codes.iter().enumerate().for_each(|(i, code)| out[place(KvDType::Fp8, i)] = *code);
                out[shape.scale(slot, head)..][..4].copy_from_slice(&scale.to_ne_bytes());
            }
        }
    }
    out
}

/// Runs `write` with queries and a cache of each format, and compares them.
fn holds(
    host: &mut Host,
    shape: HeadShape,
    mut write: impl FnMut(&mut Host, &mut Tensor, (&mut Tensor, &mut Tensor)) -> Result<(), OpError>,
) {
    let mut run = |format: KvDType| {
        let mut q = host.zeros("q", &[SLOTS.len(), shape.q_width()], DType::Bf16);
        let mut cache = cache(host, shape, format);
        let [k, v] = &mut cache;
        write(host, &mut q, (k, v)).unwrap();
        (q, cache)
    };
    let ((q, bf16s), (q8, fp8)) = (run(KvDType::Bf16), run(KvDType::Fp8));
    assert_eq!(q.host::<bf16>(), q8.host::<bf16>());
    let expected = rounded(shape, &bf16s);
    assert!(fp8[0].host::<u8>() == expected[0], "keys, {shape:?}");
    assert!(fp8[1].host::<u8>() == expected[1], "values, {shape:?}");
}

#[test]
fn every_op_that_writes_the_cache_rounds_alike() {
    Host::each(|mut host| {
        for (heads, kv_heads, head_dim) in [(4, 2, 128), (3, 1, 64), (2, 2, 256), (2, 1, 80)] {
            let shape = HeadShape { heads, kv_heads, head_dim };
            let tokens = SLOTS.len();
            let norms = [3, 4].map(|seed| host.bf16("norm", &[head_dim], &bf16s(head_dim, seed)));
            let rope = rope_table(&mut host.exec, 64, head_dim, 1e6).unwrap();
            let (positions, slots) = (&host.u32("positions", &POSITIONS), &host.u32("slots", &SLOTS));
            let made = Heads { shape, norms: (&norms[0], &norms[1]), eps: 1e-6, rope: &rope, positions, slots };
            let plain = RopeHeads { shape, rope: &rope, positions, slots };
            let qkv = host.bf16("qkv", &[tokens, shape.qkv_width()], &bf16s(tokens * shape.qkv_width(), 1));
            holds(&mut host, shape, |host, q, cache| qk_norm_rope_write_kv(&mut host.exec, &qkv, &made, q, cache));
            holds(&mut host, shape, |host, q, cache| rope_write_kv(&mut host.exec, &qkv, &plain, q, cache));

            let rope = rope_table(&mut host.exec, 64, 32, 1e7).unwrap();
            let norms = [7, 8].map(|seed| {
                let mut norm = host.zeros("norm", &[head_dim], DType::F32);
                let values = bf16s(head_dim, seed).into_iter().map(bf16::to_f32);
                norm.host_mut::<f32>().iter_mut().zip(values).for_each(|(to, x)| *to = x);
                norm
            });
            let gated = Heads { norms: (&norms[0], &norms[1]), rope: &rope, ..made };
            let width = shape.gated_qkv_width();
            let projected = host.bf16("projected", &[tokens, width], &bf16s(tokens * width, 9));
            holds(&mut host, shape, |host, q, cache| {
                gated_qk_norm_rope_write_kv(&mut host.exec, &projected, &gated, q, cache)
            });
        }
    });
}

#[test]
fn decode_attention_is_a_write_and_attention() {
    Host::each(|mut host| {
        let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 64 };
        let (tokens, lens) = (2, [20, 5]);
        let rope = rope_table(&mut host.exec, 64, shape.head_dim, 1e6).unwrap();
        let width = shape.qkv_width();
        let norms = [3, 4].map(|seed| host.bf16("norm", &[shape.head_dim], &bf16s(shape.head_dim, seed)));
        let [mut k, mut v] = cache(&mut host, shape, KvDType::Fp8);
        let mut tables = host.zeros("block_tables", &[2, 2], DType::U32);
        tables.host_mut::<u32>().copy_from_slice(&[2, 0, 1, 0]);
        let place = |row: usize, t: u32| [[2, 0], [1, 0]][row][t as usize / BLOCK_SIZE] * 16 + t % 16;
        // All tokens except the newest of each row, then these.
        let filled: Vec<(u32, u32)> =
            (0..19).map(|t| (t, place(0, t))).chain((0..4).map(|t| (t, place(1, t)))).collect();
        let newest = [(19, place(0, 19)), (4, place(1, 4))];
        let at = |host: &mut Host, tokens: &[(u32, u32)]| {
            let (positions, slots): (Vec<u32>, Vec<u32>) = tokens.iter().copied().unzip();
            (host.u32("positions", &positions), host.u32("slots", &slots))
        };
        let old = at(&mut host, &filled);
        let new = at(&mut host, &newest);
        let heads =
            Heads { shape, norms: (&norms[0], &norms[1]), eps: 1e-6, rope: &rope, positions: &old.0, slots: &old.1 };
        let qkv = host.bf16("qkv", &[filled.len(), width], &bf16s(filled.len() * width, 1));
        let mut q = host.zeros("q", &[filled.len(), shape.q_width()], DType::Bf16);
        qk_norm_rope_write_kv(&mut host.exec, &qkv, &heads, &mut q, (&mut k, &mut v)).unwrap();
        let batch = AttentionBatch {
            qo_indptr: &host.u32("qo_indptr", &[0, 1, 2]),
            kv_lens: &host.u32("kv_lens", &lens),
            block_tables: &tables,
            load: AttentionLoad::of([(1, 20), (1, 5)]),
        };
        let heads = Heads { positions: &new.0, slots: &new.1, ..heads };
        let qkv = host.bf16("qkv", &[tokens, width], &bf16s(tokens * width, 2));
        let mut scratch = ["q", "fused", "apart"].map(|n| host.zeros(n, &[tokens, shape.q_width()], DType::Bf16));
        let [q, fused, apart] = &mut scratch;
        let exec = &mut host.exec;
        decode_attention(exec, &qkv, &heads, &batch, (&mut k, &mut v), q, &mut *fused).unwrap();
        let written = k.host::<u8>().to_vec();
        qk_norm_rope_write_kv(exec, &qkv, &heads, q, (&mut k, &mut v)).unwrap();
        attention(exec, q, (&k, &v), &batch, shape, 0.125, &mut *apart).unwrap();
        assert_eq!((fused.host::<bf16>(), &written[..]), (apart.host::<bf16>(), k.host::<u8>()));
        assert!(fused.host::<bf16>().iter().all(|x| x.is_finite()));
        // Both caches in one format, of the right shape.
        let bf16 = cache(&mut host, shape, KvDType::Bf16);
        let error = attention(&mut host.exec, q, (&k, &bf16[1]), &batch, shape, 0.125, apart).unwrap_err();
        assert!(error.to_string().contains("expected u8"), "{error}");
    });
}
