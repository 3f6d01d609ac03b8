//! Low-rank adapters on a GPU: their difference from the CPU reference as `pegainfer doctor` has it, and their time.
//!
//! Times are of a CUDA graph of one layer's four projections, for the matrices of several layers one after the other, so
//! that they come from memory. Every row has an adapter, in turn.

use super::{CASE, seconds};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::compare::compare;
use pegainfer_kernels::cuda;
use pegainfer_kernels::ops::lora::{AdapterMatrices, add_adapters};
use pegainfer_kernels::ops::uniform;

/// Rows that are compared, and rows that are timed.
const ROWS: [usize; 7] = [1, 2, 8, 33, 128, 129, 700];
const TIMED: [usize; 6] = [1, 8, 32, 128, 512, 4096];
/// Layers of a graph.
const LAYERS: usize = 8;

/// A projection: name, columns of its input, columns of each segment.
type Projection = (&'static str, usize, &'static [usize]);

const SMALL: [Projection; 2] = [("small", 192, &[92, 20, 20]), ("one block", 64, &[64])];
/// Of Qwen3-4B.
const LAYER: [Projection; 4] = [
    ("q, k, v", 2560, &[4096, 1024, 1024]),
    ("o", 4096, &[2560]),
    ("gate, up", 2560, &[9728, 9728]),
    ("down", 9728, &[2560]),
];

struct Operands {
    x: Tensor,
    matrices: AdapterMatrices,
    slots: Tensor,
    out: Tensor,
}

fn operands(exec: &mut Exec, rows: usize, (_, k, segments): Projection, (adapters, rank): (usize, usize)) -> Operands {
    let width = segments.iter().sum::<usize>().next_multiple_of(8);
    let mut tensor = |name: &str, shape: &[usize], dtype| exec.tensor(name, shape, dtype).unwrap();
    Operands {
        x: tensor("x", &[rows, k], DType::Bf16),
        matrices: AdapterMatrices {
            a: tensor("a", &[adapters, segments.len() * rank, k], DType::Bf16),
            b: tensor("b", &[adapters, width, rank], DType::Bf16),
            segments: segments.to_vec(),
        },
        slots: tensor("adapters", &[rows], DType::U32),
        out: tensor("out", &[rows, width], DType::Bf16),
    }
}

fn record(rows: usize, projection: Projection, sizes: (usize, usize)) -> OpRecord {
    let exec = &mut Exec::meta().unwrap();
    let Operands { x, matrices, slots, mut out } = operands(exec, rows, projection, sizes);
    let (done, mut records) = exec.recording(|exec| add_adapters(exec, &x, &matrices, &slots, &mut out));
    done.unwrap();
    records.remove(0)
}

/// Compares and times all projections. Returns whether everything agreed.
pub fn run() -> bool {
    let (mut gpu, mut cpu) = (cuda::open(0, None).unwrap(), Exec::cpu(Isa::best(), None).unwrap());
    let mut good = true;
    for projection in SMALL.into_iter().chain(LAYER) {
        for (rank, rows) in [8, 16, 64].into_iter().flat_map(|rank| ROWS.map(|rows| (rank, rows))) {
            let found = compare(&mut cpu, &mut gpu, &record(rows, projection, (3, rank)), &CASE).unwrap().unwrap();
            let failures = found.failures.join("; ");
            println!("{:<10} rank {rank:<3} {rows:>5} rows {:>9.2e} {failures}", projection.0, found.relative);
            good &= found.ok();
        }
    }
    for (adapters, rank) in [(8, 16), (1, 16), (8, 64)] {
        TIMED.into_iter().for_each(|rows| time(&mut gpu, rows, (adapters, rank)));
    }
    println!("{}", if good { "all agree" } else { "FAILED" });
    good
}

/// Prints the time of a layer's projections, and what reading the adapters once takes of it.
fn time(gpu: &mut Exec, rows: usize, sizes: (usize, usize)) {
    let mut layers: Vec<Operands> =
        (0..LAYERS).flat_map(|_| LAYER).map(|projection| operands(gpu, rows, projection, sizes)).collect();
    let slots: Vec<u32> = (0..rows).map(|row| (row % sizes.0) as u32).collect();
    for Operands { x, matrices, slots: of_rows, .. } in &mut layers {
        for tensor in [x, &mut matrices.a, &mut matrices.b] {
            uniform(gpu, 1, 0.02, tensor).unwrap();
        }
        gpu.fill_rows(of_rows, &slots).unwrap();
    }
    let mut times = [0.0; LAYER.len()];
    for (projection, time) in times.iter_mut().enumerate() {
        let launch = |gpu: &mut Exec| {
            for Operands { x, matrices, slots, out } in layers.iter_mut().skip(projection).step_by(LAYER.len()) {
                add_adapters(gpu, x, matrices, slots, out).unwrap();
            }
        };
        *time = 1e6 * seconds(gpu, launch) / LAYERS as f64;
    }
    let bytes: usize = layers[..LAYER.len()].iter().map(|of| of.matrices.a.bytes() + of.matrices.b.bytes()).sum::<u64>()
        as usize
        / sizes.0
        * sizes.0.min(rows);
    let (all, [qkv, o, gate_up, down]) = (times.iter().sum::<f64>(), times);
    println!(
        "{} adapters of rank {:<3} {rows:>5} rows {all:>8.1} us a layer (q, k, v {qkv:.1}, o {o:.1}, gate and up \
         {gate_up:.1}, down {down:.1}), {:.2} TB/s",
        sizes.0,
        sizes.1,
        bytes as f64 / all / 1e6
    );
}
