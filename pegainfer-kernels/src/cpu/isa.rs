//! Which instruction set a CPU kernel uses: the type lives in pegainfer-core, because `Exec` holds it.

pub use pegainfer_core::isa::Isa;
