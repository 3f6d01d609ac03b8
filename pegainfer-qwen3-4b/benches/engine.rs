//! Benchmark of the executor on the CPU with the shape of Qwen3-0.6B and dummy weights, and of a plain read of as many
//! bytes.
//!
//! `cargo bench -p pegainfer-qwen3-4b`. Divide `decode/1` by `read`: both move the same bytes. `decode fp8` has FP8
//! projections; the embedding, which is also the output projection, stays bf16.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_core::weights::Source;
use pegainfer_kernels::ops::{self, HeadShape, KvDType};
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_qwen3_4b::config::Config;
use pegainfer_runtime::{Bounds, Executor, ModelBytes, Quantization, StepSize, load_weights, uniform};
use rayon::prelude::*;
use std::time::Duration;

const HEADS: HeadShape = HeadShape { heads: 16, kv_heads: 8, head_dim: 128 };

fn qwen3_0_6b() -> Config {
    Config {
        vocab_size: 151_936,
        hidden_size: 1024,
        intermediate_size: 3072,
        moe: None,
        dense_layers: Vec::new(),
        layers: 28,
        shape: HEADS,
        all_heads: HEADS,
        shard: Shard::WHOLE,
        rms_norm_eps: 1e-6,
        rope: 1e6.into(),
        max_position_embeddings: 40_960,
        tie_word_embeddings: true,
        quantization: None,
        kv_dtype: KvDType::Bf16,
        initializer_range: 0.02,
        eos_token_ids: vec![151_645],
    }
}

fn executor(quantization: Option<Quantization>) -> Executor<Qwen3> {
    let config = Config { quantization, ..qwen3_0_6b() };
    let mut exec = Exec::cpu(Isa::best(), None).expect("threads");
    let source = Source::Dummy {
        seed: 1,
        std: config.initializer_range,
        uniform: ops::uniform,
        random_bytes: ops::random_bytes,
    };
    let weights = load_weights::<Qwen3>(&mut exec, &config, &source, &mut |_| {}).expect("dummy weights");
    let size = StepSize { tokens: 512, rows: 32, samples: 32, context: 1024 };
    Executor::on_one(exec, config, weights, &Bounds::exact(size, 32 * 16)).expect("workspace")
}

/// Bytes of the weights.
fn weight_bytes(config: &Config) -> u64 {
    ModelBytes::of::<Qwen3>(config).expect("weights without memory").weights
}

/// Reads every byte once on all threads, as the reference rate of a decode step.
fn read(exec: &mut Exec, data: &Tensor) -> u16 {
    let lines = data.host::<bf16>().as_chunks::<64>().0;
    let sum = |lines: &[[bf16; 64]]| {
        let lanes = lines.iter().fold([0u16; 64], |a, line| std::array::from_fn(|i| a[i] ^ line[i].to_bits()));
        lanes.into_iter().fold(0, |a, b| a ^ b)
    };
    exec.on_host(|| lines.par_chunks(1 << 14).map(sum).reduce(|| 0, |a, b| a ^ b))
}

fn engine(c: &mut Criterion) {
    let mut executor = executor(None);
    let bytes = weight_bytes(executor.config());
    let mut group = c.benchmark_group(format!("qwen3-0.6b/{}", Isa::best()));
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    let data = executor.exec().tensor("read", &[bytes as usize / 2], DType::Bf16).map(|mut data| {
        data.host_mut::<bf16>().fill(bf16::ONE);
        data
    });
    let data = data.expect("memory for the plain read");
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("read", |b| b.iter(|| read(executor.exec(), &data)));
    drop(data);
    for batch in [1, 8, 32] {
        let step = uniform::<Qwen3>(batch, 1, 128);
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(BenchmarkId::new("decode", batch), |b| b.iter(|| executor.run(&step).expect("a step")));
    }
    let step = uniform::<Qwen3>(1, 512, 512);
    // 2 FLOPs for each weight that is not the embedding, and causal attention.
    let config = executor.config();
    let dense = weight_bytes(config) - (2 * config.vocab_size * config.hidden_size) as u64;
    let attention = 4 * (config.layers * config.shape.q_width() * 512 * 513 / 2) as u64;
    group.throughput(Throughput::Elements(dense * 512 + attention));
    group.bench_function(BenchmarkId::new("prefill", 512), |b| b.iter(|| executor.run(&step).expect("a step")));
    group.finish();
}

/// Decode steps with FP8 projections.
fn fp8(c: &mut Criterion) {
    let mut executor = executor(Some(Quantization::every(&[])));
    let mut group = c.benchmark_group(format!("qwen3-0.6b/{}", Isa::best()));
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    group.throughput(Throughput::Bytes(weight_bytes(executor.config())));
    for batch in [1, 8, 32] {
        let step = uniform::<Qwen3>(batch, 1, 128);
        group.bench_function(BenchmarkId::new("decode fp8", batch), |b| {
            b.iter(|| executor.run(&step).expect("a step"));
        });
    }
    group.finish();
}

criterion_group!(benches, engine, fp8);
criterion_main!(benches);
