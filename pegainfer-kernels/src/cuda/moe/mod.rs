//! Launchers of `ops::moe`.

mod experts;
mod grouped;
mod route;

pub(crate) use experts::experts;
pub(crate) use route::route;
