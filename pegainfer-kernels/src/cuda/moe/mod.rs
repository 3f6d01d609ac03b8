//! Launchers of `ops::moe`.

mod experts;
mod gemv;
mod grouped;
mod operands;
mod route;
mod wgmma;

pub(crate) use experts::experts;
pub(crate) use route::{route, router};
