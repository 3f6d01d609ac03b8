//! Threads and memory for the images of all requests: `--max-image-memory`, half of it for decoders, half for the
//! pictures of open requests. Files that other servers send have an eighth more.
//!
//! A request takes memory for all of its fetched files first, then for all of its pictures, and then for one decoder
//! after the other, so that no two requests wait for each other. Tenants take turns.

use super::recent::RecentPictures;
use crate::error::ApiError;
use crate::fair_queue::{MAX_WAIT, Permits, QueueError, QueueLimits, Slots};
use crate::tenant::Tenant;
use std::thread::available_parallelism;

/// Maximum number of images that are decoded at the same time.
const MAX_THREADS: usize = 4;
/// Bytes that a decoder may take for a pixel: progressive JPEG, WebP and GIF.
const DECODER_BYTES: u64 = 12;
/// Bytes of the pixels of a token.
const TOKEN_BYTES: u64 = 3 * 32 * 32;
/// Bytes of one permit.
const UNIT: u64 = 1 << 10;

/// Threads and memory for images.
#[derive(Debug)]
pub struct ImageMemory {
    limit: u64,
    threads: Slots,
    decoders: Slots,
    pictures: Slots,
    files: Slots,
    /// Bytes of `files`.
    file_bytes: u64,
    /// Pictures of recent requests, an eighth more.
    pub recent: RecentPictures,
}

impl ImageMemory {
    /// Memory of `limit` bytes.
    pub fn new(limit: u64) -> Self {
        let threads = available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let slots = |permits: usize| Slots::new(QueueLimits::new(permits, (permits / 4 * 3).max(1)), MAX_WAIT);
        let half = usize::try_from(limit / 2 / UNIT).unwrap_or(usize::MAX).max(1);
        let recent = RecentPictures::new(usize::try_from(limit / 8).unwrap_or(usize::MAX));
        Self {
            limit,
            threads: slots(threads),
            decoders: slots(half),
            pictures: slots(half),
            files: slots(units(limit / 8)),
            file_bytes: limit / 8,
            recent,
        }
    }

    /// Waits for the memory of `files` files that a request fetches, each of at most `max_bytes`. Returns the number of
    /// bytes that all of them may have together.
    pub async fn files(&self, tenant: Tenant, files: usize, max_bytes: usize) -> Result<(Permits, usize), ApiError> {
        let bytes = (files as u64).saturating_mul(max_bytes as u64).min(self.file_bytes / 4);
        let permits = self.files.acquire(tenant, units(bytes)).await.map_err(|error| self.busy(error))?;
        Ok((permits, usize::try_from(bytes).unwrap_or(usize::MAX)))
    }

    /// Waits for the memory of pictures of `tokens` tokens.
    pub async fn pictures(&self, tenant: Tenant, tokens: usize) -> Result<Permits, ApiError> {
        let permits = self.pictures.acquire(tenant, units(tokens as u64 * TOKEN_BYTES)).await;
        permits.map_err(|error| self.busy(error))
    }

    /// Waits for a thread, and for the memory of a decoder of `pixels` pixels.
    pub async fn decoder(&self, tenant: Tenant, pixels: u64) -> Result<[Permits; 2], ApiError> {
        let thread = self.threads.acquire(tenant, 1).await.map_err(|error| self.busy(error))?;
        let memory = self.decoders.acquire(tenant, units(pixels.saturating_mul(DECODER_BYTES))).await;
        Ok([thread, memory.map_err(|error| self.busy(error))?])
    }

    fn busy(&self, error: QueueError) -> ApiError {
        let limit = self.limit;
        ApiError::overloaded(format!(
            "the images of open requests take all of the {limit} bytes that they may take together \
             (--max-image-memory): {error}; try again later"
        ))
    }
}

/// Permits for this many bytes.
pub fn units(bytes: u64) -> usize {
    usize::try_from(bytes / UNIT).unwrap_or(usize::MAX).max(1)
}
