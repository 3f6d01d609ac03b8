//! Mixtures of experts on a GPU: their difference from the CPU reference as `pegainfer doctor` has it, and their time.
//!
//! Times are of a CUDA graph of calls with other experts each; the rate counts each chosen expert's weights once.

use super::{CASE, seconds};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::compare::compare;
use pegainfer_kernels::cuda;
use pegainfer_kernels::ops::moe::{Experts, RouteSpec, experts, route};
use pegainfer_kernels::ops::{BlockScales, Matrix, random_bytes, uniform};
use std::collections::HashSet;

/// Tokens that are compared with the small layers and with those of real models, and tokens that are timed.
const SMALL: [usize; 6] = [1, 2, 8, 33, 70, 300];
const LARGE: [usize; 6] = [1, 8, 32, 65, 129, 600];
const TIMED: [usize; 7] = [1, 8, 32, 128, 512, 1024, 4096];
/// Calls of a graph.
const CALLS: usize = 8;

/// A layer's experts.
struct Layer {
    name: &'static str,
    spec: RouteSpec,
    hidden: usize,
    width: usize,
    fp8: bool,
}

/// Operands of both ops.
struct Operands {
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    x: Tensor,
    out: Tensor,
    experts: Experts,
}

impl Layer {
    fn all() -> Vec<Self> {
        let shapes = [
            ("small", (16, 4), (256, 128), false),
            ("small+shared", (16, 4), (256, 128), true),
            ("Qwen3-30B-A3B", (128, 8), (2048, 768), false),
            ("Qwen3.5-35B-A3B", (256, 8), (2048, 512), true),
        ];
        let layer = |(name, (experts, chosen), (hidden, width), shared), fp8| {
            let spec = RouteSpec { experts, chosen, normalize: true, shared };
            Self { name, spec, hidden, width, fp8 }
        };
        [false, true].into_iter().flat_map(|fp8| shapes.map(|shape| layer(shape, fp8))).collect()
    }

    fn is_small(&self) -> bool {
        self.hidden < 2048
    }

    fn operands(&self, exec: &mut Exec, tokens: usize) -> Operands {
        let (k, count) = (self.spec.per_token(), self.spec.count());
        let mut tensor = |name: &str, shape: [usize; 2], dtype| exec.tensor(name, &shape, dtype).unwrap();
        let mut matrix = |rows: usize, k: usize| match self.fp8 {
            false => Matrix::Bf16(tensor("w", [rows, k], DType::Bf16)),
            true => Matrix::Fp8 {
                weight: tensor("w", [rows, k], DType::U8),
                scale: BlockScales::F32(tensor("scales", [rows / 128, k / 128], DType::F32)),
            },
        };
        let gate_up = matrix(count * 2 * self.width, self.hidden);
        let experts = Experts { gate_up, down: matrix(count * self.hidden, self.width), count, shared: false };
        Operands {
            logits: tensor("logits", [tokens, self.spec.rows()], DType::F32),
            chosen: tensor("chosen", [tokens, k], DType::U32),
            weights: tensor("weights", [tokens, k], DType::F32),
            x: tensor("x", [tokens, self.hidden], DType::Bf16),
            out: tensor("out", [tokens, self.hidden], DType::Bf16),
            experts,
        }
    }

    /// Records of both ops.
    fn records(&self, tokens: usize) -> Vec<OpRecord> {
        let exec = &mut Exec::meta().unwrap();
        let Operands { logits, mut chosen, mut weights, x, mut out, experts: all } = self.operands(exec, tokens);
        let (done, records) = exec.recording(|exec| {
            route(exec, &logits, self.spec, (&mut chosen, &mut weights))?;
            experts(exec, &x, (&chosen, &weights), &all, &mut out)
        });
        done.unwrap();
        records
    }

    /// The experts of a token in call number `call`, spread over all; the shared one comes last.
    fn choice(&self, call: usize, token: usize) -> impl Iterator<Item = u32> {
        let RouteSpec { experts, chosen, shared, .. } = self.spec;
        let routed = (0..chosen).map(move |i| ((101 * token + 37 * call + 29 * i) % experts) as u32);
        routed.chain(shared.then_some(experts as u32))
    }

