//! Instruction sets of the CPU kernels, detected at run time.

use std::fmt;

/// An instruction-set path of the CPU kernels, best last. Results are bit-identical between runs and batch shapes on
/// one path; paths differ from each other in rounding only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, any target.
    Portable,
    /// ARM's NEON with dot products of bytes, for GEMMs with activations in int8; the other ops take plain Rust.
    Neon,
    /// AVX2 and FMA: bf16 widened to f32.
    Avx2,
    /// AVX-512 (F, BW, VL): bf16 widened to f32. `vdpbf16ps` is not used. Intel cores issue it every other cycle, so it
    /// has the throughput of one f32 FMA port, of which there are two (measured, see `linear::avx512`). On Zen 5 it has
    /// twice the throughput of the FMA.
    Avx512,
    /// AMX bf16 tiles for GEMMs, and AVX-512 for the other ops.
    Amx,
}

impl Isa {
    /// All paths, slowest first.
    const ALL: [Self; 5] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Amx];

    /// The fastest path that this machine supports.
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// The paths that this machine supports, slowest first; [`Isa::Portable`] is always among them.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// True if this process can use this path. For AMX, also requests the tile state from Linux; the request is
    /// idempotent, holds for all threads and costs one system call (about 0.1 us).
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_available() && amx_permitted(),
            _ => false,
        }
    }

    /// Name in logs, benchmarks and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Requests permission to use AMX tile data from Linux, which refuses if the CPU or the kernel lacks AMX. CPUID is not
/// checked, because a virtual machine traps it. All CPUs with tile data so far have bf16 tiles (one CPUID leaf
/// announces both; Sapphire Rapids was the first).
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_permitted() -> bool {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: arch_prctl with these arguments touches no memory of ours; `syscall` clobbers rcx and r11 only.
    unsafe {
        std::arch::asm!(
            "syscall",
            inout("rax") SYS_ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// AMX needs an operating system that grants the tile state; only Linux is supported.
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_permitted() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_is_the_last_of_the_available_paths() {
        let available = Isa::available();
        assert_eq!(available[0], Isa::Portable);
        assert!(available.is_sorted());
        assert_eq!(available.last(), Some(&Isa::best()));
        println!("available: {available:?}");
    }

    #[test]
    fn display_honours_the_width() {
        assert_eq!(format!("{:>8}|", Isa::Avx2), "    avx2|");
    }
}
