//! Cards with their memory and peak rates.
//!
//! Rates are those of NVIDIA's datasheets and architecture whitepapers, without sparsity and with f32 accumulation, which
//! GeForce cards do at half the rate of f16 accumulation: 838 sparse f16 TFLOP/s of an RTX 5090 are 209.5 here. Workstation
//! and datacenter cards do not halve it. Compared in November 2026 with
//! - memory in MiB of H200, H100, A100, A10, L40S and L4: <https://thundergolfer.com/blog/nvidia-gpu-memory-capacity>;
//! - B200 at 1,000 W: <https://glennklockwood.com/garden/processors/B200>; H200: <https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html>;
//! - RTX 4090 and 5090: <https://waredb.com/processor/nvidia-geforce-rtx-4090>, <https://www.spheron.network/blog/nvidia-rtx-5090-specs/>;
//! - A10 and A10G: <https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/>; RTX PRO 6000's bandwidth:
//!   <https://gpu.name/posts/nvidia-unveils-rtx-pro-6000-blackwell-gpu-with-24-064-cores-and-96gb-memory>.
//!
//! Not compared with a page: H20, H100 NVL and PCIe, L40, RTX A6000, RTX 6000 Ada, RTX 4080, 3090 and 3060.

/// A card.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Card {
    /// Name, as part of the name that the driver reports.
    pub name: &'static str,
    /// Memory in MiB, as the driver reports it.
    pub mib: u64,
    /// Dense bf16 rate with f32 accumulation in TFLOP/s.
    pub tflops: f64,
    /// Memory bandwidth in GB/s.
    pub gbs: f64,
}

/// Cards of the compute capabilities that the kernels are compiled for. A name that contains another one comes before it.
pub static CARDS: [Card; 24] = [
    card("B200", 183_359, 2250.0, 8000.0),
    card("H200 NVL", 143_771, 835.0, 4800.0),
    card("H200", 143_771, 989.0, 4800.0),
    card("H100 NVL", 95_830, 835.0, 3938.0),
    card("H100 PCIe", 81_559, 756.0, 2039.0),
    card("H100", 81_559, 989.0, 3352.0),
    card("H20", 97_871, 148.0, 4000.0),
    card("A100-SXM4-40GB", 40_960, 312.0, 1555.0),
    card("A100-PCIE-40GB", 40_960, 312.0, 1555.0),
    card("A100 80GB PCIe", 81_920, 312.0, 1935.0),
    card("A100", 81_920, 312.0, 2039.0),
    card("RTX PRO 6000", 97_887, 503.8, 1792.0),
    card("RTX 6000 Ada", 49_140, 364.2, 960.0),
    card("RTX A6000", 49_140, 154.8, 768.0),
    card("L40S", 46_068, 362.1, 864.0),
    card("L40", 46_068, 181.1, 864.0),
    card("L4", 23_034, 121.0, 300.0),
    card("A10G", 23_028, 70.0, 600.0),
    card("A10", 23_028, 125.0, 600.0),
    card("RTX 5090", 32_607, 209.5, 1792.0),
    card("RTX 4090", 24_564, 165.2, 1008.0),
    card("RTX 3090", 24_576, 71.2, 936.0),
    card("RTX 4080", 16_376, 97.5, 717.0),
    card("RTX 3060", 12_288, 25.5, 360.0),
];

/// Relative difference between the sizes of cards that are sold as equally large.
const TOLERANCE: f64 = 0.08;

const fn card(name: &'static str, mib: u64, tflops: f64, gbs: f64) -> Card {
    Card { name, mib, tflops, gbs }
}

impl Card {
    /// Memory in bytes.
    pub fn memory(&self) -> u64 {
        self.mib << 20
    }
}

/// The card of a device, such as `cuda:0 (NVIDIA H200)`.
pub fn of_device(device: &str) -> Option<&'static Card> {
    let device = letters(device);
    CARDS.iter().find(|card| device.contains(&letters(card.name)))
}

/// The card of this name, as people write it: `h200`, `4090`, `NVIDIA GeForce RTX 4090`.
pub fn named(name: &str) -> Option<&'static Card> {
    let short = letters(name);
    let ends = |card: &&Card| !short.is_empty() && letters(card.name).ends_with(&short);
    of_device(name).or_else(|| CARDS.iter().find(ends))
}

/// The cards with about this much memory, in bytes.
pub fn of_size(bytes: u64) -> impl Iterator<Item = &'static Card> {
    CARDS.iter().filter(move |card| (card.memory() as f64 / bytes as f64 - 1.0).abs() <= TOLERANCE)
}

/// Letters and digits in lower case.
fn letters(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_card_is_found_by_its_own_name() {
        for card in &CARDS {
            assert_eq!(named(card.name), Some(card));
            assert_eq!(of_device(&format!("cuda:0 (NVIDIA {})", card.name)), Some(card));
        }
    }

    #[test]
    fn people_have_several_names_for_a_card() {
        for (name, expected) in [
            ("h200", "H200"),
            ("nvidia-h200", "H200"),
            ("4090", "RTX 4090"),
            ("rtx4090", "RTX 4090"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("NVIDIA A100-SXM4-80GB", "A100"),
            ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
            ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("l4", "L4"),
            ("L40S", "L40S"),
        ] {
            assert_eq!(named(name).map(|card| card.name), Some(expected), "{name}");
        }
        assert!(["", "-", "tpu", "1080"].into_iter().all(|name| named(name).is_none()));
    }

    #[test]
    fn sizes_are_those_on_the_box() {
        let names = |bytes: u64| of_size(bytes).map(|card| card.name).collect::<Vec<_>>();
        assert_eq!(names(24 << 30), ["L4", "A10G", "A10", "RTX 4090", "RTX 3090"]);
        assert_eq!(names(24_000_000_000), names(24 << 30));
        assert_eq!(names(16 << 30), ["RTX 4080"]);
        assert!(names(1 << 30).is_empty());
    }
}
