//! Reference kernels of `ops::moe`.

pub mod experts;
pub mod route;
