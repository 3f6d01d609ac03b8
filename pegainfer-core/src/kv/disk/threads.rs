//! I/O by a pool of threads that block in `pread` and `pwrite`: for systems without io_uring.

use super::files::Media;
use super::format::Geometry;
use super::job::{Job, Outcome};
use super::memory::SlotMemory;
use super::queue::Queue;
use std::io::Result;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// Starts `count` threads, or as many as the system allows.
pub(super) fn start<M: SlotMemory>(
    queue: &Arc<Queue<M>>,
    media: &Arc<dyn Media>,
    geometry: Geometry,
    count: usize,
) -> Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    for _ in 0..count.max(1) {
        let (queue, media) = (queue.clone(), media.clone());
        let work = move || {
            while let Some(mut job) = queue.take_or_wait() {
                let begun = Instant::now();
                let result = run(&mut job, &*media, &geometry);
                queue.finish(job, begun, result, false);
            }
        };
        match Builder::new().name("kv-disk".to_owned()).spawn(work) {
            Ok(thread) => threads.push(thread),
            Err(error) if threads.is_empty() => return Err(error),
            Err(_) => break,
        }
    }
    Ok(threads)
}

/// Executes all transfers of a job.
fn run<M: SlotMemory>(job: &mut Job<M>, media: &dyn Media, geometry: &Geometry) -> Result<()> {
    loop {
        let transfer = job.transfer(geometry);
        let (start, len) = (transfer.start, transfer.len);
        let result = if transfer.write {
            // SAFETY: the job owns these initialised bytes, and nobody writes them meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(start, len) };
            media.write_at(transfer.direct, transfer.offset, bytes)
        } else {
            // SAFETY: the job owns these initialised bytes, and nobody else accesses them meanwhile.
            let out = unsafe { std::slice::from_raw_parts_mut(start, len) };
            media.read_at(transfer.direct, transfer.offset, out)
        };
        if let Outcome::Finished(result) = job.advance(geometry, result) {
            return result;
        }
    }
}
