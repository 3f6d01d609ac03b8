//! Properties of a GPU by which kernels are chosen.

use pegainfer_core::cuda::GpuInfo;
use pegainfer_core::exec::Activations;

/// Generation of GPUs, as far as the choice of kernels depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Compute capability 8.0 and earlier: A100.
    Ampere,
    /// 8.6 and 8.7: GeForce 30.
    AmpereGeForce,
    /// 8.9: L4, L40, GeForce 40.
    Ada,
    /// 9.0: H100, H200. The only one that runs code for sm_90a (wgmma).
    Hopper,
    /// 10.x: B200, B300.
    Blackwell,
    /// 11.0 and later: Thor, GeForce 50.
    BlackwellGeForce,
}

impl Architecture {
    /// Architecture of a compute capability, major and minor.
    pub fn of(capability: (i32, i32)) -> Self {
        match capability {
            (..=7, _) | (8, ..=5) => Self::Ampere,
            (8, 6..=8) => Self::AmpereGeForce,
            (8, _) => Self::Ada,
            (9, _) => Self::Hopper,
            (10, _) => Self::Blackwell,
            _ => Self::BlackwellGeForce,
        }
    }

    /// FLOPs of one multiprocessor in a cycle: dense GEMMs of bf16, sums in f32.
    fn flops_a_cycle(self) -> f64 {
        match self {
            Self::Ampere => 2048.0,
            Self::AmpereGeForce => 512.0,
            Self::Ada => 1024.0,
            Self::Hopper => 4096.0,
            Self::Blackwell => 8192.0,
            Self::BlackwellGeForce => 512.0,
        }
    }
}

/// Available functions of cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CublasLt {
    /// The library is missing.
    Missing,
    /// GEMMs of bf16.
    Bf16,
    /// Also FP8 GEMMs with block scales, from version 12.9 on.
    BlockScales,
}

/// A GPU in the numbers that choose kernels and their grids.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Generation.
    pub architecture: Architecture,
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    pub shared_memory: usize,
    /// Bytes of the L2 cache.
    pub l2: usize,
    /// Peak FLOP/s of dense bf16 GEMMs with sums in f32.
    pub flops: f64,
    /// Peak bytes a second of the memory.
    pub bandwidth: f64,
    /// cuBLASLt.
    pub cublaslt: CublasLt,
    /// True if the build has Triton kernels.
    pub triton: bool,
    /// Activations of GEMMs with group-quantised weights; [`gpu`](super::gpu()) takes those of its `Exec`.
    pub activations: Activations,
}

/// A card with its published figures. Tests and plans name it.
#[derive(Debug)]
struct Card {
    /// Words of the name reported by the driver.
    name: &'static str,
    gpu: Gpu,
}

/// Published figures of a card.
const fn card(
    name: &'static str,
    architecture: Architecture,
    multiprocessors: usize,
    shared_kib: usize,
    l2_mib: usize,
    (teraflops, gigabytes): (f64, f64),
) -> Card {
    let gpu = Gpu {
        architecture,
        multiprocessors,
        shared_memory: shared_kib << 10,
        l2: l2_mib << 20,
        flops: 1e12 * teraflops,
        bandwidth: 1e9 * gigabytes,
        cublaslt: CublasLt::BlockScales,
        triton: cfg!(triton_kernels),
        activations: Activations::Exact,
    };
    Card { name, gpu }
}

/// Multiprocessors, KiB of shared memory a block, MiB of L2, TFLOP/s of dense bf16 with sums in f32, GB/s.
const CARDS: [Card; 7] = [
    card("H200", Architecture::Hopper, 132, 227, 50, (989.4, 4800.0)),
    card("H100", Architecture::Hopper, 132, 227, 50, (989.4, 3350.0)),
    card("A100", Architecture::Ampere, 108, 163, 40, (312.0, 2039.0)),
    card("L4", Architecture::Ada, 58, 99, 48, (121.0, 300.0)),
    card("RTX 4090", Architecture::Ada, 128, 99, 72, (165.2, 1008.0)),
    card("B200", Architecture::Blackwell, 148, 227, 126, (2250.0, 8000.0)),
    card("RTX 5090", Architecture::BlackwellGeForce, 170, 99, 96, (209.5, 1792.0)),
];

impl Gpu {
    /// The card that plans without a device are for.
    pub const PLANNED: Self = CARDS[0].gpu;

    /// A card by its name: H200, H100 (both SXM), A100 (80 GB), L4, RTX 4090, B200, RTX 5090.
    pub fn named(name: &str) -> Option<Self> {
        CARDS.iter().find(|card| card.name == name).map(|card| card.gpu)
    }

