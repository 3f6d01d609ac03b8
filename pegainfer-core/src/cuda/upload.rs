//! Uploads many tensors to the device: several upload workers fill pinned staging buffers while the copy engine empties
//! them.

use super::memory::DeviceBuffer;
use super::staging::Staging;
use super::{Cuda, error};
use crate::tensor::OpError;
use cudarc::driver::{CudaStream, DriverError, result};
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of upload workers. One worker reads about 5 GB/s from the page cache; the fastest link takes 55 GB/s.
const MAX_WORKERS: usize = 8;
/// Bytes of one copy: long enough for the link's full rate, short enough that the pinned memory, two chunks per worker,
/// is allocated quickly.
const CHUNK_BYTES: usize = 4 << 20;

/// Device memory that is to be filled.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// Keeps the memory alive.
    _buffer: Arc<DeviceBuffer>,
    address: u64,
    bytes: usize,
}

impl Target {
    /// A target of `bytes` bytes at `address`, which must lie in `buffer`.
    pub fn new(buffer: Arc<DeviceBuffer>, address: u64, bytes: usize) -> Self {
        Self { _buffer: buffer, address, bytes }
    }
}

/// One copy to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    /// Index of the target.
    target: usize,
    /// First byte within the target.
    first: usize,
    bytes: usize,
    address: u64,
}

/// A thread's path to the device.
trait UploadWorker: Send {
    /// Lets `fill` write the bytes of `chunk` to a buffer that no copy in flight reads, and starts their copy.
    fn send<E: From<OpError>>(&mut self, chunk: &Chunk, fill: impl FnOnce(&mut [u8]) -> Result<(), E>)
    -> Result<(), E>;
}

/// An upload worker with pinned staging buffers.
struct PinnedWorker {
    staging: Staging,
    /// Stream of all workers: copies are ordered after earlier launches, such as the clearing of their target.
    stream: Arc<CudaStream>,
}

impl PinnedWorker {
    fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        Ok(Self { staging: Staging::new(stream.context(), CHUNK_BYTES)?, stream: stream.clone() })
    }
}

impl UploadWorker for PinnedWorker {
    fn send<E: From<OpError>>(
        &mut self,
        chunk: &Chunk,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = error("upload");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        let pinned = self.staging.take(&self.stream, chunk.bytes).map_err(&failed)?;
        fill(pinned)?;
        // SAFETY: the chunk lies in a buffer that its target keeps alive. The pinned bytes stay untouched until the
        // copy is done: `Staging` waits before it hands them out again, and `upload_all` before it frees them.
        unsafe { result::memcpy_htod_async(chunk.address, pinned, self.stream.cu_stream()) }.map_err(&failed)?;
        Ok(())
    }
}

impl Cuda {
    /// Fills every target and waits for the copies; called within the thread pool of the workers. `fill(i, first,
    /// bytes)` writes the bytes of target `i` from byte `first` on. The first error is returned; targets may then be
    /// partly filled.
    pub(crate) fn upload_all<E: From<OpError> + Send>(
        &mut self,
        targets: &[Target],
        fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        self.bind()?;
        let chunks = chunks(targets.iter().map(|target| (target.address, target.bytes)));
        let workers = MAX_WORKERS.min(rayon::current_num_threads()).min(chunks.len());
        let workers: Result<Vec<PinnedWorker>, _> =
            (0..workers).map(|_| PinnedWorker::new(&self.streams.main.stream)).collect();
        let mut workers = workers.map_err(error("cuda: pinned memory"))?;
        let filled = drive(&mut workers, &chunks, fill);
        // Needed after an error, because copies in flight read the workers' memory.
        let arrived = self.synchronize("upload");
        filled.and(arrived.map_err(E::from))
    }
}

fn chunks(targets: impl Iterator<Item = (u64, usize)>) -> Vec<Chunk> {
    let cut = |(target, (address, bytes)): (usize, (u64, usize))| {
        (0..bytes).step_by(CHUNK_BYTES).map(move |first| Chunk {
            target,
            first,
            bytes: CHUNK_BYTES.min(bytes - first),
            address: address + first as u64,
        })
    };
    targets.enumerate().flat_map(cut).collect()
}

