//! Instruction set of a CPU kernel; the type is defined in pegainfer-core, because `Exec` holds it.

pub use pegainfer_core::isa::Isa;
