use half::bf16;
use pegainfer_core::team::Team;
use rayon::prelude::*;

use super::*;
use crate::cpu::formats::e4m3;
use crate::cpu::kv_cache::{KvWriter, quantize};
use crate::heads::KvDType;
use pegainfer_core::exec::Exec;
use pegainfer_core::rng::bits;

/// A seeded stream of small numbers.
struct Rng(u64, u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.1 += 1;
        bits(self.0, self.1)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn value(&mut self) -> bf16 {
        bf16::from_f64((self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    }
}

/// Keys, values and queries of whole sequences, all `[position][head][dim]`, independent of paging.
struct Sequence {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    len: usize,
}

fn sequence(shape: &HeadShape, len: usize, rng: &mut Rng) -> Sequence {
    let mut values = |heads: usize| (0..len * heads * shape.head_dim).map(|_| rng.value()).collect::<Vec<_>>();
    // Queries four times as large as the keys make the softmax peaked enough to see a wrong weight.
    let q = values(shape.heads).iter().map(|x| bf16::from_f32(x.to_f32() * 4.0)).collect();
    Sequence { q, k: values(shape.kv_heads), v: values(shape.kv_heads), len }
}

/// Keys or values as a cache of this format stores them, `[position][kv_head][dim]`.
fn cached(format: KvDType, shape: &HeadShape, values: &[bf16]) -> Vec<f64> {
    if format == KvDType::Bf16 {
        return values.iter().map(|x| x.to_f64()).collect();
    }
    let mut codes = vec![0; shape.head_dim];
    let rows = values.chunks_exact(shape.head_dim).map(|row| {
        let scale = f64::from(quantize(row, &mut codes));
        codes.iter().map(|code| f64::from(e4m3(*code)) * scale).collect::<Vec<_>>()
    });
    rows.flatten().collect()
}

/// Attention of the rows from `first` on in f64, straight from the formula: `[rows, heads * head_dim]`.
fn reference(format: KvDType, shape: &HeadShape, s: &Sequence, (first, rows): (usize, usize), scale: f64) -> Vec<f64> {
    let q: Vec<f64> = s.q.iter().map(|x| x.to_f64()).collect();
    let (k, v) = (cached(format, shape, &s.k), cached(format, shape, &s.v));
    let row = |t| reference_row(shape, (&q, &k, &v), t, scale);
    (first..first + rows).into_par_iter().flat_map_iter(row).collect()
}

/// One row of the reference.
fn reference_row(shape: &HeadShape, (q, k, v): (&[f64], &[f64], &[f64]), position: usize, scale: f64) -> Vec<f64> {
    let d = shape.head_dim;
    let at = |x: &[f64], heads: usize, t: usize, h: usize, i: usize| x[(t * heads + h) * d + i];
    let mut out = vec![0.0; shape.heads * d];
    for h in 0..shape.heads {
        let g = h / shape.group();
        let dot = |t| (0..d).map(|i| at(q, shape.heads, position, h, i) * at(k, shape.kv_heads, t, g, i)).sum();
        let scores: Vec<f64> = (0..=position).map(|t| scale * std::convert::identity::<f64>(dot(t))).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
        for i in 0..d {
            let weighted = |t: usize| (scores[t] - max).exp() * at(v, shape.kv_heads, t, g, i);
            out[h * d + i] = (0..=position).map(weighted).sum::<f64>() / sum;
        }
    }
    out
}

/// Runs one call over `chunks` of `(sequence, first position, rows)` with a freshly shuffled, NaN-filled cache that
/// holds just the positions each chunk may see, and returns the rows in order.
fn attend(
    (isa, format): (Isa, KvDType),
    shape: &HeadShape,
    chunks: &[(&Sequence, usize, usize)],
    rng: &mut Rng,
) -> Vec<bf16> {
    let max_blocks = chunks.iter().map(|(_, first, rows)| (first + rows).div_ceil(BLOCK_SIZE)).max().unwrap() + 1;
    let blocks = chunks.len() * max_blocks + 3;
    let mut ids: Vec<u32> = (0..blocks as u32).collect();
    for i in (1..blocks).rev() {
        ids.swap(i, rng.below(i + 1));
    }
    // Bytes of 255 are NaN in both formats, also in scales.
    let mut exec = Exec::cpu(isa, Some(1)).unwrap();
    let [mut k, mut v] = shape.cache(exec.device(), format, blocks).map(|shape| {
        let mut tensor = exec.tensor("kv", &shape, format.dtype()).unwrap();
        match format {
            KvDType::Bf16 => tensor.host_mut::<bf16>().fill(bf16::from_bits(u16::MAX)),
            KvDType::Fp8 => tensor.host_mut::<u8>().fill(u8::MAX),
        }
        tensor
    });
    let writer = KvWriter::of((&mut k, &mut v));
    let (mut q, mut indptr, mut lens) = (Vec::new(), vec![0], Vec::new());
    let mut tables = vec![u32::MAX; chunks.len() * max_blocks];
    for (b, (s, first, rows)) in chunks.iter().enumerate() {
        let end = first + rows;
        for i in 0..end.div_ceil(BLOCK_SIZE) {
            tables[b * max_blocks + i] = ids[b * max_blocks + i];
        }
        for t in 0..end {
            let slot = tables[b * max_blocks + t / BLOCK_SIZE] as usize * BLOCK_SIZE + t % BLOCK_SIZE;
            for h in 0..shape.kv_heads {
                let head = (t * shape.kv_heads + h) * shape.head_dim..(t * shape.kv_heads + h + 1) * shape.head_dim;
                // SAFETY: this is the only thread.
                unsafe { writer.write(*shape, slot, h, &s.k[head.clone()], &s.v[head]) };
            }
        }
        let row = shape.heads * shape.head_dim;
        q.extend_from_slice(&s.q[first * row..end * row]);
        indptr.push(indptr[b] + *rows as u32);
        lens.push(end as u32);
    }
    let mut out = vec![bf16::NAN; q.len()];
    let scale = (shape.head_dim as f32).powf(-0.5);
    let batch = PagedBatch { qo_indptr: &indptr, kv_lens: &lens, block_tables: &tables, max_blocks };
    // Contents of the scratch from an earlier use must not matter.
    let mut scratch = Scratch::new();
    scratch.slice::<f32>(1 << 17).fill(f32::NAN);
    paged_attention(isa, *shape, &q, KvCache::of((&k, &v)), &batch, scale, &mut scratch, &mut out);
    out
}

fn bytes(x: &[bf16]) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

const FORMATS: [KvDType; 2] = [KvDType::Bf16, KvDType::Fp8];

/// Every instruction-set path with every format.
fn paths() -> impl Iterator<Item = (Isa, KvDType)> {
    Isa::available().into_iter().flat_map(|isa| FORMATS.map(|format| (isa, format)))
}

fn shapes() -> Vec<HeadShape> {
    [(2, 2, 64), (4, 2, 128), (8, 2, 256), (5, 1, 128), (16, 2, 64), (6, 2, 80), (3, 1, 128)]
        .into_iter()
        .map(|(heads, kv_heads, head_dim)| HeadShape { heads, kv_heads, head_dim })
        .collect()
}

#[test]
fn a_ragged_batch_matches_the_f64_reference() {
    for (i, shape) in shapes().iter().enumerate() {
        let mut rng = Rng(i as u64, 0);
        let scale = (shape.head_dim as f64).powf(-0.5);
        let sequences: Vec<_> =
            [1, 15, 16, 17, 63, 64, 65, 150, 201].iter().map(|&len| sequence(shape, len, &mut rng)).collect();
        // Prefill from zero, prefill continued, decode, and a sequence without rows, all in one call.
        let chunks: Vec<_> = sequences
            .iter()
            .enumerate()
            .map(|(j, s)| {
                let rows = [s.len, 1, 1 + rng.below(s.len), 0][(i + j) % 4];
                (s, s.len - rows, rows)
            })
            .collect();
        for format in FORMATS {
            let of = |(s, first, rows): &(&Sequence, usize, usize)| reference(format, shape, s, (*first, *rows), scale);
            let expected: Vec<f64> = chunks.iter().flat_map(of).collect();
            for isa in Isa::available() {
                let out = attend((isa, format), shape, &chunks, &mut rng);
                assert_eq!(out.len(), expected.len());
                for (at, (got, want)) in out.iter().zip(&expected).enumerate() {
                    // Half a unit in the last place of bf16 (8 bits), plus the error of f32 sums of a few hundred
                    // terms.
                    let bound = want.abs() / 256.0 + 2e-6;
                    let case = || format!("{shape:?} {isa:?} {format:?} [{at}] {got} {want}");
                    assert!((got.to_f64() - want).abs() <= bound, "{}", case());
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_chunks_batch_paging_or_threads() {
    let teams = [1, 2].map(|n| Team::new(n).unwrap());
    for (i, shape) in shapes().iter().enumerate() {
        let mut rng = Rng(100 + i as u64, 0);
        let s = sequence(shape, 300, &mut rng);
        let others = [sequence(shape, 77, &mut rng), sequence(shape, 130, &mut rng)];
        let row = shape.heads * shape.head_dim;
        for isa in paths() {
            let whole = bytes(&attend(isa, shape, &[(&s, 0, s.len)], &mut rng));
            let mut first = 0;
            while first < s.len {
                let rows = (1 + rng.below(90)).min(s.len - first);
                let team = &teams[rng.below(2)];
                let part = team.install(|| attend(isa, shape, &[(&s, first, rows)], &mut rng));
                assert_eq!(bytes(&part), whole[first * row..(first + rows) * row], "{shape:?} {isa:?} {first} {rows}");
                first += rows;
            }
            for position in (0..s.len).filter(|_| rng.below(8) == 0).collect::<Vec<_>>() {
                let chunks = [(&others[0], 0, 77), (&s, position, 1), (&others[1], 129, 1)];
                let team = &teams[rng.below(2)];
                let batch = team.install(|| attend(isa, shape, &chunks, &mut rng));
                let got = bytes(&batch[77 * row..78 * row]);
                assert_eq!(got, whole[position * row..(position + 1) * row], "{shape:?} {isa:?} {position}");
            }
        }
    }
}

#[test]
fn a_token_that_is_not_finite_harms_only_those_who_see_it() {
    let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 64 };
    let row = shape.heads * shape.head_dim;
    let mut rng = Rng(7, 0);
    let mut s = sequence(&shape, 100, &mut rng);
    for isa in paths() {
        let clean = bytes(&attend(isa, &shape, &[(&s, 0, 100)], &mut rng));
        for bad in [bf16::NAN, bf16::INFINITY] {
            let kv = 70 * shape.kv_heads * shape.head_dim..71 * shape.kv_heads * shape.head_dim;
            let saved = s.v[kv.clone()].to_vec();
            s.v[kv.clone()].fill(bad);
            let out = attend(isa, &shape, &[(&s, 0, 100)], &mut rng);
            assert_eq!(bytes(&out[..70 * row]), clean[..70 * row]);
            assert!(out[70 * row..].iter().all(|x| !x.is_finite()));
            s.v[kv].copy_from_slice(&saved);
        }
    }
}

#[test]
fn nothing_to_do_is_fine() {
    let shape = HeadShape { heads: 2, kv_heads: 1, head_dim: 64 };
    let mut scratch = Scratch::new();
    let mut batch = PagedBatch { qo_indptr: &[0], kv_lens: &[], block_tables: &[], max_blocks: 0 };
    paged_attention(Isa::Portable, shape, &[], KvCache::Bf16(&[], &[]), &batch, 1.0, &mut scratch, &mut []);
    batch = PagedBatch { qo_indptr: &[0, 0], kv_lens: &[0], block_tables: &[0], max_blocks: 1 };
    paged_attention(Isa::Portable, shape, &[], KvCache::Bf16(&[], &[]), &batch, 1.0, &mut scratch, &mut []);
}
