//! The threads of the ranks.

use super::communicator::{Communicator, is_aborted};
use crate::tensor::OpError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// A function that every rank runs.
type Job<'a, R> = &'a (dyn Fn(&mut R) -> Result<(), OpError> + Sync);

/// All ranks: rank 0 runs on the owner's thread, every other rank on its own thread, which owns it and lives as long as
/// this value. A rank that fails or panics aborts the exchanges of all, and no job runs after that. Dropping this value
/// joins the threads.
#[derive(Debug)]
pub struct Ranks<R: 'static> {
    first: R,
    others: Vec<RankThread<R>>,
    /// Communicators of all ranks, in rank order.
    communicators: Vec<Arc<dyn Communicator>>,
    /// The first error. The ranks may have stopped at different places, so they cannot continue.
    failure: Option<OpError>,
}

#[derive(Debug)]
struct RankThread<R: 'static> {
    /// Sender of jobs; `None` once the thread is to end.
    jobs: Option<SyncSender<Job<'static, R>>>,
    results: Receiver<Result<(), OpError>>,
    thread: Option<JoinHandle<()>>,
}

impl<R: Send + 'static> Ranks<R> {
    /// Starts the threads of `ranks`, rank 0 first, at least one, each with its end of the communicator.
    pub fn new(ranks: Vec<(R, Arc<dyn Communicator>)>) -> std::io::Result<Self> {
        let (mut states, communicators): (Vec<R>, Vec<_>) = ranks.into_iter().unzip();
        let others = states.split_off(1).into_iter().zip(&communicators[1..]).enumerate();
        let others = others.map(|(i, (state, end))| RankThread::start(i + 1, state, end.clone()));
        let others = others.collect::<std::io::Result<_>>()?;
        let first = states.pop().ok_or_else(|| std::io::Error::other("a model has at least one rank"))?;
        Ok(Self { first, others, communicators, failure: None })
    }

    /// Runs `job` on all ranks at the same time and waits for all of them. The error names the rank that failed first;
    /// every later call returns it again.
    pub fn run(&mut self, job: impl Fn(&mut R) -> Result<(), OpError> + Sync) -> Result<(), OpError> {
        self.check()?;
        let job: Job<'_, R> = &job;
        // SAFETY: extends the lifetime; this function returns after every thread that got the job has sent its result,
        // or has ended, and a thread does not use a job after that. `attempt` catches the panics of rank 0.
        let sent = unsafe { std::mem::transmute::<Job<'_, R>, Job<'static, R>>(job) };
        for other in &self.others {
            // If the thread is gone, the error is reported below.
            let _ = other.jobs.as_ref().map(|jobs| jobs.send(sent));
        }
        let (first, panicked) = attempt(&mut self.first, job);
        if first.is_err() && !self.others.is_empty() {
            self.communicators[0].abort();
        }
        let others = self.others.iter().map(|other| other.results.recv().unwrap_or_else(|_| Err(gone())));
        let results: Vec<_> = std::iter::once(first).chain(others).collect();
        let errors = || results.iter().enumerate().filter_map(|(rank, result)| Some((rank, result.as_ref().err()?)));
        // The other errors only say that a rank has failed.
        let Some((rank, error)) = errors().find(|(_, e)| !is_aborted(e)).or(errors().next()) else { return Ok(()) };
        if results.len() == 1 {
            // An op that refuses its operands leaves a single rank intact.
            self.failure = panicked.then(|| error.clone());
            return Err(error.clone());
        }
        Err(self.fail(rank, error.clone()))
    }

    /// Error if a rank has failed, in a job or on its device since.
    pub fn check(&mut self) -> Result<(), OpError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let errors: Vec<_> = self.communicators.iter().map(|end| end.check().err()).collect();
        let errors = || errors.iter().enumerate().filter_map(|(rank, error)| Some((rank, error.as_ref()?)));
        match errors().find(|(_, e)| !is_aborted(e)).or(errors().next()) {
            Some((rank, error)) => Err(self.fail(rank, error.clone())),
            None => Ok(()),
        }
    }

    /// Stores the error of a rank and stops the others.
    fn fail(&mut self, rank: usize, error: OpError) -> OpError {
        self.communicators.iter().for_each(|end| end.abort());
        let error = OpError { message: format!("rank {rank}: {}", error.message), ..error };
        self.failure.insert(error).clone()
    }

    /// Number of ranks.
    pub fn count(&self) -> usize {
        1 + self.others.len()
    }

    /// Rank 0.
    pub fn first(&self) -> &R {
        &self.first
    }

    /// Rank 0.
    pub fn first_mut(&mut self) -> &mut R {
        &mut self.first
    }
}

