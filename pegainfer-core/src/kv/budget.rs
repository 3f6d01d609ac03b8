//! Number of KV blocks that fit the memory of a device.

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Total bytes.
    pub total: u64,
    /// Bytes not used by any process once everything but the pool is allocated.
    pub free: u64,
}

impl DeviceMemory {
    /// This memory with a total of `limit` bytes and the same number of bytes in use; unchanged without a limit.
    pub fn limited(self, limit: Option<u64>) -> Self {
        let total = limit.map_or(self.total, |limit| limit.min(self.total));
        Self { total, free: self.free.saturating_sub(self.total - total) }
    }

    /// Bytes left within `share` (0 to 1) of the memory; the rest stays free for kernels, graphs and cuBLASLt.
    pub fn left_of(self, share: f64) -> u64 {
        let used = self.total - self.free.min(self.total);
        ((self.total as f64 * share) as u64).saturating_sub(used)
    }

    /// Number of blocks of `block_bytes` that fit within `share`, at most `useful`; a sentence for the user if none
    /// fits.
    pub fn blocks(self, share: f64, block_bytes: u64, useful: usize) -> Result<usize, String> {
        match self.left_of(share) / block_bytes {
            0 => Err(format!(
                "--gpu-memory-utilization {share} of the GPU's {:.1} GB leaves nothing for the KV cache: {:.1} GB are in \
                 use, by this model or other programs; raise it, or lower --max-num-batched-tokens or --max-num-seqs",
                self.total as f64 / 1e9,
                (self.total - self.free) as f64 / 1e9
            )),
            fitting => Ok(usize::try_from(fitting).unwrap_or(useful).min(useful)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_counts_against_the_share() {
        let left = |total, free, share| DeviceMemory { total, free }.left_of(share);
        assert_eq!(left(1000, 1000, 0.9), 900);
        assert_eq!(left(1000, 600, 0.9), 500, "400 are used");
        assert_eq!(left(1000, 600, 1.0), 600, "never more than is free");
        assert_eq!(left(1000, 100, 0.9), 0, "another process has it");
        assert_eq!(left(1000, 50, 0.9), 0);
        // An H200 with Qwen3-4B: 150.1 GB, 10 GB of it taken by weights, workspace and context.
        assert_eq!(left(150_100_000_000, 140_100_000_000, 0.9), 125_090_000_000);
    }

    #[test]
    fn a_limit_leaves_what_is_used_as_it_is() {
        let memory = DeviceMemory { total: 1000, free: 900 };
        assert_eq!(memory.limited(Some(300)), DeviceMemory { total: 300, free: 200 });
        assert_eq!(memory.limited(Some(80)), DeviceMemory { total: 80, free: 0 });
        assert_eq!((memory.limited(Some(2000)), memory.limited(None)), (memory, memory));
    }

    #[test]
    fn the_pool_takes_what_is_left_but_no_more_than_is_useful() {
        let fit = |free, useful| DeviceMemory { total: 10_000, free }.blocks(0.9, 10, useful);
        assert_eq!(fit(10_000, 5000), Ok(900));
        assert_eq!(fit(4005, 5000), Ok(300));
        assert_eq!(fit(4000, 64), Ok(64));
        let error = fit(1000, 64).unwrap_err();
        assert!(error.contains("--gpu-memory-utilization 0.9") && !error.contains('\n'), "{error}");
    }
}