/// Sends every chunk. A worker takes the next chunk when it is ready, so no worker waits for another.
fn drive<W: UploadWorker, E: From<OpError> + Send>(
    workers: &mut [W],
    chunks: &[Chunk],
    fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    workers.par_iter_mut().with_max_len(1).try_for_each(|worker| {
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let sent = worker.send(chunk, |buffer| fill(chunk.target, chunk.first, buffer));
            if sent.is_err() {
                next.store(chunks.len(), Ordering::Relaxed);
                return sent;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use rayon::ThreadPoolBuilder;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    /// Simulated device memory from address 0, and the number of chunks that arrived.
    struct Device {
        memory: Mutex<Vec<u8>>,
        arrived: AtomicUsize,
    }

    /// A worker that copies synchronously, but not before `after` chunks of other workers have arrived.
    struct TestWorker<'a> {
        device: &'a Device,
        after: usize,
        sent: usize,
    }

    impl UploadWorker for TestWorker<'_> {
        fn send<E: From<OpError>>(
            &mut self,
            chunk: &Chunk,
            fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
        ) -> Result<(), E> {
            let mut buffer = vec![0; chunk.bytes];
            fill(&mut buffer)?;
            let start = Instant::now();
            while self.device.arrived.load(Ordering::Relaxed) < self.after {
                assert!(start.elapsed() < Duration::from_secs(60), "the other workers wait for this one");
                std::thread::yield_now();
            }
            self.device.memory.lock().unwrap()[chunk.address as usize..][..chunk.bytes].copy_from_slice(&buffer);
            self.device.arrived.fetch_add(1, Ordering::Relaxed);
            self.sent += 1;
            Ok(())
        }
    }

    /// Expected value of byte `at` of target `i`.
    fn byte(i: usize, at: usize) -> u8 {
        rng::bits(i as u64, at as u64 / 997) as u8
    }

    /// Uploads targets of these sizes, with gaps between them, with one worker per entry of `after`; returns the memory
    /// and the number of chunks of each worker.
    fn run(
        sizes: &[usize],
        after: &[usize],
        fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), OpError> + Send + Sync,
    ) -> (Result<(), OpError>, Vec<u8>, Vec<usize>) {
        let starts = sizes.iter().scan(5, |end, bytes| {
            let start = *end;
            *end += *bytes as u64 + 3;
            Some(start)
        });
        let chunks = chunks(starts.zip(sizes.iter().copied()));
        let memory = vec![0xee; sizes.iter().map(|n| n + 3).sum::<usize>() + 5];
        let device = Device { memory: Mutex::new(memory), arrived: AtomicUsize::new(0) };
        let worker = |after: &usize| TestWorker { device: &device, after: *after, sent: 0 };
        let mut workers: Vec<_> = after.iter().map(worker).collect();
        let pool = ThreadPoolBuilder::new().num_threads(after.len()).build().unwrap();
        let result = pool.install(|| drive(&mut workers, &chunks, fill));
        let sent = workers.iter().map(|worker| worker.sent).collect();
        (result, device.memory.into_inner().unwrap(), sent)
    }

    #[test]
    fn every_byte_arrives_once_and_no_worker_waits_for_another() {
        let sizes = [1, CHUNK_BYTES, 0, 3 * CHUNK_BYTES + 77, CHUNK_BYTES - 1, 12];
        let fill = |i: usize, first: usize, out: &mut [u8]| {
            out.iter_mut().enumerate().for_each(|(at, to)| *to = byte(i, first + at));
            Ok(())
        };
        let (result, memory, sent) = run(&sizes, &[0, 7, 0], fill);
        result.unwrap();
        assert_eq!(sent.iter().sum::<usize>(), 8);
        assert!(sent[1] <= 1, "the worker that was blocked sent {} chunks", sent[1]);
        let mut expected = vec![0xee; 5];
        for (i, bytes) in sizes.into_iter().enumerate() {
            expected.extend((0..bytes).map(|at| byte(i, at)));
            expected.extend([0xee; 3]);
        }
        assert!(memory == expected, "a byte is wrong");
    }

    #[test]
    fn the_first_error_stops_every_worker() {
        let fill = |_: usize, first: usize, _: &mut [u8]| match first {
            0 => Err(OpError { op: "read", message: "gone".to_owned() }),
            _ => Ok(()),
        };
        let (result, _, sent) = run(&[4 * CHUNK_BYTES], &[0], fill);
        assert_eq!(result.unwrap_err().message, "gone");
        assert_eq!(sent, [0], "chunks after the error");
    }
}
