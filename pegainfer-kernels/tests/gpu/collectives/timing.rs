//! Times of an all-reduce of f32, and of `reduce_add_norm`, fused and in two steps, one a line: ours out of a CUDA graph, NCCL's launched
//! one by one.

use super::add_norm::prepare;
use super::ranks::{By, OURS, Rank, run as on_ranks, start};
use pegainfer_core::parallel::Ranks;
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_kernels::parallel::TIMEOUT;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

const BYTES: [usize; 9] = [16 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 40 << 20];

/// Rows of [`HIDDEN`] of `reduce_add_norm`.
const ROWS: [usize; 10] = [1, 8, 16, 25, 32, 64, 128, 512, 1366, 4096];
const HIDDEN: usize = 5120;

/// Calls in a graph, and replays that are timed.
const CALLS: usize = 50;
const REPLAYS: usize = 20;

/// An op that is timed.
type Timed = Arc<dyn Fn(&mut Rank) -> Result<(), OpError> + Send + Sync>;

pub fn run(count: usize) {
    let mut ranks = start(count, TIMEOUT, true);
    add_norms(&mut ranks, count);
    all_reduces(&mut ranks, count);
}

fn all_reduces(ranks: &mut Ranks<Rank>, count: usize) {
    let has_nccl = ranks.first().nccl.is_some();
    for bytes in BYTES {
        for by in OURS.into_iter().skip(1).chain(has_nccl.then_some(By::Nccl)) {
            let what = format!("{bytes} bytes, {by:?}");
            // Sums of zeros, which stay finite.
            on_ranks(ranks, &what, move |rank: &mut Rank| {
                rank.exec.fill_rows(&mut rank.x, &vec![0f32; bytes / size_of::<f32>()])?;
                rank.exec.synchronize()
            });
            let us =
                time(ranks, &what, by != By::Nccl, Arc::new(move |rank: &mut Rank| rank.all_reduce(by, DType::F32)));
            println!("{{\"ranks\":{count},\"bytes\":{bytes},\"by\":\"{by:?}\",\"us\":{us:.2}}}");
        }
    }
}

fn add_norms(ranks: &mut Ranks<Rank>, count: usize) {
    for rows in ROWS {
        for dtype in [DType::Bf16, DType::E4m3] {
            let what = format!("reduce_add_norm of {rows} rows");
            prepare(ranks, &what, rows, HIDDEN);
            on_ranks(ranks, &what, move |rank: &mut Rank| {
                let out = &mut rank.add_norm.as_mut().unwrap().out;
                out.set_rows(rows);
                out.set_dtype(dtype);
                Ok(())
            });
            let fused = time(ranks, &what, true, Arc::new(|rank: &mut Rank| rank.reduce_add_norm(0)));
            let two = time(ranks, &what, true, Arc::new(|rank: &mut Rank| rank.all_reduce_then_norm(By::Size, 0)));
            println!(
                "{{\"ranks\":{count},\"rows\":{rows},\"out\":\"{dtype}\",\"reduce_add_norm_us\":{fused:.2},\"in_two_steps_us\":{two:.2}}}"
            );
        }
    }
}

/// Microseconds of one call, on average.
fn time(ranks: &mut Ranks<Rank>, what: &str, captured: bool, timed: Timed) -> f64 {
    let (seconds, together) = (Arc::new(Mutex::new(0.0)), Arc::new(Barrier::new(ranks.count())));
    let call = timed.clone();
    on_ranks(ranks, what, move |rank: &mut Rank| {
        rank.graph = None;
        if captured {
            rank.exec.begin_capture()?;
            let calls = (0..CALLS).try_for_each(|_| call(rank));
            rank.graph = Some(rank.exec.end_capture()?);
            calls?;
        }
        Ok(())
    });
    let result = seconds.clone();
    on_ranks(ranks, what, move |rank: &mut Rank| {
        repeat(rank, &timed, 2, &together)?;
        let seconds = repeat(rank, &timed, REPLAYS, &together)?;
        if rank.rank == 0 {
            *result.lock().unwrap() = seconds;
        }
        Ok(())
    });
    *seconds.lock().unwrap() * 1e6
}

/// Seconds of one call, on average.
fn repeat(rank: &mut Rank, timed: &Timed, times: usize, together: &Barrier) -> Result<f64, OpError> {
    together.wait();
    let start = Instant::now();
    for _ in 0..times {
        let Rank { exec, graph, .. } = &mut *rank;
        match graph {
            Some(graph) => exec.replay(graph)?,
            None => (0..CALLS).try_for_each(|_| timed(rank))?,
        }
    }
    rank.exec.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / (times * CALLS) as f64)
}
