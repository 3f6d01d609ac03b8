//! Ranks on the CPU: they exchange through the memory of the process.

use super::communicator::{
    Communicator, aborted, record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_scatter,
    rows_of_rank, to_others,
};
use crate::exec::{Device, Exec};
use crate::tensor::{DType, OpError, Tensor};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Name of the kernel in records.
const KERNEL: &str = "host_memory";

/// Timeout of an exchange. Ranks on a CPU have equal work, and a step is reported as stuck after the same time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A rank on the CPU, or on `Meta`, where nothing is exchanged.
#[derive(Debug)]
pub struct Local {
    rank: usize,
    ranks: usize,
    meeting: Arc<Meeting>,
}

#[derive(Debug)]
struct Meeting {
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Contribution of each rank to the current exchange.
    parts: Vec<Option<Arc<Contribution>>>,
    /// All contributions of the last complete exchange, which some ranks may still have to read.
    complete: Vec<Arc<Contribution>>,
    /// Number of exchanges so far.
    generation: u64,
    aborted: bool,
}

/// A rank's contribution to an exchange.
#[derive(Debug)]
struct Contribution {
    op: &'static str,
    values: Vec<f32>,
}

impl Local {
    /// The ends of `ranks` ranks.
    pub fn new(ranks: usize) -> Vec<Self> {
        Self::with_timeout(ranks, TIMEOUT)
    }

    /// The ends of `ranks` ranks, with a timeout for each exchange.
    pub fn with_timeout(ranks: usize, timeout: Duration) -> Vec<Self> {
        let state = State { parts: vec![None; ranks], complete: Vec::new(), generation: 0, aborted: false };
        let meeting = Arc::new(Meeting { timeout, state: Mutex::new(state), changed: Condvar::new() });
        (0..ranks).map(|rank| Self { rank, ranks, meeting: meeting.clone() }).collect()
    }

