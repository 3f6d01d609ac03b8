//! Which instruction set a CPU kernel uses, chosen at run time.

/// An instruction-set path of the CPU kernels, best last. Results are bit-identical between runs and batch shapes on
/// one path; paths differ from each other in rounding only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, any target.
    Portable,
    /// AVX2 and FMA: bf16 widened to f32.
    Avx2,
    /// AVX-512 with bf16 dot products.
    Avx512Bf16,
    /// AMX bf16 tiles (and AVX-512 for what is not a matrix product).
    Amx,
}
