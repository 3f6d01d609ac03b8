//! Formats to which weights are rounded when they are loaded.

/// Format to which bf16 weights are rounded when they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtLoad {
    /// e4m3 with a scale for each block of 128 x 128.
    Fp8,
    /// Symmetric integers of 4 bits, with a scale for each 128 columns of a row, or 64 or 32 if rows are no multiple of
    /// 128.
    Int4,
}

impl AtLoad {
    /// Name, as the flag has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
        }
    }
}