    /// Contributes `values` to an exchange by `op`, and waits for the others.
    fn exchange(&self, op: &'static str, values: Vec<f32>) -> Result<Vec<Arc<Contribution>>, OpError> {
        let Meeting { timeout, state, changed } = &*self.meeting;
        let (deadline, elements) = (Instant::now() + *timeout, values.len());
        let mut state = lock(state);
        state.parts[self.rank] = Some(Arc::new(Contribution { op, values }));
        let generation = state.generation;
        if state.parts.iter().all(Option::is_some) {
            let parts = state.parts.iter_mut().filter_map(Option::take).collect();
            state.complete = parts;
            state.generation += 1;
            changed.notify_all();
        }
        // The next exchange cannot complete and replace `complete` before this rank contributes to it.
        while state.generation == generation && !state.aborted {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let peer = state.parts.iter().position(Option::is_none).unwrap_or(self.rank);
                let message = format!("waited {timeout:?} for rank {peer}, exchange {generation}");
                return Err(OpError { op, message });
            }
            state = changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.aborted {
            return Err(aborted());
        }
        // The ranks would not run the same ops.
        match state.complete.iter().find(|part| part.op != op || part.values.len() != elements) {
            Some(part) => {
                let Contribution { op: other, values } = &**part;
                let message =
                    format!("{elements} elements against {other} of {}: the ranks are out of step", values.len());
                Err(OpError { op, message })
            }
            None => Ok(state.complete.clone()),
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A rank that panics leaves the lists as they were.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The given elements of a f32 or bf16 tensor.
fn read(x: &Tensor, elements: Range<usize>) -> Vec<f32> {
    match x.dtype() {
        DType::F32 => x.host::<f32>()[elements].to_vec(),
        _ => x.host::<bf16>()[elements].iter().map(|v| v.to_f32()).collect(),
    }
}

/// Replaces these elements, f32 or bf16, by `value` of their index among them, rounded to the type.
fn write(x: &mut Tensor, elements: Range<usize>, value: impl Fn(usize) -> f32) {
    match x.dtype() {
        DType::F32 => x.host_mut::<f32>()[elements].iter_mut().enumerate().for_each(|(i, v)| *v = value(i)),
        _ => {
            let values = x.host_mut::<bf16>()[elements].iter_mut().enumerate();
            values.for_each(|(i, v)| *v = bf16::from_f32(value(i)));
        }
    }
}

impl Communicator for Local {
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        record_all_reduce(exec, KERNEL, x, self.ranks, to_others(self.ranks, x.bytes()));
        if exec.device() == Device::Meta {
            return Ok(());
        }
        let parts = self.exchange("all_reduce", read(x, 0..x.elements()))?;
        let sum = |i: usize| parts[1..].iter().fold(parts[0].values[i], |sum, part| sum + part.values[i]);
        write(x, 0..x.elements(), sum);
        Ok(())
    }

    fn all_gather(&self, exec: &mut Exec, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError> {
        record_all_gather(exec, KERNEL, part, whole, self.ranks);
        if exec.device() == Device::Meta {
            return Ok(());
        }
        let width = part.rows_cols().1;
        let parts = self.exchange("all_gather", part.host::<f32>().to_vec())?;
        for (i, row) in whole.host_mut::<f32>().chunks_exact_mut(parts.len() * width).enumerate() {
            for (to, part) in row.chunks_exact_mut(width).zip(&parts) {
                to.copy_from_slice(&part.values[i * width..][..width]);
            }
        }
        Ok(())
    }

    fn reduce_scatter(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let op = "reduce_scatter";
        let each = rows_of_rank(op, x, self.ranks)? * x.rows_cols().1;
        record_reduce_scatter(exec, KERNEL, x, self.ranks);
        if exec.device() == Device::Meta {
            return Ok(());
        }
        let parts = self.exchange(op, read(x, 0..x.elements()))?;
        let first = self.rank * each;
        let sum =
            |i: usize| parts[1..].iter().fold(parts[0].values[first + i], |sum, part| sum + part.values[first + i]);
        write(x, first..first + each, sum);
        Ok(())
    }

    fn all_gather_rows(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let op = "all_gather_rows";
        let each = rows_of_rank(op, x, self.ranks)? * x.rows_cols().1;
        record_all_gather_rows(exec, KERNEL, x, self.ranks);
        if exec.device() == Device::Meta {
            return Ok(());
        }
        let parts = self.exchange(op, read(x, self.rank * each..(self.rank + 1) * each))?;
        write(x, 0..x.elements(), |i| parts[i / each].values[i % each]);
        Ok(())
    }

    fn check(&self) -> Result<(), OpError> {
        Ok(())
    }

    fn abort(&self) {
        lock(&self.meeting.state).aborted = true;
        self.meeting.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    fn tensor(exec: &mut Exec, rows: usize, values: &[f32]) -> Tensor {
        let mut tensor = exec.tensor("x", &[rows, values.len() / rows], DType::F32).unwrap();
        exec.fill_rows(&mut tensor, values).unwrap();
        tensor
    }

    fn on_ranks<R: Send>(ranks: usize, f: impl Fn(usize, &Local, &mut Exec) -> R + Sync) -> Vec<R> {
        let ends = Local::new(ranks);
        let run = |(rank, end): (usize, Local)| f(rank, &end, &mut Exec::cpu(Isa::Portable, Some(1)).unwrap());
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = ends.into_iter().enumerate().map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_same_sums_and_columns_many_times() {
        let results = on_ranks(3, |rank, end, exec| {
            let mut all = Vec::new();
            for round in 0..200 {
                let mut x = tensor(exec, 1, &[rank as f32 + 0.1, round as f32]);
                end.all_reduce(exec, &mut x).unwrap();
                let part = tensor(exec, 2, &[rank as f32, 10.0 * round as f32]);
                let mut whole = tensor(exec, 2, &[0.0; 6]);
                end.all_gather(exec, &part, &mut whole).unwrap();
                assert_eq!(whole.host::<f32>()[..3], [0.0, 1.0, 2.0]);
                assert_eq!(whole.host::<f32>()[3..], [10.0 * round as f32; 3]);
                all.extend_from_slice(x.host::<f32>());
                // A different row for each rank.
                let mut rows = tensor(exec, 3, &[rank as f32, 0.5, 10.0 * rank as f32, 1.5, 1.0, round as f32]);
                end.reduce_scatter(exec, &mut rows).unwrap();
                let sums = [[3.0, 1.5], [30.0, 4.5], [3.0, 3.0 * round as f32]];
                assert_eq!(rows.host::<f32>()[2 * rank..][..2], sums[rank]);
                end.all_gather_rows(exec, &mut rows).unwrap();
                assert_eq!(rows.host::<f32>(), sums.as_flattened());
            }
            all
        });
        assert_eq!((results[0][0], results[0][1]), (0.1 + 1.1 + 2.1, 0.0));
        assert!(results.iter().all(|r| *r == results[0]));
    }

    #[test]
    fn rows_that_ranks_cannot_share_equally_are_refused() {
        let results = on_ranks(2, |_, end, exec| {
            let mut x = tensor(exec, 3, &[1.0, 2.0, 3.0]);
            let errors = [end.reduce_scatter(exec, &mut x), end.all_gather_rows(exec, &mut x)];
            errors.map(|result| result.unwrap_err().message.contains("3 rows"))
        });
        assert_eq!(results, [[true; 2]; 2]);
    }

    #[test]
    fn a_rank_that_gives_up_frees_the_others() {
        let results = on_ranks(3, |rank, end, exec| {
            if rank == 1 {
                end.abort();
                return true;
            }
            let mut x = tensor(exec, 1, &[1.0]);
            end.all_reduce(exec, &mut x).unwrap_err().message.contains("another rank")
        });
        assert_eq!(results, [true; 3]);
    }
}
