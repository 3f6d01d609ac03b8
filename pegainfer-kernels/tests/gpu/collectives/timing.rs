//! Time of an all-reduce of f32, one a line: ours out of a CUDA graph, NCCL's launched one by one.

use super::ranks::{By, OURS, Rank, run as on_ranks, start};
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_kernels::parallel::TIMEOUT;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

const BYTES: [usize; 8] = [16 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20];

/// Calls in a graph, and replays that are timed.
const CALLS: usize = 50;
const REPLAYS: usize = 20;

pub fn run(count: usize) {
    let mut ranks = start(count, TIMEOUT, true);
    let has_nccl = ranks.first().nccl.is_some();
    for bytes in BYTES {
        for by in OURS.into_iter().skip(1).chain(has_nccl.then_some(By::Nccl)) {
            let what = format!("{bytes} bytes, {by:?}");
            on_ranks(&mut ranks, &what, move |rank: &mut Rank| prepare(rank, by, bytes));
            let (of_first, together) = (Arc::new(Mutex::new(0.0)), Arc::new(Barrier::new(count)));
            let result = of_first.clone();
            on_ranks(&mut ranks, &what, move |rank: &mut Rank| {
                repeat(rank, by, 2, &together)?;
                let seconds = repeat(rank, by, REPLAYS, &together)?;
                if rank.rank == 0 {
                    *result.lock().unwrap() = seconds;
                }
                Ok(())
            });
            let us = *of_first.lock().unwrap() * 1e6;
            println!("{{\"ranks\":{count},\"bytes\":{bytes},\"by\":\"{by:?}\",\"us\":{us:.2}}}");
        }
    }
}

fn calls(rank: &mut Rank, by: By) -> Result<(), OpError> {
    (0..CALLS).try_for_each(|_| rank.all_reduce(by, DType::F32))
}

/// Sums of zeros, which stay finite.
fn prepare(rank: &mut Rank, by: By, bytes: usize) -> Result<(), OpError> {
    rank.exec.fill_rows(&mut rank.x, &vec![0f32; bytes / size_of::<f32>()])?;
    assert_eq!(rank.x.bytes() as usize, bytes);
    rank.graph = None;
    if by == By::Nccl {
        return Ok(());
    }
    rank.exec.begin_capture()?;
    let captured = calls(rank, by);
    rank.graph = Some(rank.exec.end_capture()?);
    captured
}

/// Seconds of one call, on average.
fn repeat(rank: &mut Rank, by: By, times: usize, together: &Barrier) -> Result<f64, OpError> {
    together.wait();
    let start = Instant::now();
    for _ in 0..times {
        let Rank { exec, graph, .. } = &mut *rank;
        match graph {
            Some(graph) => exec.replay(graph)?,
            None => calls(rank, by)?,
        }
    }
    rank.exec.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / (times * CALLS) as f64)
}
