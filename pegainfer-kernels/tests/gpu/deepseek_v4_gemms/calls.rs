//! The calls, their comparison and their timing. Arguments of the program name the weights whose GEMMs run, and numbers of tokens.

use super::{data, routed};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::cuda;
use pegainfer_kernels::ops::Matrix;
use pegainfer_kernels::ops::deepseek_v4::{self as ops, ExpertMath, Experts};
use std::time::Instant;

/// Tokens that are timed, and those that are only compared.
const TIMED: [usize; 3] = [256, 1024, 4096];
const COMPARED: [usize; 3] = [131, 1022, 1100];
/// Bytes of the weights that calls take in turn.
const COLD_BYTES: usize = 128 << 20;
/// Calls that are timed, at least.
const CALLS: usize = 50;
const MATH: ExpertMath = ExpertMath { limit: 10.0, quantize: true };

/// One op with one kind of weight.
struct Kind {
    name: &'static str,
    /// Rows and columns of a group's weight; of the shared expert width and hidden size.
    n: usize,
    k: usize,
    groups: usize,
    fp8: bool,
    /// All sums of the first GEMM are exact.
    short: bool,
    /// Of the shared expert: up does not lie behind gate in memory.
    apart: bool,
    out: DType,
    /// What results may differ by, relative to themselves plus their row's root mean square.
    tolerance: f64,
}

impl Kind {
    /// Of the shapes of DeepSeek-V4-Flash on so many ranks.
    fn all(ranks: usize) -> Vec<Self> {
        let (bf16, f32) = (DType::Bf16, DType::F32);
        let kind = |name, (n, k), fp8, out| Self {
            name,
            n,
            k,
            groups: 1,
            fp8,
            short: false,
            apart: false,
            out,
            tolerance: 1.0 / 64.0,
        };
        let mut all = vec![
            kind("wq_b", (64 * 512 / ranks, 1024), true, bf16),
            kind("wo_b", (4096, 8192 / ranks), true, f32),
            Self { groups: 8 / ranks, ..kind("wo_a", (1024, 4096), true, bf16) },
            // As doctor has it: FP8 sums are rounded to bf16 and to FP8.
            Self { tolerance: 1.0 / 8.0, ..kind("shared", (2048 / ranks, 4096), true, bf16) },
            Self { tolerance: 1.0 / 64.0, short: true, ..kind("shared", (2048 / ranks, 4096), true, bf16) },
        ];
        if ranks == 2 {
            all.extend([
                Self { tolerance: 1.0 / 64.0, short: true, apart: true, ..kind("shared", (1024, 4096), true, bf16) },
                kind("wq_a", (1024, 4096), true, bf16),
                kind("wkv", (512, 4096), true, bf16),
                kind("index wq_b", (8192, 1024), true, bf16),
                kind("compress", (1024, 4096), false, f32),
                kind("compress", (512, 4096), false, f32),
                kind("compress", (256, 4096), false, f32),
                kind("gate", (256, 4096), false, f32),
                kind("weights", (64, 4096), false, bf16),
            ]);
        }
        let tolerance = |kind: &Self| match (kind.out, kind.fp8) {
            _ if kind.name == "shared" => kind.tolerance,
            (DType::Bf16, _) => 1.0 / 64.0,
            (_, true) => 1.0 / 256.0,
            _ => 1.0 / 1024.0,
        };
        all.iter_mut().for_each(|kind| kind.tolerance = tolerance(kind));
        all
    }

    fn is_expert(&self) -> bool {
        self.name == "shared"
    }

    fn weights(&self, exec: &mut Exec, seed: u64) -> Vec<Matrix> {
        let Self { n, k, groups, fp8, short, .. } = *self;
        if !self.is_expert() {
            return vec![data::weight(exec, (groups * n, k), fp8, short, seed)];
        }
        let [gate, up] = match self.apart {
            false => data::weight_pair(exec, (n, k), short, seed),
            true => [seed, seed + 3].map(|seed| data::weight(exec, (n, k), fp8, short, seed)),
        };
        vec![gate, up, data::weight(exec, (k, n), fp8, short, seed + 5)]
    }

    fn x(&self, exec: &mut Exec, m: usize) -> Tensor {
        let mut x = data::activations(exec, &[m, self.groups * self.k], self.short, 1);
        if self.fp8 && self.name != "wo_a" {
            ops::round_activation(exec, &mut x).unwrap();
        }
        x
    }

    fn out_width(&self) -> usize {
        if self.is_expert() { self.k } else { self.groups * self.n }
    }

    fn flops(&self, m: usize) -> f64 {
        (if self.is_expert() { 6.0 } else { 2.0 }) * (m * self.groups * self.n * self.k) as f64
    }

    fn call(&self, exec: &mut Exec, x: &Tensor, w: &mut Vec<Matrix>, out: &mut Tensor) {
        if !self.is_expert() {
            return match self.name {
                "wo_a" => ops::grouped_matmul(exec, x, &w[0], out),
                _ => ops::matmul(exec, x, &w[0], out),
            }
            .unwrap();
        }
        let [gate, up, down] = <[Matrix; 3]>::try_from(std::mem::take(w)).unwrap();
        let experts = Experts { gate, up, down, count: 1 };
        ops::shared_expert(exec, x, &experts, MATH, out).unwrap();
        *w = vec![experts.gate, experts.up, experts.down];
    }
}

