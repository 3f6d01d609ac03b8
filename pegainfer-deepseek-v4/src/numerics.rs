//! The roundings of the reference that a run applies.

use pegainfer_core::tensor::DType;

/// The precision of everything that the weights do not fix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numerics {
    /// Dtype of activations and of a request's state: bf16 or f32.
    pub activations: DType,
    /// Inputs of FP8 and FP4 matrices are rounded to FP8, one scale for each 128 values of a token.
    pub quantize_activations: bool,
    /// Keys and compressed entries have the roundings that the model was trained with: FP8 outside of the rotated part,
    /// FP4 in the indexer. Without, they are stored as computed.
    pub quantize_kv: bool,
}

impl Numerics {
    /// The roundings of DeepSeek's own inference code.
    pub const REFERENCE: Self = Self { activations: DType::Bf16, quantize_activations: true, quantize_kv: true };

    /// f32 without any rounding of activations, equal to transformers in f32.
    pub const F32: Self = Self { activations: DType::F32, quantize_activations: false, quantize_kv: false };
}
