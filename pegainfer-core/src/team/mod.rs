//! The team of threads that runs the parallel loops of CPU kernels.
//!
//! A decode step consists of about two hundred short loops. A pool whose threads sleep between them spends much of the
//! step waking them, so the threads of a team spin for a while before they sleep ([`worker::SPIN`]); an idle team takes
//! no CPU time. Each thread has its own range of the indices of a loop, so that it reads one part of a matrix in memory
//! order, and takes over indices of other threads when it is done. A thread that loses its core delays the loop by at
//! most one index.

mod chunks;
#[cfg(test)]
mod tests;
mod worker;

pub use chunks::{for_each_chunk, for_each_chunk_pair, for_each_range};

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use worker::Shared;

thread_local! {
    /// The team that loops of this thread run on.
    static CURRENT: Cell<Option<Arc<Shared>>> = const { Cell::new(None) };
}

/// Threads that run loops together with the thread that starts the loop.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    /// A team of `threads` threads (at least 1), including the caller of a loop.
    pub fn new(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(threads.max(1)));
        // From here on, an error stops the threads that were started.
        let mut team = Self { shared, threads: Vec::new() };
        for i in 1..threads {
            let shared = team.shared.clone();
            team.threads.push(Builder::new().name(format!("team-{i}")).spawn(move || shared.work(i))?);
        }
        Ok(team)
    }

    /// Number of threads that run a loop.
    pub fn threads(&self) -> usize {
        self.shared.threads()
    }

    /// Runs `f` with this team as the current one.
    pub fn install<R>(&self, f: impl FnOnce() -> R) -> R {
        let _restored = Restored(CURRENT.replace(Some(self.shared.clone())));
        f()
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop(self.threads.iter().map(JoinHandle::thread));
        for thread in self.threads.drain(..) {
            // Panics of tasks were passed to the callers of the loops.
            let _ = thread.join();
        }
    }
}

/// Makes a team the current one again when dropped.
struct Restored(Option<Arc<Shared>>);

impl Drop for Restored {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// Number of threads for a loop of the calling thread: 1 outside of [`Team::install`] and inside a loop.
pub fn threads() -> usize {
    let team = Restored(CURRENT.take());
    team.0.as_ref().map_or(1, |team| team.threads())
}

/// Runs `task(i)` for every `i` in `0..count`, in any order, on the current team. Runs on the calling thread outside of
/// [`Team::install`], inside another loop, or while another thread uses the team.
///
/// # Panics
/// If a task panics, with its payload, after all tasks have ended.
pub fn for_each(count: usize, task: impl Fn(usize) + Sync) {
    if count > 1 {
        // No current team while the loop runs: a nested loop runs in place.
        let team = Restored(CURRENT.take());
        if let Some(shared) = &team.0
            && shared.run(count, &task)
        {
            return;
        }
    }
    (0..count).for_each(task);
}