    /// The chosen experts of each call, and how many different ones a call has on average.
    fn choices(&self, gpu: &mut Exec, tokens: usize) -> (Vec<Tensor>, usize) {
        let mut different = 0;
        let calls = (0..CALLS).map(|call| {
            let ids: Vec<u32> = (0..tokens).flat_map(|token| self.choice(call, token)).collect();
            different += ids.iter().collect::<HashSet<_>>().len();
            let mut chosen = gpu.tensor("chosen", &[tokens, self.spec.per_token()], DType::U32).unwrap();
            gpu.fill_rows(&mut chosen, &ids).unwrap();
            chosen
        });
        let calls = calls.collect();
        (calls, different / CALLS)
    }
}

/// Compares and times all layers, or those whose names begin with a word. Returns whether everything agreed.
pub fn run(words: &[String]) -> bool {
    let (mut gpu, mut cpu) = (cuda::open(0, None).unwrap(), Exec::cpu(Isa::best(), None).unwrap());
    let mut good = true;
    for layer in Layer::all() {
        if !words.is_empty() && !words.iter().any(|word| layer.name.starts_with(word.as_str())) {
            continue;
        }
        for tokens in if layer.is_small() { SMALL } else { LARGE } {
            good &= layer.records(tokens).iter().all(|record| agrees(&mut gpu, &mut cpu, &layer, record));
        }
        if !layer.is_small() {
            time(&mut gpu, &layer);
        }
    }
    println!("{}", if good { "all agree" } else { "FAILED" });
    good
}

fn agrees(gpu: &mut Exec, cpu: &mut Exec, layer: &Layer, record: &OpRecord) -> bool {
    let found = compare(cpu, gpu, record, &CASE).unwrap().unwrap();
    let (format, failures) = (if layer.fp8 { "FP8" } else { "bf16" }, found.failures.join("; "));
    let (name, op, tokens, kernel) = (layer.name, record.op, record.reads[0].shape[0], found.kernel);
    println!("{name:<16} {format:<4} {op:<8} {tokens:>5} {kernel:<12} {:>9.2e} {failures}", found.relative);
    found.ok()
}

/// Prints the time of `experts`.
fn time(gpu: &mut Exec, layer: &Layer) {
    let most = TIMED[TIMED.len() - 1];
    let Operands { mut weights, mut x, mut out, experts: mut all, .. } = layer.operands(gpu, most);
    uniform(gpu, 1, 1.0, &mut x).unwrap();
    for w in [&mut all.gate_up, &mut all.down] {
        fill(gpu, w);
    }
    gpu.fill_rows(&mut weights, &vec![0.125f32; most * layer.spec.per_token()]).unwrap();
    for tokens in TIMED {
        let (calls, read) = layer.choices(gpu, tokens);
        [&mut weights, &mut x, &mut out].into_iter().for_each(|tensor| tensor.set_rows(tokens));
        let launch = |gpu: &mut Exec| {
            calls.iter().for_each(|chosen| experts(gpu, &x, (chosen, &weights), &all, &mut out).unwrap());
        };
        let seconds = seconds(gpu, launch) / CALLS as f64;
        let size = if layer.fp8 { 1 } else { 2 };
        let bytes = 3 * size * layer.hidden * layer.width * read;
        let flops = 6 * tokens * layer.spec.per_token() * layer.hidden * layer.width;
        let (micros, tera, rate) = (1e6 * seconds, bytes as f64 / seconds / 1e12, flops as f64 / seconds / 1e12);
        println!("{:<16} {tokens:>5} tokens {micros:>9.1} us {tera:>6.2} TB/s {rate:>7.1} TFLOP/s", layer.name);
    }
}

/// Random weights of about the size of trained ones.
fn fill(gpu: &mut Exec, w: &mut Matrix) {
    match w {
        Matrix::Bf16(w) => uniform(gpu, 2, 0.02, w).unwrap(),
        Matrix::Fp8 { weight, scale: BlockScales::F32(scales) } => {
            // No code is NaN.
            random_bytes(gpu, 2, 0xf7, weight).unwrap();
            let values = vec![1e-4f32; scales.elements()];
            gpu.fill_rows(scales, &values).unwrap();
        }
        _ => unreachable!("layers are in bf16 or FP8"),
    }
}
