//! `reduce_add_norm`: on every rank the bits of an all-reduce with the norm after it, which are the CPU's but for the
//! order in which a norm adds squares.

use super::ranks::{By, OURS, Rank, equal, part, run, start, sum, to_bf16};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::parallel::{Communicator, Ranks};
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;
use pegainfer_kernels::parallel::{Algorithm, TIMEOUT, loop_back as looped};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EPS: f32 = 1e-6;

/// Operands of the op on one rank.
pub struct Operands {
    pub partial: Tensor,
    pub residual: Tensor,
    /// In bf16 and in f32.
    pub norms: [Tensor; 2],
    /// `[rows rounded up to 4, hidden]` bf16, or as many bytes in FP8.
    pub out: Tensor,
}

impl Operands {
    pub fn new(exec: &mut Exec, rows: usize, hidden: usize) -> Result<Self, OpError> {
        let mut tensor = |name, shape: &[usize], dtype| {
            exec.tensor(name, shape, dtype).map_err(|e| OpError { op: "tensor", message: e.to_string() })
        };
        Ok(Self {
            partial: tensor("partial", &[rows, hidden], DType::Bf16)?,
            residual: tensor("residual", &[rows, hidden], DType::Bf16)?,
            norms: [tensor("norm", &[hidden], DType::Bf16)?, tensor("norm", &[hidden], DType::F32)?],
            out: tensor("out", &[rows.next_multiple_of(4), hidden], DType::Bf16)?,
        })
    }

    pub fn set_rows(&mut self, rows: usize) {
        [&mut self.partial, &mut self.residual, &mut self.out].into_iter().for_each(|tensor| tensor.set_rows(rows));
    }

    /// Values of the residual, and what is defined of the memory of `out`.
    fn results(&self, exec: &Exec) -> Result<(Vec<bf16>, Vec<u8>), OpError> {
        let Self { residual, out, .. } = self;
        let mut values = vec![bf16::ZERO; residual.elements()];
        exec.read(residual, 0, &mut values)?;
        let (rows, hidden) = out.rows_cols();
        if out.dtype() == DType::Bf16 {
            let mut bytes = vec![0; 2 * rows * hidden];
            exec.read_bytes(out, &mut bytes)?;
            return Ok((values, bytes));
        }
        let padded = rows.next_multiple_of(4);
        let mut bytes = vec![0; padded * (hidden + hidden / 128 * 4)];
        exec.read_bytes(out, &mut bytes)?;
        let scales = bytes[padded * hidden..].chunks(4 * padded).flat_map(|block| &block[..4 * rows]);
        Ok((values, bytes[..rows * hidden].iter().chain(scales).copied().collect()))
    }
}

impl Rank {
    /// The op with the weight in bf16 (0) or f32 (1).
    pub fn reduce_add_norm(&mut self, weight: usize) -> Result<(), OpError> {
        let Self { exec, peers, add_norm: Some(operands), .. } = self else { panic!("no operands") };
        let Operands { partial, residual, norms, out } = operands;
        ops::reduce_add_norm(exec, &**peers, partial, residual, &norms[weight], EPS, out)
    }

    /// The same in two steps.
    pub fn all_reduce_then_norm(&mut self, by: By, weight: usize) -> Result<(), OpError> {
        let Self { exec, peers, add_norm: Some(operands), .. } = self else { panic!("no operands") };
        let Operands { partial, residual, norms, out } = operands;
        match by {
            By::Algorithm(algorithm) => peers.all_reduce_by(algorithm, exec, partial)?,
            _ => peers.all_reduce(exec, partial)?,
        }
        ops::add_rms_norm(exec, partial, residual, &norms[weight], EPS, out)
    }

    fn results(&self) -> Result<(Vec<bf16>, Vec<u8>), OpError> {
        self.add_norm.as_ref().unwrap().results(&self.exec)
    }
}

/// Rows and their width: few and many, one and several a block, more than a launch holds, and too wide to be fused.
const SHAPES: [(usize, usize); 17] = [
    (1, 8),
    (1, 5120),
    (3, 2560),
    (8, 5120),
    (25, 5120),
    (26, 5120),
    (51, 5120),
    (50, 2560),
    (100, 640),
    (100, 5120),
    (128, 4096),
    (129, 5120),
    (300, 640),
    (2, 7168),
    (5, 8192),
    (2100, 5120),
    (4100, 5120),
];

