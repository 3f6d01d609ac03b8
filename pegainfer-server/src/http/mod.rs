//! HTTP server around a router: connections, TLS, hosts, keys, origins, request ids, drain.

mod acceptor;
pub mod connections;
pub mod cors;
pub mod deadline;
pub mod error_shape;
mod followed_body;
mod forwarded;
pub mod guard;
mod half_close;
pub mod hosts;
mod keys;
mod open_connections;
mod open_files;
pub mod request_id;
mod rights;
mod secret_file;
mod shares;
mod slot;
mod stall;
mod tls;

pub use connections::{Server, serve};
pub use cors::Cors;
pub use forwarded::TrustedProxies;
pub use hosts::AllowedHosts;
pub use keys::{ApiKeys, Secret};
pub use open_files::{OTHER_FILES, default_max_connections, max_open_files, raise_open_files};
pub use rights::Access;
pub use tls::Tls;

/// Maximum number of pending connections in the listen queue.
pub const BACKLOG: u32 = 1024;
