//! Element types of tensors in GGUF files, and the sizes of their blocks.

use std::fmt;

/// The element type of a tensor.
///
/// Tensors are rows of blocks; a block holds `values` elements in `bytes` bytes. Every type of the format is known, so
/// that a file with types that are not served is refused by their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorType {
    id: u32,
    name: &'static str,
    values: u32,
    bytes: u32,
}

macro_rules! types {
    ($($constant:ident = $id:literal, $values:literal, $bytes:literal;)*) => {
        /// Every type of the format.
        const ALL: &[TensorType] = &[$(TensorType::$constant,)*];
        #[allow(missing_docs, reason = "the names are those of the format")]
        impl TensorType {
            $(pub const $constant: Self =
                Self { id: $id, name: stringify!($constant), values: $values, bytes: $bytes };)*
        }
    };
}

// Name, id, values of a block, bytes of a block; ggml-common.h.
types! {
    F32 = 0, 1, 4;
    F16 = 1, 1, 2;
    Q4_0 = 2, 32, 18;
    Q4_1 = 3, 32, 20;
    Q5_0 = 6, 32, 22;
    Q5_1 = 7, 32, 24;
    Q8_0 = 8, 32, 34;
    Q8_1 = 9, 32, 36;
    Q2_K = 10, 256, 84;
    Q3_K = 11, 256, 110;
    Q4_K = 12, 256, 144;
    Q5_K = 13, 256, 176;
    Q6_K = 14, 256, 210;
    Q8_K = 15, 256, 292;
    IQ2_XXS = 16, 256, 66;
    IQ2_XS = 17, 256, 74;
    IQ3_XXS = 18, 256, 98;
    IQ1_S = 19, 256, 50;
    IQ4_NL = 20, 32, 18;
    IQ3_S = 21, 256, 110;
    IQ2_S = 22, 256, 82;
    IQ4_XS = 23, 256, 136;
    I8 = 24, 1, 1;
    I16 = 25, 1, 2;
    I32 = 26, 1, 4;
    I64 = 27, 1, 8;
    F64 = 28, 1, 8;
    IQ1_M = 29, 256, 56;
    BF16 = 30, 1, 2;
    TQ1_0 = 34, 256, 54;
    TQ2_0 = 35, 256, 66;
    MXFP4 = 39, 32, 17;
    NVFP4 = 40, 64, 36;
}

/// Types of weights that are served.
pub const SERVED: [TensorType; 13] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::IQ4_NL,
    TensorType::IQ4_XS,
];

impl TensorType {
    /// The type with this id in files; `None` if the format has none.
    pub fn from_id(id: u32) -> Option<Self> {
        ALL.iter().find(|kind| kind.id == id).copied()
    }

    /// Elements of a block.
    pub fn block_values(self) -> usize {
        self.values as usize
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.bytes as usize
    }

    /// True if weights of this type are served.
    pub fn is_served(self) -> bool {
        SERVED.contains(&self)
    }

    /// True if a block has more than one element.
    pub fn is_quantized(self) -> bool {
        self.values > 1
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
