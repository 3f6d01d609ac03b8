//! Ops of image encoders (vision transformers).
//!
//! Activations are bf16, or f32 for an encoder without rounding between ops. GEMMs give f32 sums, to which the next op
//! adds the bias: [`linear`](super::linear()) for bf16 activations, [`linear_f32`] for f32. These ops run on the CPU;
//! on a GPU they return an error.

mod add_bias;
mod add_positions;
mod copy_rows;
mod layer_norm;
mod linear_f32;
mod operands;
mod patch_embed;
mod rotate_grid;
mod segment_attention;

pub use crate::cpu::vision::patches::{PATCH, PATCH_VALUES};
pub use add_bias::{Gelu, add_bias, add_bias_residual, bias_gelu};
pub use add_positions::add_positions;
pub use copy_rows::copy_rows;
pub use layer_norm::layer_norm;
pub use linear_f32::linear_f32;
pub use patch_embed::patch_embed;
pub use rotate_grid::rotate_grid;
pub use segment_attention::{Segments, segment_attention};
