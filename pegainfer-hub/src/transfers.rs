//! Several downloads at the same time, each on a connection of its own, with one progress.

use super::client::RequestError;
use super::connections::CONNECTIONS;
use pegainfer_terminal::progress::Progress;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// The downloads of a model's files.
pub(super) struct Transfers {
    files: usize,
    shown: Mutex<Shown>,
    /// True once a file has failed: the others stop, and keep what they have.
    stopped: AtomicBool,
}

/// The progress of all files.
struct Shown {
    progress: Progress,
    /// Bytes of each file that are there.
    present: Vec<u64>,
}

impl Transfers {
    /// Downloads of files, of which `present` bytes are there.
    pub(super) fn new(progress: Progress, present: Vec<u64>) -> Self {
        let (files, shown) = (present.len(), Mutex::new(Shown { progress, present }));
        Self { files, shown, stopped: AtomicBool::new(false) }
    }

    /// Shows that `bytes` bytes of file `i` are there.
    ///
    /// # Errors
    /// Another file has failed.
    pub(super) fn report(&self, i: usize, bytes: u64) -> Result<(), RequestError> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.present[i] = bytes;
        let sum = shown.present.iter().sum();
        shown.progress.set(sum);
        if self.stopped.load(Ordering::Relaxed) { Err(RequestError::Stopped) } else { Ok(()) }
    }

    /// Removes the progress.
    pub(super) fn finish(self) {
        self.shown.into_inner().unwrap_or_else(PoisonError::into_inner).progress.finish();
    }

    /// The results of `fetch` for each file, in order, or the first error.
    pub(super) fn run<T: Send, E: Send>(&self, fetch: impl Fn(usize) -> Result<T, E> + Sync) -> Result<Vec<T>, E> {
        let (next, first_error) = (AtomicUsize::new(0), Mutex::new(None));
        let work = || {
            let mut done = Vec::new();
            while !self.stopped.load(Ordering::Relaxed) {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= self.files {
                    break;
                }
                match fetch(i) {
                    Ok(result) => done.push((i, result)),
                    Err(error) => {
                        // Later errors are those of files that were stopped.
                        first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        self.stopped.store(true, Ordering::Relaxed);
                    }
                }
            }
            done
        };
        let mut done: Vec<(usize, T)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..self.files.min(CONNECTIONS)).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        done.sort_by_key(|(i, _)| *i);
        Ok(done.into_iter().map(|(_, result)| result).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_terminal::progress::Unit;
    use std::sync::Barrier;

    fn transfers(files: usize) -> Transfers {
        Transfers::new(Progress::start("test", Unit::Bytes, 0, 100), vec![0; files])
    }

    #[test]
    fn files_are_fetched_at_the_same_time_and_returned_in_order() {
        let together = Barrier::new(CONNECTIONS);
        let all = transfers(2 * CONNECTIONS);
        let fetched = all.run(|i| {
            // Nobody passes before all connections are used.
            together.wait();
            all.report(i, 1).map(|()| i)
        });
        assert_eq!(fetched.unwrap(), (0..2 * CONNECTIONS).collect::<Vec<_>>());
        assert_eq!(all.shown.lock().unwrap().present, vec![1; 2 * CONNECTIONS]);
        all.finish();
    }

    #[test]
    fn the_first_error_stops_the_others_and_is_returned() {
        let all = transfers(CONNECTIONS + 5);
        let fetched: Result<Vec<()>, String> = all.run(|i| {
            if i == 3 {
                return Err("broken".to_owned());
            }
            loop {
                all.report(i, 1).map_err(|error| error.to_string())?;
                thread::yield_now();
            }
        });
        assert_eq!(fetched, Err("broken".to_owned()));
        all.finish();
    }
}
