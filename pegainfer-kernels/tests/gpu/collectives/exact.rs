//! Every rank gets the exact sums and columns, in bits.

use super::ranks::{By, MOST_BYTES, OURS, Rank, VECTOR, bits, equal, part, run, start, sum, to_bf16};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_kernels::parallel::{TIMEOUT, loop_back as looped};
use std::sync::Arc;

/// Vectors of the messages: one, few, none of whole blocks, and more than a launch holds.
const VECTORS: [usize; 10] = [1, 3, 1024, 1025, 4096, 16_384, 16_391, 65_536, 262_144, 42 << 16];

pub fn sums(count: usize) {
    let mut ranks = start(count, TIMEOUT, true);
    for vectors in VECTORS {
        let expected = Arc::new(sum(count, |rank| part(rank, 4 * vectors)));
        let halves = Arc::new(sum(count, |rank| to_f32(&to_bf16(&part(rank, 8 * vectors)))));
        for by in OURS {
            let (expected, halves) = (expected.clone(), halves.clone());
            run(&mut ranks, format!("{vectors} vectors, {by:?}"), move |rank: &mut Rank| {
                rank.exec.fill_rows(&mut rank.x, &part(rank.rank, 4 * vectors))?;
                rank.exec.fill_rows(&mut rank.half, &to_bf16(&part(rank.rank, 8 * vectors)))?;
                rank.all_reduce(by, DType::F32)?;
                rank.all_reduce(by, DType::Bf16)?;
                equal(&bits(&read(rank)?), &bits(&expected))?;
                equal(&bits(&to_f32(&read_half(rank)?)), &bits(&to_f32(&to_bf16(&halves))))
            });
        }
        let expected = expected.clone();
        run(&mut ranks, format!("{vectors} vectors, NCCL"), move |rank: &mut Rank| {
            if rank.nccl.is_none() {
                return Ok(());
            }
            rank.exec.fill_rows(&mut rank.x, &part(rank.rank, 4 * vectors))?;
            rank.all_reduce(By::Nccl, DType::F32)?;
            let off = read(rank)?.iter().zip(&*expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // Parts are up to 1,024: a rounding of their sum is up to 2.5e-4.
            if off < 4e-3 { Ok(()) } else { Err(OpError { op: "nccl", message: format!("off by {off}") }) }
        });
    }
}

pub fn columns(count: usize) {
    let mut ranks = start(count, TIMEOUT, true);
    // The last ones take several launches.
    for (rows, width) in [(1, 4), (3, 1024), (1, 32_320), (32, 32_320), (300, 32_320)] {
        let what = format!("{rows} rows of {width}");
        run(&mut ranks, &what, move |rank: &mut Rank| {
            let mut tensor = |name, width| rank.exec.tensor(name, &[rows, width], DType::F32);
            let columns = tensor("part", width).and_then(|part| Ok((part, tensor("whole", count * width)?)));
            rank.columns = Some(columns.map_err(|e| OpError { op: "tensor", message: e.to_string() })?);
            Ok(())
        });
        run(&mut ranks, &what, move |rank: &mut Rank| {
            let Rank { exec, peers, nccl, columns: Some((from, whole)), .. } = rank else { panic!("no columns") };
            exec.fill_rows(from, &part(rank.rank, rows * width))?;
            let parts: Vec<_> = (0..count).map(|rank| part(rank, rows * width)).collect();
            let row = |row: usize| parts.iter().flat_map(move |part| &part[row * width..][..width]);
            let expected: Vec<f32> = (0..rows).flat_map(row).copied().collect();
            let mut got = vec![0.0; rows * count * width];
            peers.all_gather(exec, from, whole)?;
            exec.read(whole, 0, &mut got)?;
            equal(&bits(&got), &bits(&expected))?;
            if let Some(nccl) = nccl {
                exec.fill_rows(whole, &vec![0f32; got.len()])?;
                nccl.all_gather(exec, from, whole)?;
                exec.read(whole, 0, &mut got)?;
                equal(&bits(&got), &bits(&expected))?;
            }
            Ok(())
        });
    }
}

/// Of rows that belong to the ranks in turn: sums on their owners, then all of them on every rank.
pub fn rows(count: usize) {
    let mut ranks = start(count, TIMEOUT, true);
    // Vectors of a rank's rows; the last ones take several launches.
    for each in [1, 1024, 1025, (84 << 16) / count] {
        let vectors = each * count;
        let expected = Arc::new(sum(count, |rank| part(rank, 4 * vectors)));
        let halves = Arc::new(sum(count, |rank| to_f32(&to_bf16(&part(rank, 8 * vectors)))));
        run(&mut ranks, format!("{each} vectors of rows"), move |rank: &mut Rank| {
            rank.exec.fill_rows(&mut rank.x, &part(rank.rank, 4 * vectors))?;
            let number = rank.rank;
            let Rank { exec, peers, x, half, .. } = &mut *rank;
            peers.reduce_scatter(exec, x)?;
            peers.all_gather_rows(exec, x)?;
            exec.fill_rows(half, &to_bf16(&part(number, 8 * vectors)))?;
            peers.reduce_scatter(exec, half)?;
            peers.all_gather_rows(exec, half)?;
            let off = |values: &[f32]| values.iter().zip(&*expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let (sums, gathered) = (read(rank)?, read_half(rank)?);
            equal(&bits(&sums), &bits(&expected))?;
            equal(&bits(&to_f32(&gathered)), &bits(&to_f32(&to_bf16(&halves))))?;
            let Rank { exec, x, nccl: Some(nccl), .. } = &mut *rank else { return Ok(()) };
            exec.fill_rows(x, &part(number, 4 * vectors))?;
            nccl.reduce_scatter(exec, x)?;
            nccl.all_gather_rows(exec, x)?;
            let off = off(&read(rank)?);
            if off < 4e-3 { Ok(()) } else { Err(OpError { op: "nccl", message: format!("off by {off}") }) }
        });
    }
}

/// One of many exchanges.
#[derive(Debug, Clone, Copy)]
struct Call {
    by: By,
    dtype: DType,
    vectors: usize,
}

/// Exchanges of random sizes, types and algorithms, the same on every rank.
fn random(seed: u64, exchanges: usize) -> Vec<Call> {
    let exchange = |i: usize| {
        let bits = rng::bits(seed, i as u64);
        // Up to 16, 256, 4,096 or 65,536 vectors.
        let most = 16u64 << (4 * (bits % 4));
        let vectors = 1 + ((bits >> 8) % most) as usize;
        let dtype = if bits >> 60 & 1 == 0 { DType::F32 } else { DType::Bf16 };
        Call { by: OURS[(bits >> 56) as usize % 4], dtype, vectors }
    };
    (0..exchanges).map(exchange).collect()
}

/// What a rank brings to them: small whole numbers times 2^-70, so that all sums are exact as long as they are in range.
fn whole(rank: usize, elements: usize) -> Vec<f32> {
    let value = |i: usize| {
        let bits = rng::bits(rank as u64 + 1, i as u64);
        ((bits >> 40) % 255) as f32 - 127.0
    };
    (0..elements).map(|i| value(i) * 2f32.powi(-70)).collect()
}

/// What rank `rank` holds after `exchanges`. The first sum of an element makes it equal on all ranks; each further one
/// multiplies it by their number, a power of two.
fn after(count: usize, rank: usize, exchanges: &[Call], dtype: DType, elements: usize) -> Vec<f32> {
    let (own, mut sums) = (whole(rank, elements), sum(count, |rank| whole(rank, elements)));
    if dtype == DType::Bf16 {
        sums = to_f32(&to_bf16(&sums));
    }
    let mut times = vec![0; elements];
    for exchange in exchanges.iter().filter(|exchange| exchange.dtype == dtype) {
        times[..exchange.vectors * VECTOR / dtype.size()].iter_mut().for_each(|n| *n += 1);
    }
    let value = |i: usize| if times[i] == 0 { own[i] } else { sums[i] * (count as f32).powi(times[i] - 1) };
    (0..elements).map(value).collect()
}

/// Vectors that are compared after random exchanges.
const COMPARED: usize = 65_536;

fn fill(rank: &mut Rank) -> Result<(), OpError> {
    rank.exec.fill_rows(&mut rank.x, &whole(rank.rank, 4 * COMPARED))?;
    rank.exec.fill_rows(&mut rank.half, &to_bf16(&whole(rank.rank, 8 * COMPARED)))
}

fn launch(rank: &mut Rank, exchanges: &[Call]) -> Result<(), OpError> {
    for exchange in exchanges {
        rank.x.set_rows(exchange.vectors);
        rank.half.set_rows(exchange.vectors);
        rank.all_reduce(exchange.by, exchange.dtype)?;
    }
    rank.x.set_rows(COMPARED);
    rank.half.set_rows(COMPARED);
    Ok(())
}

fn compare(rank: &mut Rank, count: usize, exchanges: &[Call]) -> Result<(), OpError> {
    let expected = after(count, rank.rank, exchanges, DType::F32, 4 * COMPARED);
    equal(&bits(&read(rank)?), &bits(&expected))?;
    let expected = after(count, rank.rank, exchanges, DType::Bf16, 8 * COMPARED);
    equal(&bits(&to_f32(&read_half(rank)?)), &bits(&expected))
}

/// 1,000 exchanges and more, launched without a pause: ranks run ahead of each other.
pub fn queued(count: usize) {
    let mut ranks = start(count, TIMEOUT, false);
    // So many that no element leaves the range of f32: each one multiplies by the number of ranks.
    let at_once = 120 / count.ilog2() as usize;
    for round in 0..1000usize.div_ceil(at_once) {
        run(&mut ranks, format!("round {round}"), move |rank: &mut Rank| {
            let exchanges = random(round as u64, at_once);
            fill(rank)?;
            launch(rank, &exchanges)?;
            compare(rank, count, &exchanges)
        });
    }
}

/// The same out of a CUDA graph.
pub fn replayed(count: usize) {
    let mut ranks = start(count, TIMEOUT, false);
    run(&mut ranks, "captured", move |rank: &mut Rank| {
        rank.exec.begin_capture()?;
        let launched = launch(rank, &random(77, 10));
        rank.graph = Some(rank.exec.end_capture()?);
        launched
    });
    run(&mut ranks, "replayed", move |rank: &mut Rank| {
        let exchanges = random(77, 10);
        fill(rank)?;
        launch(rank, &exchanges)?;
        let Rank { exec, graph: Some(graph), .. } = &mut *rank else { panic!("no graph") };
        (0..3).try_for_each(|_| exec.replay(graph))?;
        launch(rank, &exchanges)?;
        compare(rank, count, &exchanges.repeat(5))
    });
}

/// One rank of four alone.
pub fn loop_back() {
    let mut exec = Exec::cuda(0, Some(2)).unwrap();
    for rank in [0, 3] {
        let end = looped(&mut exec, rank, 4).unwrap();
        for vectors in VECTORS {
            let own = part(rank, 4 * vectors);
            let mut x = exec.tensor("x", &[vectors, 4], DType::F32).unwrap();
            exec.fill_rows(&mut x, &own).unwrap();
            end.all_reduce(&mut exec, &mut x).unwrap();
            let mut got = vec![0.0; 4 * vectors];
            exec.read(&x, 0, &mut got).unwrap();
            // Not 4 v: three times v may be rounded.
            let expected: Vec<f32> = own.iter().map(|v| v + v + v + v).collect();
            equal(&bits(&got), &bits(&expected)).unwrap_or_else(|e| panic!("loop-back, {vectors} vectors: {e}"));
        }
        end.check().unwrap();
        let (mut from, mut whole) =
            (exec.tensor("part", &[3, 8], DType::F32).unwrap(), exec.tensor("whole", &[3, 32], DType::F32).unwrap());
        let mut rows = exec.tensor("rows", &[4, 8], DType::F32).unwrap();
        let own = part(rank, 32);
        exec.fill_rows(&mut rows, &own).unwrap();
        end.reduce_scatter(&mut exec, &mut rows).unwrap();
        end.all_gather_rows(&mut exec, &mut rows).unwrap();
        let mut got = vec![0.0; 32];
        exec.read(&rows, 0, &mut got).unwrap();
        let sums: Vec<f32> = own[8 * rank..][..8].iter().map(|v| v + v + v + v).collect();
        equal(&bits(&got), &bits(&sums.repeat(4))).unwrap();
        let own = part(rank, 24);
        exec.fill_rows(&mut from, &own).unwrap();
        end.all_gather(&mut exec, &from, &mut whole).unwrap();
        let mut got = vec![0.0; 96];
        exec.read(&whole, 0, &mut got).unwrap();
        let expected: Vec<f32> = own.chunks(8).flat_map(|row| row.repeat(4)).collect();
        equal(&bits(&got), &bits(&expected)).unwrap();
    }
    println!("{{\"loop_back\":\"passed\"}}");
}

fn read(rank: &Rank) -> Result<Vec<f32>, OpError> {
    assert!(rank.x.bytes() as usize <= MOST_BYTES);
    let mut values = vec![0.0; rank.x.elements()];
    rank.exec.read(&rank.x, 0, &mut values)?;
    Ok(values)
}

fn read_half(rank: &Rank) -> Result<Vec<bf16>, OpError> {
    let mut values = vec![bf16::ZERO; rank.half.elements()];
    rank.exec.read(&rank.half, 0, &mut values)?;
    Ok(values)
}

fn to_f32(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}
