//! GEMMs on the CPU. `gemv` streams a gigabyte of weights per iteration, so that no cache helps, and reads as many
//! bytes plainly for comparison; `gemv fp8` has the same matrices in FP8; `gemm` is one GEMM of prefill size. Set `RAYON_NUM_THREADS` to vary the threads.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pegainfer_core::{isa::Isa, scratch::Scratch, team::Team};
use pegainfer_kernels::cpu::linear::{Activations, LinearOut, linear, linear_stacked};
use pegainfer_kernels::cpu::weights::{BLOCK, Scales, Weights};
use rayon::prelude::*;
use std::{hint::black_box, time::Duration};

/// A team of as many threads as the plain read has.
fn team() -> Team {
    Team::new(rayon::current_num_threads()).expect("threads")
}

/// `len` values of both signs and several magnitudes, filled in parallel (a first touch by the threads that read).
fn values(len: usize) -> Vec<bf16> {
    let value = |i: usize| {
        let hash = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        bf16::from_bits(0x3c00 | (hash as u16 & 0x81ff))
    };
    (0..len).into_par_iter().with_min_len(1 << 20).map(value).collect()
}

/// Decode: `m` rows against a ring of distinct matrices.
fn gemv(c: &mut Criterion) {
    const N: usize = 6144;
    const K: usize = 1024;
    const MATRICES: usize = 84;
    const MOST_ROWS: usize = 32;
    let ring = values(MATRICES * N * K);
    let x = values(MOST_ROWS * K);
    let mut out = vec![bf16::ZERO; MOST_ROWS * N];
    let (team, mut scratch) = (team(), Scratch::new());
    let mut group = c.benchmark_group("gemv");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Bytes(size_of_val(&ring[..]) as u64));
    group.bench_function("plain read", |b| b.iter(|| black_box(plain_read(black_box(&ring)))));
    for isa in Isa::available() {
        let batches: &[usize] = if isa == Isa::Portable { &[1] } else { &[1, 2, 4, 8, 16, 32] };
        for &m in batches {
            group.bench_function(BenchmarkId::new(isa.name(), m), |b| {
                let mut run = || {
                    for w in ring.chunks_exact(N * K) {
                        let out = LinearOut::Bf16(&mut out[..m * N]);
                        linear(isa, black_box(&x[..m * K]), w, m, N, K, out, &mut scratch);
                    }
                };
                b.iter(|| team.install(&mut run));
            });
        }
    }
    group.finish();
}

/// Decode with FP8 weights, half of the bytes of `gemv`.
fn gemv_fp8(c: &mut Criterion) {
    const N: usize = 6144;
    const K: usize = 1024;
    const MATRICES: usize = 84;
    let code = |bits: &bf16| (bits.to_bits() as u8) & 0xf7 | 0x20;
    let ring: Vec<u8> = values(MATRICES * N * K).par_iter().map(code).collect();
    let scales = vec![0.01; N * K / (BLOCK * BLOCK)];
    let x = values(32 * K);
    let mut out = vec![bf16::ZERO; 32 * N];
    let (team, mut scratch) = (team(), Scratch::new());
    let mut group = c.benchmark_group("gemv fp8");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Bytes(ring.len() as u64));
    for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
        for m in [1, 8, 32] {
            group.bench_function(BenchmarkId::new(isa.name(), m), |b| {
                let mut run = || {
                    for w in ring.chunks_exact(N * K) {
                        let out = LinearOut::Bf16(&mut out[..m * N]);
                        let w = [Weights::Fp8(w, Scales::F32(&scales))];
                        linear_stacked(
                            (isa, Activations::Exact),
                            black_box(&x[..m * K]),
                            &w,
                            (m, K),
                            out,
                            &mut scratch,
                        );
                    }
                };
                b.iter(|| team.install(&mut run));
            });
        }
    }
    group.finish();
}

/// Reads every byte once, in parallel, with as little arithmetic as keeps the compiler from dropping the loads.
fn plain_read(data: &[bf16]) -> u64 {
    let sum = |chunk: &[bf16]| {
        // SAFETY: every bit pattern is a u64; the unaligned ends are left out.
        let (_, words, _) = unsafe { chunk.align_to::<[u64; 8]>() };
        words
            .iter()
            .fold([0u64; 8], |sum, line| std::array::from_fn(|i| sum[i] ^ line[i]))
            .into_iter()
            .fold(0, |a, b| a ^ b)
    };
    data.par_chunks(512 << 10).map(sum).reduce(|| 0, |a, b| a ^ b)
}

/// Prefill: 512 rows against projections of Qwen3-0.6B and Qwen3-4B.
fn gemm(c: &mut Criterion) {
    const M: usize = 512;
    let (team, mut scratch) = (team(), Scratch::new());
    let mut group = c.benchmark_group("gemm");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (n, k) in [(6144, 1024), (1024, 3072), (9728, 2560)] {
        let (x, w) = (values(M * k), values(n * k));
        let mut out = vec![bf16::ZERO; M * n];
        group.throughput(Throughput::Elements((2 * M * n * k) as u64));
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
            group.bench_function(BenchmarkId::new(isa.name(), format!("{M}x{n}x{k}")), |b| {
                let mut run = || linear(isa, black_box(&x), &w, M, n, k, LinearOut::Bf16(&mut out), &mut scratch);
                b.iter(|| team.install(&mut run));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, gemv, gemv_fp8, gemm);
criterion_main!(benches);
