//! Many tensors to the device at once: several threads fill pinned memory of their own while the copy engine empties it.

use super::memory::DeviceBuffer;
use super::staging::Staging;
use super::{Cuda, error};
use crate::tensor::OpError;
use cudarc::driver::{CudaStream, DriverError, result};
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that fill, at most. One reads about 5 GB/s out of the page cache, and the fastest link takes 55.
const LANES: usize = 8;
/// Bytes of one copy: long enough for the link's full rate, short enough that the pinned memory, two pieces a lane, is
/// allocated in no time.
const PIECE_BYTES: usize = 4 << 20;

/// Device memory that waits to be filled.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// Keeps the memory.
    _buffer: Arc<DeviceBuffer>,
    address: u64,
    bytes: usize,
}

impl Target {
    /// `bytes` bytes at `address`, which must lie in `buffer`.
    pub fn new(buffer: Arc<DeviceBuffer>, address: u64, bytes: usize) -> Self {
        Self { _buffer: buffer, address, bytes }
    }
}

/// What one copy brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    target: usize,
    /// Byte of the target.
    first: usize,
    bytes: usize,
    address: u64,
}

/// The way of one thread to the device.
trait Lane: Send {
    /// Lets `fill` write the bytes of `piece` where no copy in flight reads, and starts their copy.
    fn send<E: From<OpError>>(&mut self, piece: &Piece, fill: impl FnOnce(&mut [u8]) -> Result<(), E>)
    -> Result<(), E>;
}

/// A lane over pinned memory.
struct Pinned {
    staging: Staging,
    /// Of all lanes: copies come behind what was launched before, such as the clearing of their target.
    stream: Arc<CudaStream>,
}

impl Pinned {
    fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        Ok(Self { staging: Staging::new(stream.context(), PIECE_BYTES)?, stream: stream.clone() })
    }
}

impl Lane for Pinned {
    fn send<E: From<OpError>>(
        &mut self,
        piece: &Piece,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = error("upload");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        let pinned = self.staging.take(&self.stream, piece.bytes).map_err(&failed)?;
        fill(pinned)?;
        // SAFETY: the piece lies in a buffer that its target keeps; the pinned bytes stay untouched until the copy is
        // done, because `Staging` waits before it hands them out again, and `upload_all` before it frees them.
        unsafe { result::memcpy_htod_async(piece.address, pinned, self.stream.cu_stream()) }.map_err(&failed)?;
        Ok(())
    }
}

impl Cuda {
    /// Fills every target and waits for it; to be called on the threads that shall do it. `fill(i, first, bytes)` gives
    /// the bytes of target `i` from byte `first` on. Its first error is returned, and may leave targets half filled.
    pub(crate) fn upload_all<E: From<OpError> + Send>(
        &mut self,
        targets: &[Target],
        fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        self.bind()?;
        let pieces = pieces(targets.iter().map(|target| (target.address, target.bytes)));
        let lanes = LANES.min(rayon::current_num_threads()).min(pieces.len());
        let lanes: Result<Vec<Pinned>, _> = (0..lanes).map(|_| Pinned::new(&self.stream)).collect();
        let mut lanes = lanes.map_err(error("cuda: pinned memory"))?;
        let filled = drive(&mut lanes, &pieces, fill);
        // After an error, too: copies read the lanes' memory.
        let arrived = self.synchronize("upload");
        filled.and(arrived.map_err(E::from))
    }
}

fn pieces(targets: impl Iterator<Item = (u64, usize)>) -> Vec<Piece> {
    let cut = |(target, (address, bytes)): (usize, (u64, usize))| {
        (0..bytes).step_by(PIECE_BYTES).map(move |first| Piece {
            target,
            first,
            bytes: PIECE_BYTES.min(bytes - first),
            address: address + first as u64,
        })
    };
    targets.enumerate().flat_map(cut).collect()
}

