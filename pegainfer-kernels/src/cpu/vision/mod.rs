//! Reference kernels of `ops::vision`.

pub mod attention;
pub mod bias;
pub mod layer_norm;
pub mod linear;
pub mod patches;
pub mod positions;
mod values;

pub use values::Value;
