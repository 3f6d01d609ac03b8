//! Which instruction set the CPU kernels use, chosen at run time.

use std::fmt;

/// An instruction-set path of the CPU kernels, best last. Results are bit-identical between runs and batch shapes on
/// one path; paths differ from each other in rounding only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, any target.
    Portable,
    /// AVX2 and FMA: bf16 widened to f32.
    Avx2,
    /// AVX-512 (F, BW, VL): bf16 widened to f32. `vdpbf16ps` is not used: on the Intel cores that have it, it issues every
    /// other cycle, so it does the work of one f32 FMA port where two are free (measured, see `linear::avx512`).
    Avx512,
    /// AMX bf16 tiles (and AVX-512 for what is not a matrix product).
    Amx,
}

impl Isa {
    /// Every path, worst first.
    const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// The fastest path of this machine.
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// The paths of this machine, worst first; [`Isa::Portable`] is always among them.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this process may run this path. For AMX this also asks Linux for the tile state, which is idempotent and
    /// holds for every thread of the process; the question costs one system call (about 0.1 us).
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
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
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The name that logs, benchmarks and options use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
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

/// Asks Linux for permission to use AMX tile data. It is refused where CPU or kernel lack AMX. CPUID is left out on
/// purpose: a virtual machine traps it, and every CPU with tile data so far has the bf16 product too (one CPUID leaf
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

/// AMX needs an operating system that grants the tile state; we know how to ask Linux only.
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
