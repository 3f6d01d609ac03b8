//! Ranks that are late, do not come, or give up.

use super::ranks::{By, OURS, Rank, bits, equal, part, run, start, sum};
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_kernels::parallel::{Algorithm, TIMEOUT};
use std::time::{Duration, Instant};

/// A sum with a rank that launches it a second later than the others.
pub fn late(count: usize) {
    let mut ranks = start(count, TIMEOUT, false);
    for by in OURS {
        run(&mut ranks, format!("late, {by:?}"), move |rank: &mut Rank| {
            rank.exec.fill_rows(&mut rank.x, &part(rank.rank, 4096))?;
            if rank.rank == 1 {
                std::thread::sleep(Duration::from_secs(1));
            }
            rank.all_reduce(by, DType::F32)?;
            let mut got = vec![0.0; 4096];
            rank.exec.read(&rank.x, 0, &mut got)?;
            equal(&bits(&got), &bits(&sum(count, |rank| part(rank, 4096))))
        });
    }
}

/// The last rank never launches: the others give up when their time is over, say for whom they waited, and what they have
/// queued behind ends soon.
pub fn absent(count: usize) {
    let timeout = Duration::from_millis(500);
    for algorithm in [Algorithm::LowLatency, Algorithm::OneShot, Algorithm::TwoShot] {
        let mut ranks = start(count, timeout, false);
        let start = Instant::now();
        run(&mut ranks, "absent", move |rank: &mut Rank| {
            rank.x.set_rows(1024);
            if rank.rank + 1 == count {
                return Ok(());
            }
            (0..200).try_for_each(|_| rank.all_reduce(By::Algorithm(algorithm), DType::F32))?;
            rank.exec.synchronize()
        });
        let (elapsed, error) = (start.elapsed(), ranks.check().unwrap_err().to_string());
        assert!(error.contains(&format!("waited 500ms for rank {}", count - 1)), "{error}");
        assert!(elapsed > timeout && elapsed < 5 * timeout, "{count} ranks gave up after {elapsed:?}");
    }
}

/// A rank that fails frees the others long before their time is over.
pub fn aborted(count: usize) {
    let mut ranks = start(count, TIMEOUT, false);
    let start = Instant::now();
    let job = move |rank: &mut Rank| {
        rank.exec.gpu()?.bind()?;
        rank.x.set_rows(1024);
        if rank.rank == 1 {
            return Err(OpError { op: "experts", message: "out of order".to_owned() });
        }
        rank.all_reduce(By::Size, DType::F32)?;
        rank.exec.synchronize()?;
        rank.peers.check()
    };
    let error = ranks.run(job).unwrap_err().to_string();
    assert_eq!(error, "experts: rank 1: out of order");
    assert!(start.elapsed() < Duration::from_secs(5), "the others waited {:?}", start.elapsed());
}
