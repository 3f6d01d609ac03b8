//! Memory shared by several GPUs of one process: each other's, and a few words of host memory.

use super::memory::PinnedBuffer;
use super::{Cuda, error};
use crate::tensor::{DType, OpError, Tensor};
use cudarc::driver::{result, sys};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// Name in errors.
const PEERS: &str = "cuda: peer access";

/// Lets each of `gpus` access the memory of all others, including later allocations. The error names the first pair
/// that the hardware does not connect.
pub fn enable_peer_access(gpus: &[&Cuda]) -> Result<(), OpError> {
    let pairs = gpus.iter().flat_map(|gpu| gpus.iter().map(move |peer| (gpu, peer)));
    for (gpu, peer) in pairs.filter(|(gpu, peer)| gpu.context.ordinal() != peer.context.ordinal()) {
        let mut possible = 0;
        let (device, peer_device) = (gpu.context.cu_device(), peer.context.cu_device());
        // SAFETY: the driver writes one int to a valid address.
        unsafe { sys::cuDeviceCanAccessPeer(&mut possible, device, peer_device) }.result().map_err(error(PEERS))?;
        if possible == 0 {
            let (gpu, peer) = (gpu.context.ordinal(), peer.context.ordinal());
            return Err(OpError { op: PEERS, message: format!("GPU {gpu} cannot access the memory of GPU {peer}") });
        }
        gpu.bind()?;
        // SAFETY: both contexts are alive; the one of `gpu` is current.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.context.cu_ctx(), 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            status => status.result().map_err(error(PEERS))?,
        }
    }
    Ok(())
}

/// Words of page-locked host memory, zero at first, that the host and all GPUs of the process read and write.
pub struct HostWords {
    pinned: PinnedBuffer,
    count: usize,
}

// SAFETY: all access goes through atomics.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// `count` words, freed with `gpu`'s context.
    pub fn new(gpu: &Cuda, count: usize) -> Result<Self, OpError> {
        gpu.bind()?;
        let pinned = PinnedBuffer::new(&gpu.context, count * size_of::<u32>());
        Ok(Self { pinned: pinned.map_err(error("cuda: pinned memory"))?, count })
    }

    /// Address of the words on every GPU: with unified addresses, which all 64-bit systems have, the host address.
    pub fn address(&self) -> u64 {
        self.pinned.slice().as_ptr() as u64
    }

    fn word(&self, i: usize) -> &AtomicU32 {
        assert!(i < self.count, "word {i} of {}", self.count);
        let first = self.pinned.slice().as_ptr().cast_mut().cast::<u32>();
        // SAFETY: the word lies within the buffer, which is page-aligned and lives as long as `self`; no reference to
        // its bytes is kept.
        // its bytes is kept.
        unsafe { AtomicU32::from_ptr(first.add(i)) }
    }

    /// Reads a word, and orders it before later reads.
    pub fn load(&self, i: usize) -> u32 {
        self.word(i).load(Ordering::Acquire)
    }

    /// Copies words from `first` on to the elements of `tensor`, on the current stream; nobody may write them before they
    /// have left, for which `self` must live.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn copy_out(&self, gpu: &Cuda, first: usize, tensor: &mut Tensor) -> Result<(), OpError> {
        let words = tensor.elements();
        assert!(first + words <= self.count && tensor.dtype() == DType::U32, "words outside of the buffer");
        // SAFETY: the words lie within the buffer, and the tensor has that many.
        let copied = unsafe {
            let from = std::slice::from_raw_parts(self.pinned.slice().as_ptr().cast::<u32>().add(first), words);
            result::memcpy_htod_async(tensor.device(), from, gpu.stream().cu_stream())
        };
        copied.map_err(error("cuda: copies"))
    }

    /// Writes a word.
    pub fn store(&self, i: usize, value: u32) {
        self.word(i).store(value, Ordering::Release);
    }
}

impl fmt::Debug for HostWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostWords({})", self.count)
    }
}