/// Fused and unfused, with weights of both types, in bf16 and FP8.
pub fn exact(count: usize) {
    let mut ranks = start(count, TIMEOUT, false);
    for (rows, hidden) in SHAPES {
        let what = format!("reduce_add_norm of {rows} rows of {hidden}");
        prepare(&mut ranks, &what, rows, hidden);
        let before = to_bf16(&part(100, rows * hidden));
        let parts = |rank| to_bf16(&part(rank, rows * hidden)).iter().map(|v| v.to_f32()).collect();
        let sums = to_bf16(&sum(count, parts));
        for (weight, dtype) in [(0, DType::Bf16), (1, DType::Bf16), (0, DType::E4m3), (1, DType::E4m3)] {
            if dtype == DType::E4m3 && !hidden.is_multiple_of(128) {
                continue;
            }
            let expected = Arc::new(of_cpu(&sums, &before, weight, hidden));
            let (before, of_first) = (before.clone(), Arc::new(Mutex::new(None)));
            run(&mut ranks, format!("{what} in {dtype}, weight {weight}"), move |rank: &mut Rank| {
                refill(rank, &before, dtype)?;
                rank.reduce_add_norm(weight)?;
                let fused = rank.results()?;
                equal(&bits(&fused.0), &bits(&expected.0))?;
                if dtype == DType::Bf16 {
                    near(&fused.1, &expected.1)?;
                }
                refill(rank, &before, dtype)?;
                rank.all_reduce_then_norm(By::Algorithm(Algorithm::TwoShot), weight)?;
                same("fused and unfused differ", &fused, &rank.results()?)?;
                same("ranks differ", of_first.lock().unwrap().get_or_insert_with(|| fused.clone()), &fused)
            });
        }
    }
}

/// Allocates the operands and fills the weights.
pub fn prepare(ranks: &mut Ranks<Rank>, what: &str, rows: usize, hidden: usize) {
    run(ranks, what, move |rank: &mut Rank| {
        rank.graph = None;
        rank.add_norm = None;
        let mut operands = Operands::new(&mut rank.exec, rows, hidden)?;
        let weight = norm(hidden);
        rank.exec.fill_rows(&mut operands.norms[0], &to_bf16(&weight))?;
        rank.exec.fill_rows(&mut operands.norms[1], &weight)?;
        rank.add_norm = Some(operands);
        rank.exec.synchronize()
    });
}

fn norm(hidden: usize) -> Vec<f32> {
    part(200, hidden).iter().map(|v| 1.0 + v / 4096.0).collect()
}

fn refill(rank: &mut Rank, before: &[bf16], dtype: DType) -> Result<(), OpError> {
    let own = to_bf16(&part(rank.rank, before.len()));
    let Rank { exec, add_norm: Some(operands), .. } = rank else { panic!("no operands") };
    exec.fill_rows(&mut operands.partial, &own)?;
    exec.fill_rows(&mut operands.residual, before)?;
    operands.out.set_rows(operands.partial.rows_cols().0);
    operands.out.set_dtype(dtype);
    Ok(())
}

/// Residual and normalised rows of the CPU.
fn of_cpu(sums: &[bf16], before: &[bf16], weight: usize, hidden: usize) -> (Vec<bf16>, Vec<bf16>) {
    let exec = &mut Exec::cpu(Isa::Portable, Some(1)).unwrap();
    let rows = sums.len() / hidden;
    let [mut x, mut residual, mut out] =
        ["x", "residual", "out"].map(|n| exec.tensor(n, &[rows, hidden], DType::Bf16).unwrap());
    exec.fill_rows(&mut x, sums).unwrap();
    exec.fill_rows(&mut residual, before).unwrap();
    let mut norms = [DType::Bf16, DType::F32].map(|dtype| exec.tensor("norm", &[hidden], dtype).unwrap());
    exec.fill_rows(&mut norms[0], &to_bf16(&norm(hidden))).unwrap();
    exec.fill_rows(&mut norms[1], &norm(hidden)).unwrap();
    ops::add_rms_norm(exec, &x, &mut residual, &norms[weight], EPS, &mut out).unwrap();
    (residual.host().to_vec(), out.host().to_vec())
}

fn bits(values: &[bf16]) -> Vec<u32> {
    values.iter().map(|v| v.to_f32().to_bits()).collect()
}

