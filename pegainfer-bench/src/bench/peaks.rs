//! Peak rates of devices, from their datasheets.

use crate::cards;

/// Peak rates of a device, which this machine need not have.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Peaks {
    /// Memory bandwidth in bytes per second, if known.
    pub read_bytes_s: Option<f64>,
    /// bf16 arithmetic in FLOP/s, if known.
    pub flop_s: Option<f64>,
}

impl Peaks {
    /// Datasheet rates of the device with this name; unknown for other devices.
    pub fn from_datasheet(device: &str) -> Self {
        let Some(card) = cards::of_device(device) else { return Self::default() };
        Self { read_bytes_s: Some(card.gbs * 1e9), flop_s: Some(card.tflops * 1e12) }
    }

    /// The given rates in GB/s and TFLOP/s; missing ones come from the datasheet.
    pub fn given_or_datasheet(read_gbs: Option<f64>, peak_tflops: Option<f64>, device: &str) -> Self {
        let datasheet = Self::from_datasheet(device);
        Self {
            read_bytes_s: read_gbs.map(|gbs| gbs * 1e9).or(datasheet.read_bytes_s),
            flop_s: peak_tflops.map(|tflops| tflops * 1e12).or(datasheet.flop_s),
        }
    }

    /// Minimum microseconds for an op that moves `bytes` bytes and computes `flops` operations; `None` unless both
    /// rates are known.
    pub fn floor_us(&self, bytes: u64, flops: u64) -> Option<f64> {
        Some((bytes as f64 / self.read_bytes_s?).max(flops as f64 / self.flop_s?) * 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_looked_up() {
        let h200 = Peaks { read_bytes_s: Some(4.8e12), flop_s: Some(989e12) };
        assert_eq!(Peaks::from_datasheet("cuda (NVIDIA H200)"), h200);
        assert_eq!(Peaks::from_datasheet("cuda (NVIDIA H100 PCIe)").flop_s, Some(756e12));
        assert_eq!(Peaks::from_datasheet("cuda (NVIDIA A10)").read_bytes_s, Some(600e9));
        assert_eq!(Peaks::from_datasheet("cuda (NVIDIA A2)"), Peaks::default());
        assert_eq!((h200.floor_us(4_800_000_000, 1), h200.floor_us(1, 989_000_000_000)), (Some(1000.0), Some(1000.0)));
        assert_eq!(Peaks { flop_s: None, ..h200 }.floor_us(1, 1), None);
    }
}
