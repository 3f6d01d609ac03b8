//! Connects the ranks of a model: through process memory on CPUs, through peer memory on GPUs, or through NCCL if GPUs
//! cannot access each other's memory.

mod nccl;
mod peers;
mod planned;

pub use crate::cuda::collectives::Algorithm;
pub use nccl::Nccl;
pub use peers::Peers;

use crate::cuda::collectives::Link;
use crate::cuda::images;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::{Communicator, Local, LoopBack};
use pegainfer_core::tensor::OpError;
use planned::Planned;
use std::sync::Arc;
use std::time::Duration;

/// Memory that a CUDA context and the loaded kernels take, about.
pub const CONTEXT_BYTES: u64 = 600_000_000;

/// Timeout of an exchange on a GPU. The longest legitimate wait is for a peer that captures a graph.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Communicators of the ranks on these devices, in order. On GPUs, loads all kernels, because none may be loaded while
/// kernels wait for each other.
pub fn connect(execs: &mut [&mut Exec]) -> Result<Vec<Arc<dyn Communicator>>, OpError> {
    let on_gpus = execs.iter().all(|exec| exec.device() == Device::Cuda);
    if !on_gpus || execs.len() == 1 {
        return Ok(Local::new(execs.len()).into_iter().map(|end| Arc::new(end) as Arc<dyn Communicator>).collect());
    }
    let mut gpus = execs.iter_mut().map(|exec| exec.gpu()).collect::<Result<Vec<&mut Cuda>, _>>()?;
    for gpu in &mut gpus {
        gpu.preload(images::ALL)?;
    }
    let gpus: Vec<&Cuda> = gpus.iter().map(|gpu| &**gpu).collect();
    let why = match Peers::connect(&gpus, TIMEOUT) {
        Ok(ends) => return Ok(ends.into_iter().map(|end| Arc::new(end) as Arc<dyn Communicator>).collect()),
        Err(why) => why,
    };
    let ends = Nccl::connect(&gpus).map_err(|missing| OpError {
        op: "connect",
        message: format!("{why}, and without that several GPUs need NCCL: {}", missing.message),
    })?;
    log::warn!(
        "{}: the ranks exchange through NCCL, which takes tens of microseconds for each of the two exchanges of a layer; \
         decoding is slower than its weights allow",
        why.message
    );
    Ok(ends.into_iter().map(|end| Arc::new(end) as Arc<dyn Communicator>).collect())
}

/// Approximate bytes of a GPU that one of `ranks` ranks takes for its CUDA context, kernels and exchanges.
pub fn device_bytes(ranks: usize) -> u64 {
    CONTEXT_BYTES + exchange_bytes(ranks)
}

/// Bytes of a GPU that one of `ranks` ranks takes for its exchanges.
pub fn exchange_bytes(ranks: usize) -> u64 {
    if ranks > 1 { Link::arena_bytes(ranks) as u64 } else { 0 }
}

/// Communicator of `rank` of `ranks`, alone on its device: its own part stands in for every other rank's. It does the
/// work of one rank, for development and timing; results are not the model's. On `Meta` its exchanges are recorded as
/// those of GPUs.
pub fn loop_back(exec: &mut Exec, rank: usize, ranks: usize) -> Result<Arc<dyn Communicator>, OpError> {
    Ok(match exec.device() {
        Device::Cuda => Arc::new(Peers::loop_back(exec.gpu()?, rank, ranks, TIMEOUT)?),
        Device::Meta => Arc::new(Planned { ranks }),
        Device::Cpu(_) => Arc::new(LoopBack { rank, ranks }),
    })
}
