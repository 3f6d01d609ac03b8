//! Ops of image encoders (vision transformers).
//!
//! Activations are bf16, or f32 for an encoder without rounding between ops. GEMMs give f32 sums, to which the next op
//! adds the bias: [`linear`](super::linear()) for bf16 activations, [`linear_f32`] for f32. A GPU has kernels for
//! bf16.

mod add_bias;
mod add_positions;
mod copy_rows;
mod grid_attention;
mod layer_norm;
mod linear_bias;
mod linear_f32;
mod operands;
mod rotate_grid;
mod segment_attention;
mod unfold_patches;

pub use crate::patches::{Grid, Segments};
pub use add_bias::{Gelu, add_bias, add_bias_residual, bias_gelu};
pub use add_positions::add_positions;
pub use copy_rows::copy_rows;
pub use grid_attention::{grid_attention, scratch_bytes};
pub use layer_norm::layer_norm;
pub use linear_bias::{Affine, Then, linear_bias};
pub use linear_f32::linear_f32;
pub use rotate_grid::rotate_grid;
pub use segment_attention::segment_attention;
pub use unfold_patches::{COPIES, PATCH, PATCH_VALUES, patch_weight, unfold_patches};