/// Compares and times the weights and numbers of tokens that are named, all if none is. Returns whether everything agreed.
pub fn run(names: &[String]) -> bool {
    let (mut gpu, mut cpu) = (cuda::open(0, None).unwrap(), Exec::cpu(Isa::best(), None).unwrap());
    println!("{}, cuBLASLt {:?}", gpu.gpu().unwrap().info().unwrap().name, cuda::blaslt(&mut gpu));
    println!(
        "{:<12} {:>5} {:>6} {:>5}  {:<14} {:>8} {:>8} {:>9} {:>9}",
        "weight", "m", "n", "k", "kernel", "first", "us", "TFLOP/s", "error"
    );
    let mut good = true;
    let mut tokens: Vec<usize> = names.iter().filter_map(|name| name.parse().ok()).collect();
    let wanted: Vec<&String> = names.iter().filter(|name| name.parse::<usize>().is_err()).collect();
    if tokens.is_empty() {
        tokens = COMPARED.into_iter().chain(TIMED).collect();
    }
    let is_wanted = |kind: &Kind| wanted.is_empty() || wanted.iter().any(|name| kind.name == *name);
    for ranks in [2, 4] {
        for kind in Kind::all(ranks).into_iter().filter(is_wanted) {
            good &= of_kind(&mut gpu, &mut cpu, &kind, &tokens);
        }
    }
    if wanted.is_empty() || wanted.iter().any(|name| *name == "routed") {
        good &= routed::agrees(&mut gpu, &mut cpu);
        good &= routed::repeats(&mut gpu);
    }
    println!("{}", if good { "all agree" } else { "FAILED" });
    good
}

fn of_kind(gpu: &mut Exec, cpu: &mut Exec, kind: &Kind, tokens: &[usize]) -> bool {
    let bytes = kind.n * kind.k * kind.groups * if kind.fp8 { 1 } else { 2 } * if kind.is_expert() { 3 } else { 1 };
    let copies = COLD_BYTES.div_ceil(bytes).clamp(1, 16);
    let mut weights: Vec<_> = (0..copies).map(|i| kind.weights(gpu, 10 * i as u64)).collect();
    let mut host_weight = kind.weights(cpu, 0);
    let most = tokens.iter().copied().max().unwrap_or(1).next_multiple_of(4);
    let mut x = kind.x(gpu, most);
    let mut out = gpu.tensor("out", &[most, kind.out_width()], kind.out).unwrap();
    let mut good = true;
    for &m in tokens {
        [&mut x, &mut out].into_iter().for_each(|tensor| tensor.set_rows(m));
        gpu.start_recording();
        let start = Instant::now();
        kind.call(gpu, &x, &mut weights[0], &mut out);
        gpu.synchronize().unwrap();
        let first = start.elapsed().as_secs_f64();
        let kernel = gpu.stop_recording()[0].kernel;
        let error = compare(gpu, cpu, kind, (&x, &out), &mut host_weight);
        let us = if !COMPARED.contains(&m) { 1e6 * time(gpu, kind, &x, &mut weights, &mut out) } else { f64::NAN };
        let (tera, verdict) = (kind.flops(m) / us / 1e6, if error <= kind.tolerance { "" } else { "FAILED" });
        let Kind { name, n, k, .. } = kind;
        let (n, first) = (n * kind.groups, 1e6 * first);
        println!(
            "{name:<12} {m:>5} {n:>6} {k:>5}  {kernel:<14} {first:>8.0} {us:>8.1} {tera:>9.1} {error:>9.2e} {verdict}"
        );
        good &= error <= kind.tolerance;
    }
    good
}

/// The largest difference of some rows, relative to a value plus its row's root mean square.
fn compare(gpu: &Exec, cpu: &mut Exec, kind: &Kind, (x, out): (&Tensor, &Tensor), weight: &mut Vec<Matrix>) -> f64 {
    let m = x.rows_cols().0;
    let chosen = [0, 1, 63, m / 2, m - 3, m - 1];
    let mut host = |tensor: &Tensor| {
        let values = data::rows(gpu, tensor, &chosen);
        data::on_host(cpu, &[chosen.len(), tensor.rows_cols().1], tensor.dtype(), &values)
    };
    let (host_x, host_out) = (host(x), host(out));
    let dtype = if kind.is_expert() { kind.out } else { DType::F32 };
    let mut expected = cpu.tensor("expected", &[chosen.len(), kind.out_width()], dtype).unwrap();
    kind.call(cpu, &host_x, weight, &mut expected);
    let every: Vec<usize> = (0..chosen.len()).collect();
    let (got, expected) = (data::rows(cpu, &host_out, &every), data::rows(cpu, &expected, &every));
    let width = kind.out_width();
    got.chunks(width).zip(expected.chunks(width)).map(data::difference).fold(0.0, data::worse)
}

/// Seconds of a call.
fn time(gpu: &mut Exec, kind: &Kind, x: &Tensor, weights: &mut [Vec<Matrix>], out: &mut Tensor) -> f64 {
    gpu.begin_capture().unwrap();
    weights.iter_mut().for_each(|w| kind.call(gpu, x, w, out));
    let graph = gpu.end_capture().unwrap();
    let replays = CALLS.div_ceil(weights.len());
    let mut seconds = 0.0;
    for times in [2, replays] {
        let start = Instant::now();
        (0..times).for_each(|_| gpu.replay(&graph).unwrap());
        gpu.synchronize().unwrap();
        seconds = start.elapsed().as_secs_f64();
    }
    seconds / (replays * weights.len()) as f64
}