impl<R: Send + 'static> RankThread<R> {
    fn start(rank: usize, mut state: R, communicator: Arc<dyn Communicator>) -> std::io::Result<Self> {
        let (jobs, inbox) = sync_channel::<Job<'static, R>>(1);
        let (outbox, results) = sync_channel(1);
        let run = move || {
            while let Ok(job) = inbox.recv() {
                let (result, panicked) = attempt(&mut state, job);
                if result.is_err() {
                    // Other ranks may be waiting for this one.
                    communicator.abort();
                }
                // Nobody receives a result while the ranks are dropped.
                let _ = outbox.send(result);
                if panicked {
                    return;
                }
            }
        };
        let thread = Builder::new().name(format!("rank-{rank}")).spawn(run)?;
        Ok(Self { jobs: Some(jobs), results, thread: Some(thread) })
    }
}

impl<R: 'static> Drop for Ranks<R> {
    fn drop(&mut self) {
        // All at once: a rank may wait for another while it releases its device.
        self.others.iter_mut().for_each(|other| other.jobs = None);
        for thread in self.others.iter_mut().filter_map(|other| other.thread.take()) {
            if thread.join().is_err() {
                log::debug!("the thread of a rank panicked while it ended");
            }
        }
    }
}

/// Result of a job, and true if it panicked.
fn attempt<R>(rank: &mut R, job: Job<'_, R>) -> (Result<(), OpError>, bool) {
    // A rank that panicked is not used again.
    match catch_unwind(AssertUnwindSafe(|| job(rank))) {
        Ok(result) => (result, false),
        Err(panic) => (Err(OpError { op: "rank", message: format!("panicked: {}", message(&*panic)) }), true),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

fn gone() -> OpError {
    OpError { op: "rank", message: "its thread has ended".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Exec;
    use crate::isa::Isa;
    use crate::parallel::Local;
    use crate::tensor::{DType, Tensor};
    use std::sync::mpsc::Sender;
    use std::time::{Duration, Instant};

    struct Rank {
        rank: usize,
        exec: Exec,
        x: Tensor,
        communicator: Arc<dyn Communicator>,
        /// Receives the rank's number when the rank is dropped.
        dropped: Sender<usize>,
    }

    impl Rank {
        fn sum(&mut self, value: f32) -> Result<f32, OpError> {
            self.exec.fill_rows(&mut self.x, &[value])?;
            self.communicator.all_reduce(&mut self.exec, &mut self.x)?;
            Ok(self.x.host::<f32>()[0])
        }
    }

    impl Drop for Rank {
        fn drop(&mut self) {
            // Not every test reads it.
            let _ = self.dropped.send(self.rank);
        }
    }

    fn ranks(count: usize) -> (Ranks<Rank>, Receiver<usize>) {
        with_timeout(count, Duration::from_secs(60))
    }

    fn with_timeout(count: usize, timeout: Duration) -> (Ranks<Rank>, Receiver<usize>) {
        let (dropped, drops) = std::sync::mpsc::channel();
        let rank = |(rank, end): (usize, Local)| {
            let communicator: Arc<dyn Communicator> = Arc::new(end);
            let mut exec = Exec::cpu(Isa::Portable, Some(1)).unwrap();
            let x = exec.tensor("x", &[1, 1], DType::F32).unwrap();
            let state = Rank { rank, exec, x, communicator: communicator.clone(), dropped: dropped.clone() };
            (state, communicator)
        };
        (Ranks::new(Local::with_timeout(count, timeout).into_iter().enumerate().map(rank).collect()).unwrap(), drops)
    }

    #[test]
    fn every_rank_runs_every_job_and_is_dropped() {
        let (mut all, drops) = ranks(4);
        assert_eq!((all.count(), all.first().rank), (4, 0));
        for round in 0..500 {
            all.run(move |rank| {
                assert_eq!(rank.sum((rank.rank + round) as f32)?, (6 + 4 * round) as f32);
                Ok(())
            })
            .unwrap();
        }
        drop(all);
        let mut dropped: Vec<usize> = drops.try_iter().collect();
        dropped.sort_unstable();
        assert_eq!(dropped, [0, 1, 2, 3]);
    }

    /// One rank fails in different ways while the others wait in an exchange.
    #[test]
    fn the_first_error_ends_the_job_of_all_ranks() {
        for (failing, panics) in [(0, false), (0, true), (2, false), (2, true)] {
            let (mut all, drops) = ranks(3);
            let start = Instant::now();
            let error = all.run(move |rank| {
                if rank.rank == failing {
                    assert!(!panics, "out of order");
                    return Err(OpError { op: "norm", message: "bad shape".to_owned() });
                }
                rank.sum(1.0).map(drop)
            });
            let text = error.unwrap_err().to_string();
            let expected = if panics { "panicked: out of order" } else { "bad shape" };
            assert!(text.contains(&format!("rank {failing}: {expected}")), "{text}");
            assert_eq!(all.run(|_| Ok(())).unwrap_err().to_string(), text, "no job is run after a failure");
            drop(all);
            assert_eq!(drops.try_iter().count(), 3);
            assert!(start.elapsed() < Duration::from_secs(20));
        }
    }

    #[test]
    fn a_rank_that_is_late_is_waited_for_and_the_sums_are_right() {
        let (mut all, _drops) = ranks(3);
        for late in 0..3 {
            all.run(move |rank| {
                if rank.rank == late {
                    std::thread::sleep(Duration::from_millis(300));
                }
                assert_eq!(rank.sum(1.0)?, 3.0);
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn a_rank_that_sleeps_beyond_the_timeout_ends_the_job_and_is_named() {
        let (mut all, _drops) = with_timeout(3, Duration::from_millis(100));
        let error = all.run(|rank| {
            if rank.rank == 1 {
                std::thread::sleep(Duration::from_millis(1000));
            }
            rank.sum(1.0).map(drop)
        });
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("all_reduce: rank ") && text.contains("waited 100ms for rank 1"), "{text}");
        assert_eq!(all.run(|_| Ok(())).unwrap_err().to_string(), text, "no job is run after a failure");
    }

    /// The others have ended their job and would never take part.
    #[test]
    fn a_rank_that_launches_one_exchange_more_gives_up() {
        for more in [0, 2] {
            let (mut all, _drops) = with_timeout(3, Duration::from_millis(200));
            let start = Instant::now();
            let error = all.run(move |rank| {
                rank.sum(1.0)?;
                if rank.rank == more { rank.sum(1.0).map(drop) } else { Ok(()) }
            });
            let (text, absent) = (error.unwrap_err().to_string(), if more == 0 { 1 } else { 0 });
            let expected = format!("all_reduce: rank {more}: waited 200ms for rank {absent}, exchange 1");
            assert_eq!(text, expected);
            assert!(start.elapsed() < Duration::from_secs(20));
        }
    }

    #[test]
    fn a_rank_that_is_alone_goes_on_after_an_error() {
        let (mut all, _drops) = ranks(1);
        let refuse = |_: &mut Rank| Err(OpError { op: "norm", message: "bad shape".to_owned() });
        assert_eq!(all.run(refuse).unwrap_err().to_string(), "norm: bad shape");
        all.run(|rank| rank.sum(2.0).map(drop)).unwrap();
        let panic = |_: &mut Rank| panic!("out of order");
        assert!(all.run(panic).unwrap_err().message.contains("out of order"));
        assert!(all.run(|_| Ok(())).is_err());
    }
}