/// Equal but for two roundings: squares are added in another order.
fn near(got: &[u8], expected: &[bf16]) -> Result<(), OpError> {
    let values = got.as_chunks::<2>().0.iter().map(|v| bf16::from_ne_bytes(*v).to_f32());
    let off = |(g, e): (f32, &bf16)| ((g - e.to_f32()).abs() / e.to_f32().abs().max(1e-6), g, *e);
    match values.zip(expected).map(off).find(|(off, ..)| *off > 2.0 / 128.0) {
        None => Ok(()),
        Some((_, g, e)) => Err(OpError { op: "compare", message: format!("{g}, on the CPU {e}") }),
    }
}

fn same(what: &str, a: &(Vec<bf16>, Vec<u8>), b: &(Vec<bf16>, Vec<u8>)) -> Result<(), OpError> {
    let (residual, out) = (bits(&a.0) == bits(&b.0), a.1 == b.1);
    if residual && out {
        return Ok(());
    }
    Err(OpError { op: "compare", message: format!("{what}: residual equal: {residual}, normalised equal: {out}") })
}

/// One of many exchanges.
#[derive(Debug, Clone, Copy)]
enum Call {
    /// The op, of so many rows.
    AddNorm(usize),
    /// A sum of so many vectors.
    AllReduce(By, usize),
}

/// Most rows and vectors of random exchanges. So many rows of [`WIDTHS`] are fused with any number of ranks: what is not
/// would change the parts.
const ROWS: usize = 200;
const WIDTHS: [usize; 2] = [128, 1024];
const VECTORS: usize = 40_000;

/// Exchanges of random kinds and sizes, the same on every rank; the last one is of all rows.
fn random(seed: u64, exchanges: usize) -> Vec<Call> {
    let exchange = |i: usize| {
        let bits = rng::bits(seed, i as u64);
        let size = (bits >> 16) as usize;
        match bits % 4 {
            0 => Call::AllReduce(OURS[(bits >> 8) as usize % 4], 1 + size % VECTORS),
            _ => Call::AddNorm(1 + size % [4, 32, ROWS][(bits >> 8) as usize % 3]),
        }
    };
    (1..exchanges).map(exchange).chain([Call::AddNorm(ROWS)]).collect()
}

/// A rank's part: -1, 0 or 1, so that sums of up to 256 parts are exact.
fn step(rank: usize, i: usize) -> f32 {
    ((((i + rank + 1) * 0x9E37_79B1) >> 16) % 3) as f32 - 1.0
}

fn fill(rank: &mut Rank, hidden: usize) -> Result<(), OpError> {
    let number = rank.rank;
    let Rank { exec, half, add_norm: Some(operands), .. } = rank else { panic!("no operands") };
    exec.fill_rows(half, &vec![bf16::ONE; 8 * VECTORS])?;
    let own: Vec<bf16> = (0..ROWS * hidden).map(|i| bf16::from_f32(step(number, i))).collect();
    exec.fill_rows(&mut operands.partial, &own)?;
    exec.fill_rows(&mut operands.residual, &vec![bf16::ZERO; ROWS * hidden])
}

fn launch(rank: &mut Rank, calls: &[Call]) -> Result<(), OpError> {
    for call in calls {
        match *call {
            Call::AddNorm(rows) => {
                rank.add_norm.as_mut().unwrap().set_rows(rows);
                rank.reduce_add_norm(0)?;
            }
            Call::AllReduce(by, vectors) => {
                rank.half.set_rows(vectors);
                rank.all_reduce(by, DType::Bf16)?;
            }
        }
    }
    rank.half.set_rows(VECTORS);
    Ok(())
}

/// Each row of the residual is as many times the sum of the parts as there were calls of it; each sum multiplies by the
/// number of ranks; the last norm is that of the residual.
fn compare(rank: &mut Rank, count: usize, hidden: usize, calls: &[Call]) -> Result<(), OpError> {
    let (mut times, mut sums) = (vec![0u32; ROWS], vec![1f32; VECTORS]);
    for call in calls {
        match *call {
            Call::AddNorm(rows) => times[..rows].iter_mut().for_each(|n| *n += 1),
            Call::AllReduce(_, vectors) => sums[..vectors].iter_mut().for_each(|v| *v *= count as f32),
        }
    }
    let sum = |i: usize| (0..count).map(|rank| step(rank, i)).sum::<f32>();
    let expected: Vec<u32> = (0..ROWS * hidden).map(|i| (times[i / hidden] as f32 * sum(i) + 0.0).to_bits()).collect();
    let fused = rank.results()?;
    equal(&bits(&fused.0), &expected)?;
    let mut got = vec![bf16::ZERO; 8 * VECTORS];
    rank.exec.read(&rank.half, 0, &mut got)?;
    equal(&bits(&got), &sums.iter().flat_map(|v| [v.to_bits(); 8]).collect::<Vec<_>>())?;
    let Rank { exec, add_norm: Some(operands), .. } = &mut *rank else { panic!("no operands") };
    ops::rms_norm(exec, &operands.residual, &operands.norms[0], EPS, &mut operands.out)?;
    same("normalised rows differ", &fused, &rank.results()?)
}

