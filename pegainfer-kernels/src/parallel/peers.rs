//! Ranks on GPUs that access each other's memory.

use crate::cuda::collectives::{self, Algorithm, Grid, Link};
use crate::limits::collectives::{ALL_GATHER, ALL_REDUCE, MAX_RANKS, RECORD_WORDS, REDUCE_ADD_NORM, REDUCE_SCATTER};
use pegainfer_core::cuda::{Cuda, DeviceBuffer, HostWords, enable_peer_access};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{Communicator, aborted};
use pegainfer_core::tensor::{OpError, Tensor};
use std::sync::Arc;
use std::time::Duration;

/// Name in errors.
const CONNECT: &str = "connect";

/// One rank's end; its collectives are kernels on the stream of its GPU.
#[derive(Debug)]
pub struct Peers {
    rank: usize,
    link: Link,
    shared: Arc<Shared>,
}

/// Memory of all ranks; freed when the last of them is gone and all devices have completed their work.
#[derive(Debug)]
struct Shared {
    /// The abort word and the records of kernels that gave up; see [`collectives`](crate::limits::collectives).
    status: HostWords,
    /// One arena per rank.
    _arenas: Vec<DeviceBuffer>,
    timeout: Duration,
}

impl Shared {
    /// Arenas for `ranks` ranks on each of `gpus`, cleared.
    fn new(gpus: &[&Cuda], ranks: usize, timeout: Duration) -> Result<(Arc<Self>, Vec<u64>), OpError> {
        if !(2..=MAX_RANKS).contains(&ranks) {
            return Err(OpError {
                op: CONNECT,
                message: format!("{ranks} GPUs cannot be ranks of one model, 2 to {MAX_RANKS} can"),
            });
        }
        let arenas = gpus.iter().map(|gpu| gpu.zeroed(Link::arena_bytes(ranks))).collect::<Result<Vec<_>, _>>()?;
        // A peer may write as soon as it is connected.
        gpus.iter().try_for_each(|gpu| gpu.bind().and_then(|()| gpu.synchronize(CONNECT)))?;
        let addresses = arenas.iter().map(DeviceBuffer::address).collect();
        let status = HostWords::new(gpus[0], (1 + MAX_RANKS) * RECORD_WORDS)?;
        Ok((Arc::new(Self { status, _arenas: arenas, timeout }), addresses))
    }
}

fn grid_of(gpus: &[&Cuda]) -> Grid {
    Grid {
        multiprocessors: gpus.iter().map(|gpu| gpu.multiprocessors()).min().unwrap_or(1),
        clusters: gpus.iter().all(|gpu| gpu.capability() >= (9, 0)),
    }
}

impl Peers {
    /// The ends of the ranks on `gpus`. A wait for a peer ends after `timeout`. An error if the GPUs cannot access each
    /// other's memory.
    pub fn connect(gpus: &[&Cuda], timeout: Duration) -> Result<Vec<Self>, OpError> {
        enable_peer_access(gpus)?;
        let (shared, arenas) = Shared::new(gpus, gpus.len(), timeout)?;
        let grid = grid_of(gpus);
        let (status, nanoseconds) = (shared.status.address(), timeout.as_nanos() as u64);
        let link = |rank| Link::new(rank, &arenas, status, nanoseconds, grid);
        Ok((0..gpus.len()).map(|rank| Self { rank, link: link(rank), shared: shared.clone() }).collect())
    }

    /// Communicator of `rank` of `ranks`, alone on `gpu`: messages to a peer come back as the peer's.
    pub fn loop_back(gpu: &Cuda, rank: usize, ranks: usize, timeout: Duration) -> Result<Self, OpError> {
        let (shared, arenas) = Shared::new(&[gpu], ranks, timeout)?;
        let (status, nanoseconds) = (shared.status.address(), timeout.as_nanos() as u64);
        let link = Link::loop_back((rank, ranks), arenas[0], status, nanoseconds, grid_of(&[gpu]));
        Ok(Self { rank, link, shared })
    }

    /// Variant of [`all_reduce`](Communicator::all_reduce) with a given algorithm.
    pub fn all_reduce_by(&self, algorithm: Algorithm, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        collectives::all_reduce(exec, &self.link, Some(algorithm), x)
    }
}

impl Communicator for Peers {
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        collectives::all_reduce(exec, &self.link, None, x)
    }

    fn all_gather(&self, exec: &mut Exec, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError> {
        collectives::all_gather(exec, &self.link, part, whole)
    }

    fn reduce_scatter(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        collectives::reduce_scatter(exec, &self.link, x)
    }

    fn all_gather_rows(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        collectives::all_gather_rows(exec, &self.link, x)
    }

    fn reduce_add_norm(
        &self,
        exec: &mut Exec,
        partial: &mut Tensor,
        residual: &mut Tensor,
        norm: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<bool, OpError> {
        collectives::reduce_add_norm(exec, &self.link, partial, residual, norm, eps, out)
    }

    fn check(&self) -> Result<(), OpError> {
        let status = &self.shared.status;
        let record = RECORD_WORDS * (1 + self.rank);
        if status.load(record) != 0 {
            let [op, peer, epoch] = [1, 2, 3].map(|i| status.load(record + i));
            let op = match op {
                ALL_REDUCE => "all_reduce",
                ALL_GATHER => "all_gather",
                REDUCE_SCATTER => "reduce_scatter",
                REDUCE_ADD_NORM => "reduce_add_norm",
                _ => "all_gather_rows",
            };
            let message = format!("waited {:?} for rank {peer}, exchange {epoch}", self.shared.timeout);
            return Err(OpError { op, message });
        }
        if status.load(0) != 0 { Err(aborted()) } else { Ok(()) }
    }

    fn abort(&self) {
        self.shared.status.store(0, 1);
    }
}