    /// The GPU described by the driver. Rates are the published ones for a card of the table, otherwise those of its
    /// highest clocks, which are up to 8 % too high.
    pub fn of(info: &GpuInfo, cublaslt: CublasLt) -> Self {
        let architecture = Architecture::of(info.capability);
        let cycle = architecture.flops_a_cycle() * info.multiprocessors as f64;
        let (flops, bandwidth) = match known(info) {
            Some(card) => (card.flops, card.bandwidth),
            None => (cycle * info.clock, info.bandwidth),
        };
        let GpuInfo { multiprocessors, shared_memory, l2, .. } = *info;
        let (triton, activations) = (cfg!(triton_kernels), Activations::Exact);
        Self { architecture, multiprocessors, shared_memory, l2, flops, bandwidth, cublaslt, triton, activations }
    }

    /// True if code for sm_90a runs.
    pub fn is_hopper(&self) -> bool {
        self.architecture == Architecture::Hopper
    }

    /// True for data-centre cards since Hopper: multiprocessors have 228 KB of shared memory, and the GPU has large
    /// groups of multiprocessors.
    pub fn is_data_centre(&self) -> bool {
        matches!(self.architecture, Architecture::Hopper | Architecture::Blackwell)
    }
}

/// The card of the table with the driver's name and number of multiprocessors ("NVIDIA H100 PCIe" has fewer).
fn known(info: &GpuInfo) -> Option<Gpu> {
    let words: Vec<&str> = info.name.split([' ', '-']).collect();
    let is = |card: &&Card| {
        let name: Vec<&str> = card.name.split(' ').collect();
        words.windows(name.len()).any(|part| part == name) && card.gpu.multiprocessors == info.multiprocessors
    };
    CARDS.iter().find(is).map(|card| card.gpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, capability: (i32, i32), multiprocessors: usize, clock: f64, bandwidth: f64) -> GpuInfo {
        let (memory, free, driver) = (80 << 30, 80 << 30, 13000);
        let (shared_memory, l2) = (227 << 10, 50 << 20);
        let name = name.to_owned();
        GpuInfo { name, capability, multiprocessors, memory, free, driver, shared_memory, l2, clock, bandwidth }
    }

    #[test]
    fn a_known_card_has_its_published_rates() {
        let h200 = info("NVIDIA H200", (9, 0), 132, 1.98e9, 4.917e12);
        assert_eq!(Gpu::of(&h200, CublasLt::BlockScales), Gpu::PLANNED);
        let h100 = info("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9, 3.352e12);
        assert_eq!(Some(Gpu::of(&h100, CublasLt::BlockScales)), Gpu::named("H100"));
        let a100 = info("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9, 2.039e12);
        assert_eq!(Gpu::of(&a100, CublasLt::BlockScales).flops, 312e12);
        assert!(Gpu::named("nothing").is_none());
    }

    #[test]
    fn another_card_has_the_rates_of_its_clocks() {
        // An L40S is no L4, and an H100 for PCIe has fewer multiprocessors and a slower memory than one for SXM.
        let l40s = Gpu::of(&info("NVIDIA L40S", (8, 9), 142, 2.52e9, 8.64e11), CublasLt::BlockScales);
        assert_eq!((l40s.architecture, l40s.bandwidth), (Architecture::Ada, 8.64e11));
        assert!((l40s.flops / 366e12 - 1.0).abs() < 0.01, "{l40s:?}");
        let pcie = Gpu::of(&info("NVIDIA H100 PCIe", (9, 0), 114, 1.755e9, 2.039e12), CublasLt::BlockScales);
        assert_eq!(pcie.bandwidth, 2.039e12);
        // The clocks of the cards of the table must also give their published rates.
        for (name, clock) in [("H100", 1.83e9), ("A100", 1.41e9), ("B200", 1.85e9), ("RTX 5090", 2.41e9)] {
            let gpu = Gpu::named(name).unwrap();
            let peak = gpu.architecture.flops_a_cycle() * gpu.multiprocessors as f64 * clock;
            assert!((peak / gpu.flops - 1.0).abs() < 0.01, "{name}: {peak}");
        }
    }

    #[test]
    fn capabilities_have_an_architecture() {
        let list = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)].map(Architecture::of);
        use Architecture::*;
        assert_eq!(list, [Ampere, AmpereGeForce, Ada, Hopper, Blackwell, Blackwell, BlackwellGeForce]);
    }
}