/// At least so many `exchanges` of random kinds and sizes, launched without a pause: ranks run ahead of each other.
pub fn queued(count: usize, exchanges: usize) {
    let mut ranks = start(count, TIMEOUT, false);
    // Residuals are whole numbers up to 256, and sums powers of two in the range of f32.
    let at_once = 240 / count;
    for hidden in WIDTHS {
        prepare(&mut ranks, "operands", ROWS, hidden);
        for round in 0..(exchanges / 2).div_ceil(at_once) {
            run(&mut ranks, format!("round {round} of rows of {hidden}"), move |rank: &mut Rank| {
                let calls = random(round as u64, at_once);
                fill(rank, hidden)?;
                launch(rank, &calls)?;
                compare(rank, count, hidden, &calls)
            });
        }
    }
}

/// The same out of a CUDA graph.
pub fn replayed(count: usize) {
    let (mut ranks, hidden) = (start(count, TIMEOUT, false), WIDTHS[1]);
    prepare(&mut ranks, "operands", ROWS, hidden);
    run(&mut ranks, "captured", move |rank: &mut Rank| {
        rank.exec.begin_capture()?;
        let launched = launch(rank, &random(77, 10));
        rank.graph = Some(rank.exec.end_capture()?);
        launched
    });
    run(&mut ranks, "replayed", move |rank: &mut Rank| {
        let calls = random(77, 10);
        fill(rank, hidden)?;
        launch(rank, &calls)?;
        let Rank { exec, graph: Some(graph), .. } = &mut *rank else { panic!("no graph") };
        (0..3).try_for_each(|_| exec.replay(graph))?;
        launch(rank, &calls)?;
        compare(rank, count, hidden, &calls.repeat(5))
    });
}

/// One rank of four alone.
pub fn loop_back() {
    let mut exec = Exec::cuda(0, Some(2)).unwrap();
    let end = looped(&mut exec, 1, 4).unwrap();
    for (rows, hidden) in [(3, 5120), (90, 5120), (300, 640)] {
        let mut operands = Operands::new(&mut exec, rows, hidden).unwrap();
        operands.set_rows(rows);
        exec.fill_rows(&mut operands.norms[0], &to_bf16(&norm(hidden))).unwrap();
        let results = [true, false].map(|fused| {
            let Operands { partial, residual, norms, out } = &mut operands;
            exec.fill_rows(partial, &to_bf16(&part(1, rows * hidden))).unwrap();
            exec.fill_rows(residual, &to_bf16(&part(100, rows * hidden))).unwrap();
            if fused {
                assert!(end.reduce_add_norm(&mut exec, partial, residual, &norms[0], EPS, out).unwrap());
            } else {
                end.all_reduce(&mut exec, partial).unwrap();
                ops::add_rms_norm(&mut exec, partial, residual, &norms[0], EPS, out).unwrap();
            }
            operands.results(&exec).unwrap()
        });
        end.check().unwrap();
        same("loop-back", &results[0], &results[1]).unwrap();
    }
}

/// The last rank never launches: the others give up when their time is over, and say at which exchange.
pub fn absent(count: usize) {
    let timeout = Duration::from_millis(500);
    for rows in [4, ROWS] {
        let mut ranks = start(count, timeout, false);
        prepare(&mut ranks, "operands", rows, WIDTHS[1]);
        let start = Instant::now();
        run(&mut ranks, "absent", move |rank: &mut Rank| {
            if rank.rank + 1 < count {
                (0..200).try_for_each(|_| rank.reduce_add_norm(0))?;
            }
            rank.exec.synchronize()
        });
        let (elapsed, error) = (start.elapsed(), ranks.check().unwrap_err().to_string());
        let message = format!("waited 500ms for rank {}, exchange 0", count - 1);
        assert!(error.contains("reduce_add_norm") && error.contains(&message), "{error}");
        assert!(elapsed > timeout && elapsed < 5 * timeout, "{count} ranks gave up after {elapsed:?}");
    }
}