/// Sends every piece. A lane takes the next one when it is ready for it, so that none waits for another.
fn drive<L: Lane, E: From<OpError> + Send>(
    lanes: &mut [L],
    pieces: &[Piece],
    fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    lanes.par_iter_mut().with_max_len(1).try_for_each(|lane| {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let sent = lane.send(piece, |room| fill(piece.target, piece.first, room));
            if sent.is_err() {
                next.store(pieces.len(), Ordering::Relaxed);
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

    /// Device memory that starts at address 0, and the pieces that came there.
    struct Device {
        memory: Mutex<Vec<u8>>,
        arrived: AtomicUsize,
    }

    /// Copies at once, but not before so many pieces of other lanes have arrived.
    struct Copying<'a> {
        device: &'a Device,
        after: usize,
        sent: usize,
    }

    impl Lane for Copying<'_> {
        fn send<E: From<OpError>>(
            &mut self,
            piece: &Piece,
            fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
        ) -> Result<(), E> {
            let mut room = vec![0; piece.bytes];
            fill(&mut room)?;
            let start = Instant::now();
            while self.device.arrived.load(Ordering::Relaxed) < self.after {
                assert!(start.elapsed() < Duration::from_secs(60), "the other lanes wait for this one");
                std::thread::yield_now();
            }
            self.device.memory.lock().unwrap()[piece.address as usize..][..piece.bytes].copy_from_slice(&room);
            self.device.arrived.fetch_add(1, Ordering::Relaxed);
            self.sent += 1;
            Ok(())
        }
    }

    /// What byte `at` of target `i` should be.
    fn byte(i: usize, at: usize) -> u8 {
        rng::bits(i as u64, at as u64 / 997) as u8
    }

    /// Targets of these sizes with gaps between them, sent over a lane for each of `after`: memory, and pieces of each lane.
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
        let pieces = pieces(starts.zip(sizes.iter().copied()));
        let memory = vec![0xee; sizes.iter().map(|n| n + 3).sum::<usize>() + 5];
        let device = Device { memory: Mutex::new(memory), arrived: AtomicUsize::new(0) };
        let lane = |after: &usize| Copying { device: &device, after: *after, sent: 0 };
        let mut lanes: Vec<_> = after.iter().map(lane).collect();
        let pool = ThreadPoolBuilder::new().num_threads(after.len()).build().unwrap();
        let result = pool.install(|| drive(&mut lanes, &pieces, fill));
        let sent = lanes.iter().map(|lane| lane.sent).collect();
        (result, device.memory.into_inner().unwrap(), sent)
    }

    #[test]
    fn every_byte_arrives_once_and_no_lane_waits_for_another() {
        let sizes = [1, PIECE_BYTES, 0, 3 * PIECE_BYTES + 77, PIECE_BYTES - 1, 12];
        let fill = |i: usize, first: usize, out: &mut [u8]| {
            out.iter_mut().enumerate().for_each(|(at, to)| *to = byte(i, first + at));
            Ok(())
        };
        let (result, memory, sent) = run(&sizes, &[0, 7, 0], fill);
        result.unwrap();
        assert_eq!(sent.iter().sum::<usize>(), 8);
        assert!(sent[1] <= 1, "the lane that was held sent {} pieces", sent[1]);
        let mut expected = vec![0xee; 5];
        for (i, bytes) in sizes.into_iter().enumerate() {
            expected.extend((0..bytes).map(|at| byte(i, at)));
            expected.extend([0xee; 3]);
        }
        assert!(memory == expected, "a byte is wrong");
    }

    #[test]
    fn the_first_error_stops_every_lane() {
        let fill = |_: usize, first: usize, _: &mut [u8]| match first {
            0 => Err(OpError { op: "read", message: "gone".to_owned() }),
            _ => Ok(()),
        };
        let (result, _, sent) = run(&[4 * PIECE_BYTES], &[0], fill);
        assert_eq!(result.unwrap_err().message, "gone");
        assert_eq!(sent, [0], "pieces after the error");
    }
}
