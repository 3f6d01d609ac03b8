//! Minimum rate of a body: a download that trickles in must end.

use std::io::{Error, ErrorKind, Read};
use std::time::{Duration, Instant};

/// Minimum rate of a body, measured over a window.
#[derive(Debug, Clone, Copy)]
pub struct MinRate {
    /// Minimum number of bytes per window.
    pub bytes: u64,
    /// Length of a window.
    pub window: Duration,
}

impl Default for MinRate {
    fn default() -> Self {
        Self { bytes: 60 << 10, window: Duration::from_secs(60) }
    }
}

/// A body that fails below the minimum rate. The inner reader must end each read in time.
pub(super) struct Paced<R> {
    body: R,
    rate: MinRate,
    window: Instant,
    /// Bytes in the current window.
    bytes: u64,
}

impl<R> Paced<R> {
    pub(super) fn new(body: R, rate: MinRate) -> Self {
        Self { body, rate, window: Instant::now(), bytes: 0 }
    }
}

impl<R: Read> Read for Paced<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.body.read(buffer)?;
        self.bytes += count as u64;
        let passed = self.window.elapsed();
        if count > 0 && passed >= self.rate.window {
            // One read may take longer than a window. Its bytes count for all of that time.
            if (self.bytes as f64) < self.rate.bytes as f64 * (passed.as_secs_f64() / self.rate.window.as_secs_f64()) {
                let message = format!("the hub sends too slowly: {} bytes in {:.0?}", self.bytes, passed);
                return Err(Error::new(ErrorKind::TimedOut, message));
            }
            (self.window, self.bytes) = (Instant::now(), 0);
        }
        Ok(count)
    }
}
