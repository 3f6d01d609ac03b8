//! The elementwise ops of one Qwen3-0.6B layer, for a prefill of 512 rows and for one row of decode, on two threads.
//! Throughput counts every byte that an op must read or write.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, HeadShape, Heads};
use std::time::Duration;

const HIDDEN: usize = 1024;
const SHAPE: HeadShape = HeadShape { heads: 16, kv_heads: 8, head_dim: 128 };
const EPS: f32 = 1e-6;

/// A tensor of values in [-4, 4).
fn values(exec: &mut Exec, shape: &[usize]) -> Tensor {
    let mut tensor = exec.tensor("values", shape, DType::Bf16).expect("memory for a tensor");
    for (i, value) in tensor.host_mut::<bf16>().iter_mut().enumerate() {
        *value = bf16::from_f32(((i.wrapping_mul(2_654_435_761) >> 7) & 0xffff) as f32 / 8192.0 - 4.0);
    }
    tensor
}

/// The numbers `0..n`.
fn count(exec: &mut Exec, n: usize) -> Tensor {
    let mut tensor = exec.tensor("count", &[n], DType::U32).expect("memory for a tensor");
    tensor.host_mut::<u32>().iter_mut().zip(0..).for_each(|(to, i)| *to = i);
    tensor
}

/// Times one op the way a step runs it: on a thread of the pool.
struct Bench<'a> {
    c: &'a mut Criterion,
    exec: Exec,
    isa: Isa,
    rows: usize,
}

impl Bench<'_> {
    fn time(&mut self, name: &str, bytes: u64, mut op: impl FnMut(&mut Exec) -> Result<(), OpError> + Send) {
        let Self { c, exec, isa, rows } = self;
        let mut group = c.benchmark_group(name);
        group.sample_size(30).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(500));
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(BenchmarkId::new(isa.name(), *rows), |b| {
            b.iter_custom(|iterations| {
                exec.install(|exec| {
                    let start = std::time::Instant::now();
                    (0..iterations).for_each(|_| op(exec).expect("a correct call"));
                    start.elapsed()
                })
                .expect("the CPU")
            });
        });
        group.finish();
    }
}

fn norms(bench: &mut Bench<'_>) {
    let shape = [bench.rows, HIDDEN];
    let exec = &mut bench.exec;
    let (x, weight) = (values(exec, &shape), values(exec, &[HIDDEN]));
    let mut out = values(exec, &shape);
    let bytes = x.bytes();
    bench.time("rms_norm", 2 * bytes, |exec| ops::rms_norm(exec, &x, &weight, EPS, &mut out));
}

fn qkv(bench: &mut Bench<'_>) {
    let rows = bench.rows;
    let HeadShape { kv_heads, head_dim, .. } = SHAPE;
    let exec = &mut bench.exec;
    let x = values(exec, &[rows, SHAPE.qkv_width()]);
    let norms = (values(exec, &[head_dim]), values(exec, &[head_dim]));
    let rope = ops::rope_table(exec, rows, head_dim, 1e6).expect("memory for a tensor");
    let at = (count(exec, rows), count(exec, rows));
    let mut q = values(exec, &[rows, SHAPE.q_width()]);
    let blocks = rows.div_ceil(16);
    let (mut k, mut v) =
        (values(exec, &[blocks, kv_heads, head_dim, 16]), values(exec, &[blocks, kv_heads, 16, head_dim]));
    bench.time("qk_norm_rope_write_kv", 2 * x.bytes() + rope.bytes(), |exec| {
        let norms = (&norms.0, &norms.1);
        let heads = Heads { shape: SHAPE, norms, eps: EPS, rope: &rope, positions: &at.0, slots: &at.1 };
        ops::qk_norm_rope_write_kv(exec, &x, &heads, &mut q, (&mut k, &mut v))
    });
}

fn elementwise(c: &mut Criterion) {
    for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Amx) {
        for rows in [1, 512] {
            let exec = Exec::cpu(isa, Some(2)).expect("a thread pool");
            let mut bench = Bench { c: &mut *c, exec, isa, rows };
            norms(&mut bench);
            qkv(&mut bench);
        }
    }
}

criterion_group!(benches, elementwise);
criterion_main!(benches);
