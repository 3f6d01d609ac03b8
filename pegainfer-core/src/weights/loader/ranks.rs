//! Loads the weights of all ranks at the same time, with a thread for each, and reads what several ranks need once.

#[cfg(test)]
mod tests;

use super::request::Request;
use super::shared::{Reads, SharedReads};
use super::{Loader, Source};
use crate::exec::Exec;
use crate::parallel::aborted;
use crate::weights::error::WeightsError;
use crate::weights::feed::{Feed, FeedLimits, StopOnPanic};
use std::io;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{ScopedJoinHandle, scope};

/// Number of threads that read for several ranks: one copies about 5 GB/s from the page cache, and a disk needs several
/// reads at once.
const READERS: usize = 8;

impl Loader<'_> {
    /// Loads the weights of all ranks, each onto its device; on return, they are there. `load(loader, rank)` requests
    /// the tensors of a rank. Several ranks request them twice, in the same order: first on `Meta`, where the loader
    /// notes which rows of a checkpoint are needed by more than one of them, so that these are read once. Tensors that
    /// are converted or quantised while they are loaded are read by each rank. `progress` is called with the size in
    /// bytes of each loaded chunk. The first rank that fails ends the load of all.
    pub fn run_ranks<R: Send>(
        ranks: Vec<&mut Exec>,
        source: &Source,
        progress: &mut (dyn FnMut(u64) + Send),
        load: impl Fn(&mut Loader<'_>, usize) -> Result<R, WeightsError> + Sync,
    ) -> Result<Vec<R>, WeightsError> {
        let count = match source {
            Source::Checkpoint(_) if ranks.len() > 1 => ranks.len(),
            _ => 0,
        };
        let shapes = (0..count).map(|_| Ok((Exec::meta()?, ignore as fn(u64)))).collect::<io::Result<Vec<_>>>();
        let mut shapes = shapes.map_err(|error| WeightsError::OutOfMemory {
            name: "the list of tensors".to_owned(),
            bytes: 0,
            error,
        })?;
        let requests = requests(&mut shapes, source, &load)?;
        let shared = (count > 0).then(|| SharedReads::new(&requests, FeedLimits::DEFAULT));
        run_from(shared.as_ref(), ranks, source, progress, load)
    }
}

/// A rank on `Meta`, and the progress of its load.
type Shapes = (Exec, fn(u64));

/// Progress of a load that loads nothing.
fn ignore(_: u64) {}

/// The requests of each rank, one for each of `shapes`, which are on `Meta`.
fn requests<'a, R>(
    shapes: &'a mut [Shapes],
    source: &'a Source,
    load: impl Fn(&mut Loader<'_>, usize) -> Result<R, WeightsError> + Sync,
) -> Result<Vec<Vec<Request<'a>>>, WeightsError> {
    let list = |rank: usize, (exec, ignore): &'a mut Shapes| {
        let mut loader = Loader::new(exec, source, ignore, Reads::Listed(Vec::new()));
        load(&mut loader, rank)?;
        Ok(loader.into_requests())
    };
    let list = &list;
    scope(|scope| {
        let shapes = shapes.iter_mut().enumerate();
        let threads: Vec<_> = shapes.map(|(rank, shape)| scope.spawn(move || list(rank, shape))).collect();
        threads.into_iter().map(join).collect()
    })
}

/// Loads the weights of all ranks; what is `shared` comes from the feed.
fn run_from<R: Send>(
    shared: Option<&SharedReads<'_>>,
    ranks: Vec<&mut Exec>,
    source: &Source,
    progress: &mut (dyn FnMut(u64) + Send),
    load: impl Fn(&mut Loader<'_>, usize) -> Result<R, WeightsError> + Sync,
) -> Result<Vec<R>, WeightsError> {
    let (progress, feed) = (Mutex::new(progress), shared.map(|shared| &shared.feed));
    let load = |exec: &mut Exec, rank: usize| {
        let _guard = feed.map(StopOnPanic);
        let mut progress = |bytes| {
            // A poisoned lock only means that the callback panicked on another thread.
            let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
            progress(bytes);
        };
        let reads = shared.map_or(Reads::Direct, |shared| shared.rank(rank));
        let loaded = Loader::run_with(exec, source, &mut progress, reads, |loader| load(loader, rank));
        let loaded = loaded.and_then(|loaded| exec.synchronize().map(|()| loaded).map_err(WeightsError::from));
        match (loaded, feed) {
            (Err(error), Some(feed)) => {
                feed.fail(error);
                Err(WeightsError::Device(aborted()))
            }
            (loaded, _) => loaded,
        }
    };
    let load = &load;
    let loaded: Vec<Result<R, WeightsError>> = scope(|scope| {
        // Before any thread waits for one that could not be started.
        let _guard = feed.map(StopOnPanic);
        let readers = if feed.is_none_or(Feed::is_empty) { 0 } else { READERS };
        for feed in std::iter::repeat_n(feed, readers).flatten() {
            scope.spawn(|| feed.read());
        }
        let ranks = ranks.into_iter().enumerate();
        let threads: Vec<_> = ranks.map(|(rank, exec)| scope.spawn(move || load(exec, rank))).collect();
        threads.into_iter().map(join).collect()
    });
    match feed.and_then(Feed::take_failure) {
        Some(error) => Err(error),
        None => loaded.into_iter().collect(),
    }
}

/// The result of a thread; panics if it has panicked.
fn join<R>(thread: ScopedJoinHandle<'_, R>) -> R {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}
