//! Hashes of the sources of kernels, launchers and choices: times measured with other sources are stale.

use pegainfer_core::exec::Device;

/// Models that share their kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Qwen3 and Qwen3.5.
    Qwen,
    /// DeepSeek-V4, which has its own kernels and some of the others.
    DeepSeekV4,
}

const CPU_QWEN: &str = env!("KERNELS_CPU_QWEN");
const CPU_DEEPSEEK_V4: &str = env!("KERNELS_CPU_DEEPSEEK_V4");
const CUDA_QWEN: &str = env!("KERNELS_CUDA_QWEN");
const CUDA_DEEPSEEK_V4: &str = env!("KERNELS_CUDA_DEEPSEEK_V4");

/// Hash of the sources that compute the steps of these models on a device, 16 hexadecimal digits.
pub fn hash(device: Device, family: Family) -> &'static str {
    match (device, family) {
        (Device::Cuda, Family::Qwen) => CUDA_QWEN,
        (Device::Cuda, Family::DeepSeekV4) => CUDA_DEEPSEEK_V4,
        (_, Family::Qwen) => CPU_QWEN,
        (_, Family::DeepSeekV4) => CPU_DEEPSEEK_V4,
    }
}

/// True if a hash belongs to this program.
pub fn is_current(hash: &str) -> bool {
    [CPU_QWEN, CPU_DEEPSEEK_V4, CUDA_QWEN, CUDA_DEEPSEEK_V4].contains(&hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_and_family_has_a_hash_of_its_own() {
        let mut hashes = [CPU_QWEN, CPU_DEEPSEEK_V4, CUDA_QWEN, CUDA_DEEPSEEK_V4];
        assert!(hashes.iter().all(|hash| hash.len() == 16 && is_current(hash)));
        hashes.sort_unstable();
        assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(hash(Device::Cuda, Family::Qwen), CUDA_QWEN);
        assert!(!is_current(""));
    }
}
