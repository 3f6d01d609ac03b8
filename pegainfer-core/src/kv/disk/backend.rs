//! Choice of the backend.

use super::config::{DiskBackend, DiskConfig};
use super::error::DiskError;
use super::files::{Files, Media};
use super::format::Geometry;
use super::memory::SlotMemory;
use super::queue::Queue;
#[cfg(target_os = "linux")]
use super::ring::Ring;
use super::threads;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Maximum number of threads of the pool.
const MAX_THREADS: usize = 16;

/// A started backend.
pub(super) struct Backend<M> {
    pub queue: Arc<Queue<M>>,
    /// The threads that serve the queue.
    pub threads: Vec<JoinHandle<()>>,
    /// Why io_uring is not used; `None` if it is used, or was not asked for.
    pub no_ring: Option<String>,
}

/// Starts the backend of the configuration.
pub(super) fn start<M: SlotMemory>(
    config: &DiskConfig,
    files: Arc<Files>,
    geometry: Geometry,
) -> Result<Backend<M>, DiskError> {
    let no_ring = match config.backend {
        DiskBackend::Threads => None,
        backend => match start_ring(config, &files, geometry) {
            Ok(ring) => return Ok(ring),
            Err(error) if backend == DiskBackend::Ring => return Err(DiskError::Start(error)),
            Err(error) => Some(error.to_string()),
        },
    };
    Ok(Backend { no_ring, ..start_threads(config, files, geometry)? })
}

#[cfg(target_os = "linux")]
fn start_ring<M: SlotMemory>(
    config: &DiskConfig,
    files: &Arc<Files>,
    geometry: Geometry,
) -> std::io::Result<Backend<M>> {
    let ring = Ring::new(config.depth)?;
    let queue = Arc::new(Queue::new(config.queue, config.depth / 2, ring.doorbell()));
    let threads = vec![ring.start(&queue, files.clone(), geometry)?];
    Ok(Backend { queue, threads, no_ring: None })
}

#[cfg(not(target_os = "linux"))]
fn start_ring<M: SlotMemory>(_: &DiskConfig, _: &Arc<Files>, _: Geometry) -> std::io::Result<Backend<M>> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "it is a part of Linux"))
}

/// Starts a pool of threads.
pub(super) fn start_threads<M: SlotMemory>(
    config: &DiskConfig,
    media: Arc<dyn Media>,
    geometry: Geometry,
) -> Result<Backend<M>, DiskError> {
    let count = config.depth.min(MAX_THREADS);
    let queue = Arc::new(Queue::new(config.queue, count / 2, Box::new(|| ())));
    let threads = threads::start(&queue, &media, geometry, count).map_err(DiskError::Start)?;
    Ok(Backend { queue, threads, no_ring: None })
}
