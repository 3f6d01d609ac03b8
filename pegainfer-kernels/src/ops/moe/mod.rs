//! A mixture of experts as an MLP: each token goes through the few experts that a router chooses for it, and through a
//! shared one if the model has that.

mod expert_stack;
mod experts;
mod route;
mod route_spec;
mod router;

pub use expert_stack::Experts;
pub use experts::experts;
pub use route::route;
pub use route_spec::RouteSpec;
pub use router::router;
