//! How many blocks a device has room for.

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMemory {
    /// All of it.
    pub total: u64,
    /// Not in use, by this process or any other, once all but the pool is allocated.
    pub free: u64,
}

impl DeviceMemory {
    /// Bytes that are left of `share` (0 to 1) of the memory; the rest of it stays free for kernels, graphs and cuBLASLt.
    pub fn left_of(self, share: f64) -> u64 {
        let used = self.total - self.free.min(self.total);
        ((self.total as f64 * share) as u64).saturating_sub(used)
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
        // An H200 with Qwen3-4B: 150.1 GB, of which weights, workspace and context take 10.
        assert_eq!(left(150_100_000_000, 140_100_000_000, 0.9), 125_090_000_000);
    }
}
