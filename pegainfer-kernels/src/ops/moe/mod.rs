//! A mixture of experts as an MLP: each token goes through the few experts that a router chooses for it, and through a
//! shared one if the model has that.

mod experts;
mod route;

pub use crate::moe_operands::{Experts, RouteSpec};
pub use experts::experts;
pub use route::route;
